"""The engine of the `megatron` backend: a pipeline stage where other engines have a module that scores rows."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from rl_engine.backends.megatron import dist_checkpoint
from rl_engine.backends.megatron.adapters import (
    adapter_entries,
    adapters_of,
    describe_adapter,
    merged,
    start_adapters,
    stored_name,
)
from rl_engine.backends.megatron.architectures import check_divides, read_architecture
from rl_engine.backends.megatron.bridge import describe, takes_bridge
from rl_engine.backends.megatron.layout import (
    Layout,
    check_device,
    check_parallel,
    check_world,
    join_layout,
    leave_layout,
    megatron_calls,
    run_pipeline,
)
from rl_engine.backends.megatron.model import Stage, attach, check_layer_parts, check_transformer_engine, uses_ring
from rl_engine.backends.megatron.optimizer import MASTER, STATES, STEP, DistributedAdamW
from rl_engine.backends.megatron.weights import plan_weights, shapes_of
from rl_engine.batch.plan import AUX_LOSS, MTP_LOSS, MicroBatchResults, ModelReplicas
from rl_engine.checkpoint import hf_folder
from rl_engine.checkpoint.sharded import local_shards
from rl_engine.checkpoint.slices import open_folder
from rl_engine.errors import ConfigError
from rl_engine.layers.moe import check_aux
from rl_engine.layers.peft_lora import adapter_weights
from rl_engine.model.batch_runner import BatchRunner, score_rows
from rl_engine.model.export import TrainingState, WeightExport
from rl_engine.model.module_engine import Capabilities, EngineParts, ModuleBackend, ModuleEngine
from rl_engine.model.placement import Placement
from rl_engine.model.settings import check_adapter, check_candidates, check_float8, refuse_fsdp_only, refuse_muon
from rl_engine.types import EngineConfig, Fp8, Head, ModelInit, Precision, ShardSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from contextlib import AbstractContextManager

    from rl_engine.backends.megatron.architectures import Architecture
    from rl_engine.base import LossFunction
    from rl_engine.batch.packed import PackedRows
    from rl_engine.batch.plan import BatchPlan
    from rl_engine.distributed.world import World
    from rl_engine.layers.moe import ExpertLoad, Routing
    from rl_engine.model.scorer import BuiltModel, Scorer
    from rl_engine.types import OptimizerConfig, PeftConfig


class MegatronEngine(ModuleEngine):
    """See `Engine`. Every rank passes its own rows, whatever the layout; a step uses the gradients up.

    megatron-core keeps process groups per process: engines alive at the same time in one process share a layout.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(MegatronBackend(config))

    def save_dist_checkpoint(self, path: str | Path) -> None:
        """Write the policy's weights in Megatron-LM's format; see `dist_checkpoint.write_weights`. Collective.

        Raises:
            CheckpointError: it cannot be written; on every rank.
            ConfigError: the engine trains an adapter or has a scalar head, which the format has not.
        """
        built = self.parts.built
        if built.peft is not None or built.config.head != Head.LM:
            raise ConfigError("Megatron-LM's format has neither adapters nor scalar heads. Use save_model.")
        stage = stage_of(built)
        dist_checkpoint.write_weights(stage, path, stage.named_weights(), built.world)


