"""The engine of the `megatron` backend."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rl_engine.backends.megatron.config import (
    check_divides,
    read_architecture,
    transformer_config,
)
from rl_engine.backends.megatron.layout import (
    check_parallel,
    check_world,
    join_layout,
    leave_layout,
    megatron_calls,
    run_pipeline,
)
from rl_engine.backends.megatron.model import Stage, StageModel, attach
from rl_engine.backends.megatron.optimizer import MASTER, STATES, STEP, ShardedAdamW
from rl_engine.backends.megatron.weights import (
    export,
    local_parts,
    own_entries,
    plan_weights,
    read_into,
    shapes_of,
)
from rl_engine.base import Engine, LossFunction, is_token_local
from rl_engine.batch.micro_batches import cost_model
from rl_engine.batch.plan import (
    AUX_LOSS,
    BatchPlan,
    MicroBatchResults,
    ModelReplicas,
    add_up,
    apply_loss,
    columns_of,
    plan_batch,
    work_of,
)
from rl_engine.batch.row_batch import VISUAL, RowBatch
from rl_engine.checkpoint import hf_folder
from rl_engine.checkpoint.sharded import CheckpointWriter, local_shards, restore
from rl_engine.checkpoint.slices import SliceReader
from rl_engine.distributed.world import expected_size, join_world
from rl_engine.errors import BatchError, ConfigError, EngineError
from rl_engine.model.engine import check_candidates, check_columns, mode, refuse_fsdp_only, settings_status
from rl_engine.model.logprobs import HeadLoss
from rl_engine.model.moe import ExpertLoad, check_aux, check_replay, counts_of_column
from rl_engine.optimizer import learning_rate
from rl_engine.types import EngineConfig, EngineOutput, Head, ModelInit, PeftConfig, ShardSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensordict import TensorDict

    from rl_engine.backends.megatron.layout import Layout
    from rl_engine.backends.megatron.weights import Architecture, Entry
    from rl_engine.batch.micro_batches import CostModel
    from rl_engine.batch.packed import PackedRows
    from rl_engine.distributed.world import World
    from rl_engine.model.moe import Routing


_NO_SHARING = "the megatron backend feeds every row its prompt"


class MegatronEngine(Engine):
    """See `Engine`. Every rank passes its own rows, whatever the layout; a step uses the gradients up.

    megatron-core keeps process groups per process: engines alive at the same time in one process share a layout.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._state: State | None = None

    # Building

    def check(self, world_size: int) -> dict[str, str]:
        """See `Engine`."""
        config = self._config
        _, arch = self._checked(world_size)
        if config.init == ModelInit.PRETRAINED:
            layout = config.parallel
            wanted = shapes_of(plan_weights(arch, pp=layout.pp, vpp=layout.vpp, ep=layout.ep))
            with SliceReader(config.model_path, wanted, head=config.head, is_tied=arch.is_tied):
                pass
        return settings_status(config, _NO_SHARING)

    def _checked(self, world_size: int) -> tuple[Any, Architecture]:
        """The folder's config, and what is taken from it, where nothing is to be refused."""
        config = self._config
        settings_status(config, _NO_SHARING)
        refuse_fsdp_only(config, "megatron")
        source = hf_folder.read_config(Path(config.model_path))
        check_parallel(config.parallel)
        arch = read_architecture(source, config.head)
        check_divides(arch, config.parallel)
        check_world(config.parallel, world_size)
        check_candidates(config.num_candidates, arch.vocab_size)
        check_aux(config.router_aux_loss_coef, arch.experts)
        return source, arch

    def initialize(self) -> None:
        """Build this rank's stage, read its part of the folder, and allocate the optimizer."""
        if self._state is not None:
            raise ConfigError("This engine is initialised already; make another one with create_engine.")
        config = self._config
        source, arch = self._checked(expected_size())
        world = join_world(timeout_s=config.timeout_s, needs_group=True)
        try:
            layout = join_layout(config.parallel, world, config.timeout_s)
        except ConfigError:
            world.leave()
            raise
        try:
            self._state = State(config, source, arch, world, layout)
        except BaseException:
            self._state = None
            leave_layout()
            world.leave()
            raise
        torch.manual_seed(config.seed + world.rank)

    def close(self) -> None:
        """Free everything and take down groups made here."""
        state, self._state = self._state, None
        if state is None:
            return
        try:
            state.writer.wait()
        finally:
            leave_layout()
            state.world.leave()

    # Modes and places

    def train_mode(self) -> Any:
        """Everything onto the device; back on exit."""
        self._optimizer("be trained")
        state = self._built()
        return mode(self, state.stage, state.world.device, state.places, train=True, grad=True)

    def eval_mode(self) -> Any:
        """The model onto the device, gradients off; back on exit."""
        state = self._built()
        return mode(self, state.stage, state.world.device, state.places, train=False, grad=False)

    def to(self, device: torch.device | str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move what is asked for; what is there already is not touched."""
        self._built().move(torch.device(device), {"model": model, "optimizer": optimizer, "grad": grad})
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # for other processes on this GPU: see `rl_engine.device_memory`

    # A step

    def optimizer_zero_grad(self) -> None:
        """Set every gradient to zero."""
        state = self._built()
        if state.optimizer is not None:
            state.optimizer.zero_grad()

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> EngineOutput:
        """Plan with all ranks, run the micro-batches through the pipeline, add up their shares."""
        has_backward = loss_function is not None and not forward_only
        if has_backward:
            self._optimizer("run a backward pass (say forward_only=True)")
        state, needs_mask = self._built(), loss_function is not None

        def make(rows: TensorDict) -> RowBatch:
            feeds_last = self._config.head == Head.REWARD
            batch = RowBatch(rows, needs_mask=needs_mask, device=state.world.device, feeds_last=feeds_last)
            self._check_fit(batch)
            return batch

        budget = self._config.max_tokens_per_gpu * self._config.parallel.cp
        what = work_of(loss_function, has_backward)
        plan = plan_batch(state.world, state.replicas, data, make, budget, state.cost, what)
        load = self._expert_load(plan) if has_backward else None
        work = MicroBatches(state, plan, loss_function, load)
        self._run(work, plan.num_micro_batches, has_backward=has_backward)
        shares = work.results.metric_values(is_leader=state.world.rank in state.replicas.leaders)
        metrics = add_up(state.world, shares) if loss_function is not None else {}
        place, main = data.get("completion_token_ids").device, "logprobs" if self._config.head == Head.LM else "values"
        columns = columns_of(state.world, plan, work.results, place, main)
        return EngineOutput(columns=columns, metrics=metrics, num_micro_batches=plan.num_micro_batches)

    def optimizer_step(self) -> float:
        """Reduce, clip, then AdamW."""
        optimizer = self._optimizer("step")
        with self._built().world.together():
            return optimizer.step()

    def learning_rate(self) -> float:
        """Where the schedule stands."""
        return self._optimizer("have a schedule").rate

    def lr_scheduler_step(self) -> float:
        """Move the schedule on by one."""
        optimizer, state = self._optimizer("have a schedule"), self._built()
        state.schedule_step += 1
        return self._apply_schedule(optimizer)

    def _run(self, work: MicroBatches, count: int, *, has_backward: bool) -> None:
        """All micro-batches through the pipeline."""
        state, before = self._built(), torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self._config.matmul_precision)
        try:
            with state.world.together(), torch.set_grad_enabled(has_backward), megatron_calls():
                run_pipeline(work, count, state.layout, has_backward=has_backward)
        finally:
            torch.set_float32_matmul_precision(before)

    def _expert_load(self, plan: BatchPlan) -> ExpertLoad | None:
        """Where the whole batch's tokens go: as `routed_experts` says, or found out by a forward pass. Collective."""
        state, coef = self._built(), self._config.router_aux_loss_coef
        if not coef or state.experts is None:
            return None
        if plan.own.routed_experts() is not None:
            counts = counts_of_column(plan.own, state.experts)
        else:
            size = (state.experts.num_layers, state.experts.num_experts)
            counts = torch.zeros(size, dtype=torch.float64, device=state.world.device)
            work = MicroBatches(state, plan, None, counts=counts)
            self._run(work, plan.num_micro_batches, has_backward=False)
        dist.all_reduce(counts)
        return ExpertLoad(counts=counts, coef=coef)

    def _check_fit(self, batch: RowBatch) -> None:
        arch = self._built().arch
        longest = max(batch.lengths, default=0)
        if longest > arch.context:
            raise BatchError(f"A row has {longest} tokens; the model's context is {arch.context}. Shorten the row.")
        check_columns(batch, arch.vocab_size, self._config.head)
        for name in VISUAL:
            if batch.has(name):
                raise BatchError(f"The megatron backend takes no images; use the fsdp backend, or drop {name}.")
        check_replay(batch, self._built().experts)

    # Weights out, and to disk and back

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, Tensor]], PeftConfig | None]:
        """Full tensors in `precision` on every rank; one parameter at a time is gathered."""
        return self._built().export(), None

    def get_local_shards(self) -> Iterator[tuple[ShardSpec, Tensor]]:
        """This rank's layers, experts and tensor-parallel parts."""
        return local_shards(self._built().local_weights())

    def save_model(self, path: str | Path) -> None:
        """Rank 0 writes; the others take part in gathering."""
        state = self._built()
        weights = {name: tensor.cpu() for name, tensor in state.export() if state.world.rank == 0}
        if state.world.rank == 0:
            source = self._config.model_path
            hf_folder.write_model(path, hf_folder.empty_model(source, head=self._config.head), weights, source)
        state.world.barrier()

    def save_checkpoint(self, path: str | Path, step: int) -> None:
        """See `rl_engine.checkpoint.sharded`; the names and shapes are the fsdp backend's."""
        state = self._built()
        state.writer.save(path, state.checkpoint_tensors(), step, state.schedule_step)

    def load_checkpoint(self, path: str | Path) -> int:
        """A frozen engine reads the model alone. A rank that was not there when it was written seeds itself anew."""
        state = self._built()
        state.writer.wait()
        tensors = state.checkpoint_tensors()
        manifest = restore(path, tensors, state.world, self._config.seed, state.described())
        state.take_checkpoint(tensors)
        state.schedule_step = manifest.schedule_step
        if state.optimizer is not None:
            self._apply_schedule(state.optimizer)
        return manifest.step

    # Small helpers

    def _apply_schedule(self, optimizer: ShardedAdamW) -> float:
        assert self._config.optimizer is not None
        rate = learning_rate(self._config.optimizer, self._built().schedule_step)
        optimizer.set_rate(rate)
        return rate

    def _built(self) -> State:
        if self._state is None:
            raise EngineError("The engine holds no model; call initialize() first (close() is final).")
        return self._state

    def _optimizer(self, what: str) -> ShardedAdamW:
        optimizer = self._built().optimizer
        if optimizer is None:
            raise ConfigError(f"A frozen engine cannot {what}; give EngineConfig an optimizer.")
        return optimizer


