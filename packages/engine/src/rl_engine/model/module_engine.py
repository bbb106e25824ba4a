"""Engines around one scoring module, sharded or not: steps, devices, weights and checkpoints.

A backend says what it cannot honour and builds the module, a `Scorer`. Nothing here asks which library's layers are
inside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_engine.base import Engine
from rl_engine.batch.gradient_free import forward_backward
from rl_engine.batch.plan import ModelReplicas
from rl_engine.checkpoint import hf_folder
from rl_engine.checkpoint.sharded import CheckpointWriter, restore
from rl_engine.distributed.world import World, expected_size, join_world
from rl_engine.errors import ConfigError, EngineError
from rl_engine.layers.peft_lora import adapter_layers
from rl_engine.model.adapter_pool import AdapterPool
from rl_engine.model.batch_runner import BatchRunner
from rl_engine.model.device_memory import has_float8, has_gpu, idle_accelerator
from rl_engine.model.export import TrainingState, WeightExport
from rl_engine.model.placement import Placement
from rl_engine.model.scorer import BuiltModel, Scorer
from rl_engine.model.settings import settings_status
from rl_engine.optimizer import StepOptimizer, apply_adam, learning_rate, module_optimizer
from rl_engine.types import Bridge, EngineConfig, EngineOutput, Fp8, ModelInit, OptimizerConfig, PeftConfig, ShardSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from tensordict import TensorDict
    from torch import Tensor

    from rl_engine.base import LossFunction
    from rl_engine.layers.row_adapters import RowAdapters
    from rl_engine.types import AdamParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Settings that a backend takes and others refuse."""

    trains_mtp: bool = False
    """`mtp=train`."""
    has_transformer_engine: bool = False
    """`transformer_engine=false`: it builds layers from its modules otherwise."""
    reads_dist_checkpoints: bool = False
    """`dist_checkpoint`."""
    has_loss_in_head: bool = True
    """Whether token-local losses are computed in the head; False: the model makes whole logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """Parts of an initialized engine."""

    built: BuiltModel
    placement: Placement
    runner: BatchRunner
    export: WeightExport
    state: TrainingState

    @classmethod
    def of(cls, built: BuiltModel) -> EngineParts:
        """Parts that suit parameters that are plain tensors or DTensors."""
        return cls(
            built=built,
            placement=Placement(built),
            runner=BatchRunner(built),
            export=WeightExport(built),
            state=TrainingState(built),
        )


class ModuleBackend(ABC):
    """Backend of a `ModuleEngine`: checks, and builds the module."""

    capabilities = Capabilities()

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    def check(self, world_size: int) -> str | None:
        """Refuse what cannot be honoured on that many ranks, by settings and the folder's config alone.

        Returns:
            What keeps rows from sharing prompts; None where nothing does.

        Raises:
            BackendError, ConfigError, ModelFolderError: says what.
        """

    @property
    @abstractmethod
    def needs_group(self) -> bool:
        """Whether a lone rank needs a process group."""

    @abstractmethod
    def build(self, world: World) -> tuple[Scorer, PeftConfig | None]:
        """The module on this rank's device, sharded over the ranks, and its adapter. Collective.

        Raises:
            ConfigError: a setting that this machine does not allow.
            ModelFolderError: the folder cannot be loaded; on every rank.
        """

    def check_weights(self) -> None:
        """Refuse a folder whose weights cannot be loaded, by the headers of its files."""
        config = self.config
        hf_folder.check_tensors(config.model_path, head=config.head, mtp=config.mtp)
        if config.exports_mtp and not hf_folder.mtp_names(Path(config.model_path)):
            raise ConfigError(f"{config.model_path} has no layer for multi-token prediction, with which servers draft.")

    def group_ranks(self, world: World) -> ModelReplicas:
        """Model replicas: which ranks share one; groups of `parallel.sp` share their rows. Collective."""
        sp = self.config.parallel.sp
        return ModelReplicas(
            replica_of=tuple(rank // sp for rank in range(world.size)), leaders=tuple(range(0, world.size, sp))
        )

    def make_optimizer(self, scorer: Scorer, config: OptimizerConfig) -> StepOptimizer:
        """Optimizer of the module's parameters."""
        inner = (parameter for layer in scorer.layers() for parameter in layer.parameters() if parameter.ndim == 2)
        return module_optimizer(scorer.parameters(), inner, config, scorer.named_layers(ahead=True).values())

    def parts(self, built: BuiltModel) -> EngineParts:
        """Parts of the engine."""
        return EngineParts.of(built)

    def adapter_off(self, built: BuiltModel) -> AbstractContextManager[None] | None:
        """Context without the adapter; None if the model has none."""
        return None

    def row_adapters(self, scorer: Scorer) -> RowAdapters:
        """Layers of a frozen model that take each row's own adapter.

        Raises:
            ConfigError: the backend, the model or a setting does not allow it.
        """
        raise ConfigError("Adapters by name are trained by the fsdp backend alone; use that.")

    def leave(self, world: World) -> None:
        """Take down the process groups that were made here."""
        world.leave()