class MegatronBackend(ModuleBackend):
    """See `ModuleBackend`: stages of megatron-core's layers."""

    capabilities = Capabilities(trains_mtp=True, has_transformer_engine=True, reads_dist_checkpoints=True)

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._layout: Layout | None = None

    def check(self, world_size: int) -> str | None:
        """See `ModuleBackend`."""
        config = self.config
        refuse_fsdp_only(config, "megatron")
        refuse_muon(config, "megatron")
        check_parallel(config.parallel)
        _, arch = self.read_config()
        check_divides(arch, config.parallel, is_ring=uses_ring(config, arch))
        self._check_adapter(arch)
        check_world(config.parallel, world_size)
        is_float8 = check_float8(config, "megatron", (Fp8.TENSORWISE, Fp8.BLOCKWISE, Fp8.MXFP8))
        if is_float8 and not config.transformer_engine:
            raise ConfigError(
                f"fp8 is {config.fp8} and transformer_engine is false, which alone makes such products. Set it to true."
            )
        check_candidates(config.num_candidates, arch.vocab_size)
        check_aux(config.router_aux_loss_coef, arch.experts)
        check_layer_parts(config, arch)
        return "the megatron backend feeds every row its prompt"

    def _check_adapter(self, arch: Architecture) -> None:
        config, layout = self.config, self.config.parallel
        if config.lora is None:
            return
        check_adapter(config)
        if config.lora.dropout and layout.tp > 1 and not layout.sequence_parallel:
            raise ConfigError(
                f"lora.dropout is {config.lora.dropout} and parallel.tp is {layout.tp}, whose ranks would drop "
                "different inputs of one token. Set parallel.sequence_parallel=true, or lora.dropout=0."
            )
        entries = plan_weights(arch, pp=layout.pp, vpp=layout.vpp, ep=layout.ep)
        adapter_entries(entries, describe_adapter(config)[1], config.lora.rank)

    def check_weights(self) -> None:
        """See `ModuleBackend`."""
        layout, (_, arch) = self.config.parallel, self.read_config()
        if self.config.dist_checkpoint is not None:
            dist_checkpoint.find_folder(self.config.dist_checkpoint, arch)
            return
        wanted = shapes_of(plan_weights(arch, pp=layout.pp, vpp=layout.vpp, ep=layout.ep))
        with open_folder(self.config, wanted, is_tied=arch.is_tied):
            pass

    @property
    def needs_group(self) -> bool:
        """See `ModuleBackend`."""
        return True

    def read_config(self) -> tuple[Any, Architecture]:
        """The folder's config, and the fields used of it."""
        source = hf_folder.read_config(Path(self.config.model_path))
        if takes_bridge(self.config, source.model_type) and not self.config.trains_mtp:
            return source, describe(source, self.config.head)
        return source, read_architecture(source, self.config.head, trains_mtp=self.config.trains_mtp)

    def build(self, world: World) -> tuple[Stage, PeftConfig | None]:
        """See `ModuleBackend`."""
        check_device()
        check_transformer_engine(self.config.fp8)
        if torch.cuda.is_available() and self.config.precision == Precision.FLOAT64:
            raise ConfigError("precision is float64, which megatron-core's optimizer does not take. Use float32.")
        source, arch = self.read_config()
        self._layout = join_layout(self.config.parallel, world, self.config.timeout_s)
        peft, adapted = (None, []) if self.config.lora is None else describe_adapter(self.config)
        stage = Stage(self.config, source, arch, self._layout, adapted)
        self._read_weights(stage, world)
        stage.to(world.device)
        is_trained = self.config.optimizer is not None
        if not adapted:
            stage.requires_grad_(is_trained)
        return stage.train(is_trained), peft

    def _read_weights(self, stage: Stage, world: World) -> None:
        config, weights = self.config, stage.weights
        named = stage.named_weights()
        adapters = {name: named.pop(name) for name in [*named] if weights.own[name].is_adapter}
        start_adapters(weights, adapters, config.seed)
        if config.init == ModelInit.RANDOM:
            # Every rank draws the whole model, in the fsdp backend's number format: weights depend on neither.
            drawn = hf_folder.parameter_dtype(config)
            whole = hf_folder.load_model(
                config.model_path,
                init=config.init,
                dtype=drawn,
                seed=config.seed,
                head=config.head,
            )
            drawn_weights: dict[str, Tensor] = revert_weight_conversion(whole, whole.state_dict())
            weights.read_into(named, lambda name, part: drawn_weights[name][part])
            return
        if config.dist_checkpoint is not None:
            for name in [name for name in named if weights.own[name].is_head]:
                named.pop(name).data.zero_()  # as for a folder without one
            folder = dist_checkpoint.find_folder(config.dist_checkpoint, stage.arch)
            dist_checkpoint.read_weights(stage, folder, named, world)
            return
        with open_folder(config, weights.shapes, is_tied=stage.arch.is_tied) as read:
            weights.read_into(named, read)

    def group_ranks(self, world: World) -> ModelReplicas:
        """Model replicas: ranks that work on the same rows. The last stage has the results."""
        layout = self._layout
        assert layout is not None
        is_leader = layout.is_last_stage and layout.tp.rank == 0 and layout.cp.rank == 0
        by_rank = world.exchange((layout.copy, is_leader))
        leaders = {copy: rank for rank, (copy, leads) in enumerate(by_rank) if leads}
        return ModelReplicas(
            replica_of=tuple(copy for copy, _ in by_rank), leaders=tuple(leaders[copy] for copy in sorted(leaders))
        )

    def make_optimizer(self, scorer: Scorer, config: OptimizerConfig) -> DistributedAdamW:
        """See `ModuleBackend`."""
        assert isinstance(scorer, Stage)
        return DistributedAdamW(scorer.chunks, scorer.weights.own, scorer.layout, config)

    def parts(self, built: BuiltModel) -> EngineParts:
        """See `ModuleBackend`."""
        return EngineParts(
            built=built,
            placement=BufferPlacement(built, grads_follow=False),
            runner=PipelineRunner(built),
            export=StageExport(built),
            state=StageState(built),
        )

    @contextmanager
    def _without_adapter(self, stage: Stage) -> Generator[None]:
        adapters = [*adapters_of(stage)]
        for adapter in adapters:
            adapter.is_on = False
        try:
            yield
        finally:
            for adapter in adapters:
                adapter.is_on = True

    def adapter_off(self, built: BuiltModel) -> AbstractContextManager[None] | None:
        """See `ModuleBackend`."""
        return None if built.peft is None else self._without_adapter(stage_of(built))

    def leave(self, world: World) -> None:
        """See `ModuleBackend`."""
        layout, self._layout = self._layout, None
        if layout is not None:
            leave_layout()
        super().leave(world)