class State:
    """What an initialised engine holds."""

    def __init__(self, config: EngineConfig, source: Any, arch: Architecture, world: World, layout: Layout) -> None:
        dtype = hf_folder.DTYPES[config.precision]
        self.source, self.arch, self.world, self.layout = source, arch, world, layout
        self.entries = plan_weights(arch, pp=layout.pp.size, vpp=layout.vpp, ep=layout.ep.size)
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
            wanted=config,
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
        is_idle = self._plan.is_idle(index)
        load = None if is_idle else self._load
        routing = stage.route(packed, load, is_counting=self._counts is not None)
        hidden = stage.hidden(chunk, packed, received, routing)
        if routing is not None and not is_idle:
            hidden = self._with_experts(hidden, routing)
        layout = self._state.layout
        if not layout.is_last_stage or chunk < layout.vpp - 1:
            return hidden
        if is_idle:
            return stage.score(hidden, packed).scores.sum() * 0.0
        rows, loss_function = self._plan.micro_batches[index], self._loss_function
        shares: dict[str, Tensor] = {}
        if loss_function is None:
            output = stage.score(hidden, packed)
        else:
            columns = self._plan.batch.select(rows)
            head_loss = HeadLoss(lambda output: apply_loss(loss_function, output, columns))
            is_one_pass = torch.is_grad_enabled() and is_token_local(loss_function)
            output = stage.score(hidden, packed, head_loss if is_one_pass else None)
            shares = head_loss.shares or apply_loss(loss_function, output, columns)
        self.results.add(rows, output, shares)
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
        return self._state.stage.padded(self._plan.pack(index))
