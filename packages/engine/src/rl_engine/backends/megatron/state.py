"""What an initialised engine holds, and its micro-batches as the pipeline sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rl_engine.backends.megatron.bridge import plan
from rl_engine.backends.megatron.config import transformer_config
from rl_engine.backends.megatron.folder import SliceReader
from rl_engine.backends.megatron.layout import megatron_calls
from rl_engine.backends.megatron.model import Stage, StageModel, attach
from rl_engine.backends.megatron.optimizer import MASTER, STATES, STEP, ShardedAdamW
from rl_engine.backends.megatron.weights import export, local_parts, own_entries, read_into, shapes_of
from rl_engine.batch.cost import cost_model
from rl_engine.batch.load_balance import ModelReplicas
from rl_engine.batch.packed import one_token_row
from rl_engine.batch.results import AUX_LOSS, MicroBatchResults
from rl_engine.batch.step import apply_loss
from rl_engine.checkpoint import hf_folder
from rl_engine.checkpoint.dcp import CheckpointWriter
from rl_engine.model.logprobs import ScoreOptions
from rl_engine.types import ModelInit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_engine.backends.megatron.architecture import Architecture
    from rl_engine.backends.megatron.layout import Layout
    from rl_engine.backends.megatron.weights import Entry
    from rl_engine.base import LossFunction
    from rl_engine.batch.cost import CostModel
    from rl_engine.batch.packed import PackedRows
    from rl_engine.batch.step import BatchPlan
    from rl_engine.distributed.world import World
    from rl_engine.model.moe import ExpertLoad, Routing
    from rl_engine.types import EngineConfig


class State:
    """What an initialised engine holds."""

    def __init__(self, config: EngineConfig, source: Any, arch: Architecture, world: World, layout: Layout) -> None:
        dtype = hf_folder.DTYPES[config.precision]
        self.source, self.arch, self.world, self.layout = source, arch, world, layout
        self.entries = plan(arch, pp=layout.pp.size, vpp=layout.vpp, ep=layout.ep.size)
        self.experts = arch.experts
        self.cost = _cost(source, self.entries)
        self.replicas = _replicas(world, layout)
        self.schedule_step = 0
        self.writer = CheckpointWriter(world, is_async=config.async_checkpoints, timeout_s=config.timeout_s)
        with megatron_calls():
            settings = transformer_config(self.arch, config.parallel, dtype)
            chunks = [StageModel(settings, self.arch, layout, chunk) for chunk in range(layout.vpp)]
        self.stage = Stage(
            chunks,
            settings,
            self.arch,
            layout,
            inv_freq=_inverse_frequencies(source).to(world.device),
            wanted=ScoreOptions.of(config),
            recompute=config.activation_checkpointing,
        )
        self._read(self.stage.model, config)
        self.stage.to(world.device)
        self.stage.requires_grad_(config.optimizer is not None)
        self.stage.train(config.optimizer is not None)
        self.places: dict[str, torch.device] = dict.fromkeys(("model", "optimizer", "grad"), world.device)
        self.optimizer: ShardedAdamW | None = None
        if config.optimizer is not None:
            self.optimizer = ShardedAdamW(
                dict(self.stage.model.named_parameters()),
                own_entries(self.entries, layout),
                layout,
                config.optimizer,
                sequence_parallel=config.parallel.sequence_parallel,
            )

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """The model under its Hugging Face names."""
        parameters = dict(self.stage.model.named_parameters())
        like = next(iter(parameters.values())).detach()
        with self.world.together():
            yield from export(parameters, self.entries, self.arch, self.layout, like)

    def local_weights(self) -> dict[str, Tensor]:
        """This rank's part of the model under its Hugging Face names, cut tensors as DTensors."""
        return self._parts(dict(self.stage.model.named_parameters()))

    def described(self) -> dict[str, Tensor]:
        """Names and shapes of what a checkpoint of this engine holds, as tensors without memory."""
        shapes = {f"model.{name}": shape for name, shape in shapes_of(self.entries).items()}
        if self.optimizer is not None:
            for name, shape in shapes_of(self.entries).items():
                shapes |= {f"optim.{name}.{kind}": shape for kind in STATES} | {f"optim.{name}.{STEP}": ()}
        return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """This rank's part of the checkpoint. Collective."""
        kinds = self._state_by_kind()
        tensors = {f"model.{name}": part for name, part in self._parts(kinds.pop(MASTER)).items()}
        for kind, named in kinds.items():
            for name, part in self._parts(named).items():
                tensors[f"optim.{name}.{kind}"] = part
                assert self.optimizer is not None
                tensors[f"optim.{name}.{STEP}"] = torch.tensor(self.optimizer.num_steps)
        return tensors

    def take_checkpoint(self, tensors: dict[str, Tensor]) -> None:
        """What `checkpoint_tensors` gave, filled with other values, into the model and the optimizer."""
        kinds = self._state_by_kind()
        num_steps = 0.0
        for kind, named in kinds.items():

            def read(name: str, part: tuple[slice, ...], kind: str = kind) -> Tensor:
                found = tensors[f"model.{name}" if kind == MASTER else f"optim.{name}.{kind}"]
                return found.to_local() if isinstance(found, DTensor) else found

            read_into(named, self.entries, self.arch, self.layout, read)
        if self.optimizer is not None:
            num_steps = next(float(value) for name, value in tensors.items() if name.endswith(f".{STEP}"))
            self.optimizer.load_tensors(kinds, num_steps)

    def _state_by_kind(self) -> dict[str, dict[str, Tensor]]:
        """Tensors in the shapes of this rank's parameters: the parameters (float32 where trained so), and moments."""
        parameters: dict[str, Tensor] = dict(self.stage.model.named_parameters())
        return {MASTER: parameters} | (self.optimizer.tensors() if self.optimizer is not None else {})

    def _parts(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        return local_parts(named, self.entries, self.arch, self.layout)

    def move(self, device: torch.device, parts: dict[str, bool]) -> None:
        """Each part that is asked for and elsewhere."""
        home = self.world.device
        target = home if device == torch.device(home.type) else device  # no index: this rank's own
        moved = {part: wanted and self.places[part] != target for part, wanted in parts.items()}
        if self.optimizer is not None:
            self.optimizer.to(target, **moved)
        elif moved["model"]:
            self.stage.model.to(target)
        self.places |= {part: target for part, is_moved in moved.items() if is_moved}

    def _read(self, model: nn.Module, config: EngineConfig) -> None:
        parameters = dict(model.named_parameters())
        if config.init == ModelInit.RANDOM:
            # Every rank draws the whole model, in the fsdp backend's number format: weights depend on neither.
            drawn = hf_folder.parameter_dtype(config)
            whole = hf_folder.load_model(
                config.model_path, init=config.init, dtype=drawn, seed=config.seed, head=config.head
            )
            named: dict[str, Tensor] = revert_weight_conversion(whole, whole.state_dict())

            def read_drawn(name: str, part: tuple[slice, ...]) -> Tensor:
                return named[name][part]

            read_into(parameters, self.entries, self.arch, self.layout, read_drawn)
            return
        with SliceReader(
            config.model_path, shapes_of(self.entries), head=config.head, is_tied=self.arch.is_tied
        ) as read:
            read_into(parameters, self.entries, self.arch, self.layout, read)


class MicroBatches:
    """The micro-batches of one call, as the pipeline sees them."""

    def __init__(
        self,
        state: State,
        plan: BatchPlan,
        loss_function: LossFunction | None,
        load: ExpertLoad | None = None,
        counts: Tensor | None = None,
    ) -> None:
        """Prepare to run.

        Args:
            state: The engine's.
            plan: The batch.
            loss_function: None computes scores only.
            load: Of the experts, where their auxiliary loss is wanted.
            counts: (L, E) float64, to which the load of this rank's experts is added.
        """
        self.results = MicroBatchResults()
        self._state, self._plan = state, plan
        self._loss_function, self._load, self._counts = loss_function, load, counts

    def buffer(self, index: int) -> Tensor:
        """For what the piece before sends."""
        stage, state = self._state.stage, self._state
        weight = next(stage.parameters())
        return weight.new_empty((stage.num_tokens(self._packed(index)), 1, state.arch.hidden_size))

    def forward(self, chunk: int, index: int, received: Tensor | None) -> Tensor | None:
        """Hidden states, or from the last piece of all this micro-batch's share of the loss."""
        packed, stage = self._packed(index), self._state.stage
        is_idle = index >= len(self._plan.micro_batches)
        load = None if is_idle else self._load
        routing = stage.route(packed, load, is_counting=self._counts is not None)
        hidden = stage.hidden(chunk, packed, received, routing)
        if routing is not None and not is_idle:
            hidden = self._with_experts(hidden, routing)
        layout = self._state.layout
        if not layout.is_last_stage or chunk < layout.vpp - 1:
            return hidden
        scores = stage.score(hidden, packed)
        if is_idle:  # keeps the collectives company and adds nothing
            return scores.main.sum() * 0.0
        rows = self._plan.micro_batches[index]
        shares: dict[str, Tensor] = {}
        if self._loss_function is not None:
            columns = self._plan.batch.select(rows)
            shares = apply_loss(self._loss_function, packed, scores, self._plan.counts, columns)
        self.results.add(rows, scores, shares)
        return shares.get("loss")

    def _with_experts(self, hidden: Tensor, routing: Routing) -> Tensor:
        """Count where tokens went, and let the auxiliary loss of this stage's layers be differentiated."""
        if self._counts is not None:
            for layer, counts in routing.counts.items():
                self._counts[layer] += counts
        share = routing.aux_share()
        if share is None or self._load is None:
            return hidden
        self.results.add_shares({AUX_LOSS: share})
        return attach(hidden, self._load.coef * share)

    def _packed(self, index: int) -> PackedRows:
        is_idle = index >= len(self._plan.micro_batches)
        rows = (
            one_token_row(self._state.world.device)
            if is_idle
            else self._plan.batch.pack(self._plan.micro_batches[index])
        )
        return self._state.stage.padded(rows)


def _replicas(world: World, layout: Layout) -> ModelReplicas:
    """Ranks that work on the same rows are one copy; its last stage has the results. Collective."""
    speaks = layout.is_last_stage and layout.tp.rank == 0 and layout.cp.rank == 0
    places = world.exchange((layout.copy, speaks))
    leaders = {copy: rank for rank, (copy, is_leader) in enumerate(places) if is_leader}
    return ModelReplicas(
        replica_of=tuple(copy for copy, _ in places), leaders=tuple(leaders[copy] for copy in sorted(leaders))
    )


def _cost(source: Any, entries: list[Entry]) -> CostModel:
    trunk = shapes_of([entry for entry in entries if ".decoder.layers." in entry.parameter])
    return cost_model(source, trunk)


def _inverse_frequencies(config: Any) -> Tensor:
    """(D / 2,) float32, the rotary table that transformers makes from a config."""
    return LlamaRotaryEmbedding(config).inv_freq