def stage_of(built: BuiltModel) -> Stage:
    """The module of a megatron engine."""
    assert isinstance(built.scorer, Stage)
    return built.scorer


class BufferPlacement(Placement):
    """Placement of parameters and gradients that are slices of megatron-core's buffers."""

    def move(self, target: torch.device, *, model: bool = False, optimizer: bool = False, grad: bool = False) -> None:
        """See `Placement`."""
        parts = {"model": model, "optimizer": optimizer, "grad": grad}
        moved = {part: wanted and self.devices[part] != target for part, wanted in parts.items()}
        if isinstance(self._built.optimizer, DistributedAdamW):
            self._built.optimizer.to(target, **moved)
        elif moved["model"]:
            stage_of(self._built).model.to(target)
        self.devices |= {part: target for part, is_moved in moved.items() if is_moved}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # for other processes on this GPU: see `rl_engine.model.device_memory`


class PipelineRunner(BatchRunner):
    """Runner of micro-batches through the pipeline's stages."""

    def run(
        self,
        plan: BatchPlan,
        loss_function: LossFunction | None,
        load: ExpertLoad | None = None,
        counts: Tensor | None = None,
    ) -> MicroBatchResults:
        """See `BatchRunner`."""
        stage, embedding = stage_of(self._built), None
        if stage.arch.has_mtp and loss_function is not None and torch.is_grad_enabled():
            embedding = stage.embedding_of_the_last()
        work = MicroBatches(stage, plan, loss_function, load, counts, self.activations, embedding)
        with megatron_calls():
            run_pipeline(
                work,
                work.stage.chunks,
                plan.num_micro_batches,
                work.stage.layout,
                has_backward=torch.is_grad_enabled(),
            )
        stage.drop_routing()
        return work.results