class ModuleEngine(Engine):
    """See `Engine`. Its parameters are plain tensors or DTensors, unless the backend's parts say otherwise."""

    def __init__(self, backend: ModuleBackend) -> None:
        self._backend, self._config = backend, backend.config
        self._parts: EngineParts | None = None
        self._writer: CheckpointWriter | None = None
        self._schedule_step = 0

    @property
    def parts(self) -> EngineParts:
        """Parts of the engine, with its model.

        Raises:
            EngineError: it holds no model.
        """
        if self._parts is None:
            raise EngineError("The engine holds no model; call initialize() first (close() is final).")
        return self._parts

    # Building

    def check(self, world_size: int) -> dict[str, str]:
        """See `Engine`."""
        found = self._check_config(world_size)
        if self._config.init == ModelInit.PRETRAINED:
            self._backend.check_weights()
        return found

    def _check_config(self, world_size: int) -> dict[str, str]:
        config, able = self._config, self._backend.capabilities
        if config.trains_mtp and not able.trains_mtp:
            raise ConfigError("mtp is train; of the backends here fsdp and megatron do it. Use one, or mtp=freeze.")
        for name, usual in (("transformer_engine", True), ("bridge", Bridge.AUTO)):
            if (value := getattr(config, name)) != usual and not able.has_transformer_engine:
                raise ConfigError(
                    f"{name} is {str(value).lower()}; of the backends here megatron alone has it. Leave it "
                    f"{str(usual).lower()}."
                )
        if config.dist_checkpoint is not None and not able.reads_dist_checkpoints:
            raise ConfigError("dist_checkpoint is set; of the backends here megatron alone reads such folders.")
        idle = idle_accelerator()
        found = settings_status(config, self._backend.check(world_size))
        if "loss_in_head" in found and not able.has_loss_in_head:
            found["loss_in_head"] = "no: the backend's models make whole logits"
        if idle is not None:
            found["device"] = f"cpu, as engines here do not compute on {idle}"
        if config.exports_adapter:
            found["adapter_layers"] = " ".join(adapter_layers(config))
        return found

    def initialize(self) -> None:
        """Load the folder, shard it, and allocate the optimizer."""
        if self._parts is not None:
            raise ConfigError("This engine is initialised already; make another one with create_engine.")
        config = self._config
        self._check_config(expected_size())
        for name in ("cpu_offload", "optimizer_offload", "activation_offload"):
            if (value := getattr(config, name)) and not has_gpu():
                said = str(value).lower()
                raise ConfigError(f"{name} is {said} and there is no GPU: everything is on the CPU. Set it to false.")
        if config.fp8 != Fp8.OFF and not has_float8():
            raise ConfigError(
                f"fp8 is {config.fp8} and there is no GPU that has float8 products (compute capability 8.9 or more). "
                "Set it to off."
            )
        world = join_world(timeout_s=config.timeout_s, needs_group=self._backend.needs_group)
        try:
            built = self._build(world)
            self._writer = CheckpointWriter(world, is_async=config.async_checkpoints, timeout_s=config.timeout_s)
        except BaseException:
            self._backend.leave(world)
            raise
        self._parts = self._backend.parts(built)
        if config.optimizer_offload:
            self._parts.placement.move(torch.device("cpu"), optimizer=True)
        torch.manual_seed(config.seed + world.rank)

    def _build(self, world: World) -> BuiltModel:
        config, backend = self._config, self._backend
        with world.together():
            scorer, peft = backend.build(world)
            replicas = backend.group_ranks(world)
        return BuiltModel(
            config=config,
            world=world,
            scorer=scorer,
            optimizer=None if config.optimizer is None else backend.make_optimizer(scorer, config.optimizer),
            peft=peft,
            replicas=replicas,
            cost=scorer.cost(),
        )

    def close(self) -> None:
        """Free everything and take down a process group made here."""
        parts, self._parts = self._parts, None
        writer, self._writer = self._writer, None
        if parts is None:
            return
        parts.placement.close()
        try:
            if writer is not None:
                writer.wait()
        finally:
            self._backend.leave(parts.built.world)

    # Modes and devices

    def train_mode(self) -> Any:
        """Everything onto the device; back on exit."""
        self._optimizer("be trained")
        return self.parts.placement.mode(train=True)

    def eval_mode(self) -> Any:
        """The model onto the device, dropout and gradients off; back on exit."""
        return self.parts.placement.mode(train=False)

    def adapter_off(self) -> AbstractContextManager[None]:
        """See `Engine`."""
        return self._backend.adapter_off(self.parts.built) or super().adapter_off()

    def to(self, device: torch.device | str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move the requested state; state that is there already is not touched."""
        self.parts.placement.to(device, model=model, optimizer=optimizer, grad=grad)

    # A step

    def optimizer_zero_grad(self) -> None:
        """Drop every gradient."""
        if (optimizer := self.parts.built.optimizer) is not None:
            optimizer.zero_grad()

    def check_batch(self, data: TensorDict) -> None:
        """See `Engine`."""
        self.parts.runner.check(data)

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> EngineOutput:
        """Plan with all ranks, run the micro-batches, add up their shares."""
        run = self.parts.runner.forward_backward
        if loss_function is None or forward_only:
            return run(data, loss_function, has_backward=False)
        self._optimizer("run a backward pass (say forward_only=True)")
        if self._config.router_aux_loss_coef or self._config.trains_mtp:  # which every row has
            return run(data, loss_function, has_backward=True)
        return forward_backward(run, data, loss_function, self.parts.built.world)

    def named_adapters(self, *, max_resident: int, idle_folder: str | Path | None) -> AdapterPool:
        """See `Engine`."""
        if self._config.optimizer is not None or self._config.lora is not None:
            name = "lora" if self._config.lora is not None else "optimizer"
            raise ConfigError(f"Adapters by name are over a frozen model, and {name} is set; leave it out (None).")
        rows = self._backend.row_adapters(self.parts.built.scorer)
        options: dict[str, Any] = {"max_resident": max_resident, "idle_folder": idle_folder}
        return AdapterPool(self.parts.built, self.parts.runner, rows, **options)

    def optimizer_step(self, adam: AdamParams | None = None) -> float:
        """Clip, then step."""
        optimizer, parts = self._optimizer("step"), self.parts
        if adam is not None:
            apply_adam(optimizer, adam)
        with parts.built.world.together():
            if not self._config.optimizer_offload:
                return optimizer.clip_and_step()
            parts.placement.move(parts.placement.compute_device, optimizer=True)
            try:
                return optimizer.clip_and_step()
            finally:
                parts.placement.move(torch.device("cpu"), optimizer=True)

    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return self._optimizer("have a schedule").param_groups[0]["lr"]

    def lr_scheduler_step(self) -> float:
        """Move the schedule on by one."""
        self._optimizer("have a schedule")
        self._schedule_step += 1
        return self._apply_schedule()

    def _apply_schedule(self) -> float:
        optimizer = self._optimizer("have a schedule")
        assert self._config.optimizer is not None
        rate = learning_rate(self._config.optimizer, self._schedule_step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _optimizer(self, what: str) -> StepOptimizer:
        """Optimizer, which a frozen engine has not got for `what`."""
        if (optimizer := self.parts.built.optimizer) is None:
            raise ConfigError(f"A frozen engine cannot {what}; give EngineConfig an optimizer.")
        return optimizer

    # Weights out, and to disk and back

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, Tensor]], PeftConfig | None]:
        """Full tensors in `precision`, in the model's order; an unsharded one is a view of the live weight.

        With an adapter, merged into the model or alone, as the config says.
        """
        parts = self.parts
        return parts.export.tensors(), parts.built.peft if self._config.exports_adapter else None

    def get_local_shards(self) -> Iterator[tuple[ShardSpec, Tensor]]:
        """Shards of this rank, in `precision`."""
        if self.parts.built.peft is not None:
            raise ConfigError("An adapter is merged into whole tensors only; use get_per_tensor_param.")
        if self._config.exports_mtp:
            raise ConfigError("exports_mtp is true: layers for it leave as whole tensors; use get_per_tensor_param.")
        return self.parts.export.shards()

    def save_model(self, path: str | Path) -> None:
        """Rank 0 writes; the others take part in gathering."""
        self.parts.export.save(path)

    def save_checkpoint(self, path: str | Path, step: int) -> None:
        """See `rl_engine.checkpoint.sharded`."""
        tensors = self.parts.state.tensors()
        assert self._writer is not None
        self._writer.save(path, tensors, step, self._schedule_step)

    def load_checkpoint(self, path: str | Path, *, optimizer: bool = True) -> int:
        """A frozen engine reads the model alone. A rank that was not there when it was written seeds itself anew."""
        built, state = self.parts.built, self.parts.state
        tensors = state.tensors()
        assert self._writer is not None
        self._writer.wait()
        manifest = restore(path, tensors, built.world, self._config.seed, state.described())
        if not optimizer:
            for name, tensor in tensors.items():
                if name.startswith("optim."):
                    tensor.zero_()
        state.take(tensors)
        self._schedule_step = manifest.schedule_step if optimizer else 0
        if built.optimizer is not None:
            self._apply_schedule()
        return manifest.step if optimizer else 0