class StageExport(WeightExport):
    """Weights of all stages, gathered."""

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """One parameter at a time is gathered; adapters, which are small, all before the first of them."""
        stage = stage_of(self._built)
        weights, named = stage.weights, stage.named_weights()
        if self._built.config.lora is None:
            yield from weights.export(named)
            return
        adapters = dict(weights.export(named, weights.adapters))
        if self._built.config.exports_adapter:
            heads = weights.export(named, [entry for entry in weights.entries if entry.is_head])
            yield from adapter_weights(adapters | dict(heads))
        else:
            yield from merged(weights.export(named), adapters, self._built.config.lora)

    def shards(self) -> Iterator[tuple[ShardSpec, Tensor]]:
        """Its layers, experts and tensor-parallel parts."""
        stage = stage_of(self._built)
        own = stage.weights.own
        policy = {name: tensor for name, tensor in stage.named_weights().items() if not own[name].is_mtp}
        return local_shards(stage.weights.local_parts(policy))

    def mtp_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightExport`."""
        stage = stage_of(self._built)
        if not stage.arch.has_mtp:
            yield from super().mtp_tensors()
            return
        weights, named = stage.weights, stage.named_weights()
        yield from weights.export(named, [entry for entry in weights.entries if entry.is_mtp])


class StageState(TrainingState):
    """Training state under the fsdp backend's names and in its shapes."""

    def described(self) -> dict[str, Tensor]:
        """See `TrainingState`."""
        weights = stage_of(self._built).weights
        shapes = {f"model.{self._stored(name)}": shape for name, shape in weights.shapes.items()}
        shapes |= {f"model.{name}": shape for name, shape in shapes_of(weights.adapters).items()}
        if self._built.optimizer is not None:
            heads = [entry for entry in weights.entries if entry.is_head]
            trained = [*weights.adapters, *heads] if self._built.peft is not None else weights.entries
            for name, shape in shapes_of([entry for entry in trained if not entry.is_buffer]).items():
                shapes |= {f"optim.{name}.{kind}": shape for kind in STATES} | {f"optim.{name}.{STEP}": ()}
        return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}

    def _stored(self, name: str) -> str:
        return stored_name(name, stage_of(self._built).adapted)

    def tensors(self) -> dict[str, Tensor]:
        """Names and shapes are the fsdp backend's."""
        weights, kinds = stage_of(self._built).weights, self._state_by_kind()
        parts = weights.local_parts(kinds.pop(MASTER))
        tensors = {f"model.{self._stored(name)}": part for name, part in parts.items()}
        for kind, named in kinds.items():
            for name, part in weights.local_parts(named).items():
                tensors[f"optim.{name}.{kind}"] = part
                tensors[f"optim.{name}.{STEP}"] = torch.tensor(self._sharded().num_steps)
        return tensors

    def take(self, tensors: dict[str, Tensor]) -> None:
        """See `TrainingState`."""
        joined = {
            name for entry in stage_of(self._built).weights.entries if entry.index is not None for name in entry.tensors
        }

        def read(kind: str, name: str, part: tuple[slice, ...]) -> Tensor:
            found = tensors[f"model.{self._stored(name)}" if kind == MASTER else f"optim.{name}.{kind}"]
            local = found.to_local() if isinstance(found, DTensor) else found
            if name not in joined:
                return local
            start = (part[0].start or 0) % len(local)  # ranks have equally many experts
            return local[start : start + 1]

        kinds = self._state_by_kind()
        for kind, named in kinds.items():
            stage_of(self._built).weights.read_into(named, partial(read, kind))
        if self._built.optimizer is not None:
            num_steps = next(float(value) for name, value in tensors.items() if name.endswith(f".{STEP}"))
            self._sharded().load_tensors(kinds, num_steps)

    def _state_by_kind(self) -> dict[str, dict[str, Tensor]]:
        """Tensors in the shapes of this rank's parameters: the parameters (float32 where trained so), and moments."""
        weights = stage_of(self._built).named_weights()
        if self._built.optimizer is None:
            return {MASTER: weights}
        state = self._sharded().tensors()
        return state | {MASTER: weights | state.get(MASTER, {})}

    def _sharded(self) -> DistributedAdamW:
        assert isinstance(self._built.optimizer, DistributedAdamW)
        return self._built.optimizer


class MicroBatches:
    """The micro-batches of one call, as the pipeline sees them."""

    def __init__(
        self,
        stage: Stage,
        plan: BatchPlan,
        loss_function: LossFunction | None,
        load: ExpertLoad | None,
        counts: Tensor | None,
        activations: Callable[[], AbstractContextManager[None]],
        embedding: Tensor | None = None,
    ) -> None:
        """Prepare to run; see `ModuleEngine`, and `Stage.mtp_loss` for the embedding where that is to be made."""
        self.results, self.stage = MicroBatchResults(), stage
        self._plan, self._loss_function, self._load, self._counts = plan, loss_function, load, counts
        self._activations, self._embedding = activations, embedding

    def forward(self, chunk: int, index: int, received: Tensor | None) -> Tensor:
        """Hidden states, or from the last piece of all this micro-batch's share of the loss (0 without one)."""
        with self._activations():
            return self._forward(chunk, index, received)

    def _forward(self, chunk: int, index: int, received: Tensor | None) -> Tensor:
        packed, stage, is_idle = self._packed(index), self.stage, self._plan.is_idle(index)
        routing = stage.route(packed, None if is_idle else self._load, is_counting=self._counts is not None)
        hidden = stage.hidden(chunk, packed, received, routing)
        if routing is not None and not is_idle:
            hidden = self._with_experts(hidden, routing)
        if not stage.layout.is_last_stage or chunk < stage.layout.vpp - 1:
            return hidden
        if self._embedding is not None:
            share = stage.mtp_loss(hidden, packed, self._plan.mask(index), self._embedding)
            self.results.add_shares({MTP_LOSS: share})
            hidden = attach(hidden, share)
        if is_idle:
            return stage.score(hidden, packed).scores.sum() * 0.0
        output, shares = score_rows(self._plan, index, self._loss_function, partial(stage.score, hidden, packed))
        self.results.add(self._plan.micro_batches[index], output, shares)
        return shares.get("loss", hidden.new_zeros(()))

    def _with_experts(self, hidden: Tensor, routing: Routing) -> Tensor:
        """Count where tokens went, and let the auxiliary loss of this stage's layers be differentiated."""
        if self._counts is not None:
            routing.add_counts(self._counts)
        share = routing.aux_share()
        if share is None or self._load is None:
            return hidden
        self.results.add_shares({AUX_LOSS: share})
        return attach(hidden, self._load.coef * share)

    def _packed(self, index: int) -> PackedRows:
        return self.stage.padded(self._plan.pack(index))
