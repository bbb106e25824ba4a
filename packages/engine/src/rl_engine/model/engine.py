"""Engines around one scoring module, sharded or not: steps, devices, weights and checkpoints.

A backend subclasses `ModuleEngine`: it says what it cannot honour and builds the module, a `Scorer`. Nothing here asks
which library's layers are inside.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rl_csrc.inference.decoder import longrope_limit
from rl_engine.base import Engine, is_token_local
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
from rl_engine.batch.row_batch import CANDIDATES, VISUAL, RowBatch
from rl_engine.checkpoint import hf_folder
from rl_engine.checkpoint.hf_folder import DTYPES
from rl_engine.checkpoint.sharded import CheckpointWriter, local_shards, restore, whole
from rl_engine.checkpoint.slices import read_mtp
from rl_engine.distributed.world import World, expected_size, join_world
from rl_engine.errors import BatchError, ConfigError, EngineError
from rl_engine.model.device_memory import DeviceMemory, has_float8, has_gpu, idle_accelerator, offload_activations
from rl_engine.model.logprobs import HeadLoss, head_loss_obstacle
from rl_engine.model.lora import adapter_layers, write_adapter
from rl_engine.model.moe import ExpertLoad, check_replay, counts_of_column
from rl_engine.optimizer import StepOptimizer, learning_rate, module_optimizer, optimizer_tensors
from rl_engine.types import (
    EngineConfig,
    EngineOutput,
    Fp8,
    Head,
    LoraExport,
    ModelInit,
    Mtp,
    OptimizerConfig,
    OptimizerKind,
    PeftConfig,
    ShardSpec,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from contextlib import AbstractContextManager

    from tensordict import TensorDict

    from rl_engine.base import LossFunction
    from rl_engine.batch.micro_batches import CostModel
    from rl_engine.batch.packed import PackedRows
    from rl_engine.model.moe import Experts, Routing
    from rl_engine.model.multimodal import MultimodalInputs
    from rl_engine.types import ModelOutput


class Scorer(nn.Module):
    """Scores packed rows with one model. `model` holds every parameter."""

    multimodal: MultimodalInputs | None = None
    """Multimodal inputs; None for a model that takes none in that way."""
    shares_prefixes: bool = False
    """Whether rows that begin with the same prompt may be fed it once."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @abstractmethod
    def forward(self, rows: PackedRows, head_loss: HeadLoss | None = None) -> ModelOutput:
        """Score every completion token; the head makes `head_loss` itself where it can."""

    @property
    @abstractmethod
    def config(self) -> Any:
        """The language model's transformers config."""

    @property
    def experts(self) -> Experts | None:
        """Sizes of the mixture whose routers can be counted and replayed; None without such routers."""
        return None

    def route(self, rows: PackedRows, load: ExpertLoad | None, *, is_counting: bool = False) -> Routing | None:
        """Routing state of the next `forward`; None without `experts`."""
        return None

    @abstractmethod
    def cost(self) -> CostModel:
        """Cost model of a row (floating-point operations)."""

    def layers(self) -> Sequence[nn.Module]:
        """Decoder layers; their matrices are what Muon orthogonalises."""
        return ()

    @abstractmethod
    def named_weights(self) -> dict[str, Tensor]:
        """Parameters, tied ones once, and the buffers that belong to a checkpoint."""

    def to_folder(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of a Hugging Face folder that some of `named_weights` are made of."""
        return named


class ModuleEngine(Engine):
    """See `Engine`. Parameters are plain tensors or DTensors; groups of `parallel.sp` ranks share their rows."""

    _grads_follow = True
    """Gradients lie where their parameters lie; False: in a buffer of their own."""
    _trains_mtp = False
    """The backend takes `mtp=train`."""
    _has_transformer_engine = False
    """The backend builds layers from its modules."""
    _reads_dist_checkpoints = False
    """The backend takes `dist_checkpoint`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._world: World | None = None
        self._scorer: Scorer | None = None
        self._optimizer: StepOptimizer | None = None
        self._schedule_step = 0
        self._compute_device = torch.device("cpu")
        self._places: dict[str, torch.device] = {}
        self._specs: dict[str, ShardSpec] = {}
        """Of the shards that are tensors of the folder, by name."""
        self._replicas: ModelReplicas | None = None
        self._cost: CostModel | None = None
        self._writer: CheckpointWriter | None = None
        self._peft: PeftConfig | None = None
        self._memory = DeviceMemory()

    # What a backend says

    @abstractmethod
    def _check(self, world_size: int) -> str | None:
        """Refuse what cannot be honoured on that many ranks, by settings and the folder's config alone.

        Returns:
            What keeps rows from sharing prompts; None where nothing does.

        Raises:
            BackendError, ConfigError, ModelFolderError: says what.
        """

    @abstractmethod
    def _needs_group(self) -> bool:
        """Whether a lone rank needs a process group."""

    @abstractmethod
    def _build(self, world: World) -> Scorer:
        """The module on this rank's device, sharded over the ranks. Collective.

        Raises:
            ConfigError: a setting that this machine does not allow.
            ModelFolderError: the folder cannot be loaded; on every rank.
        """

    def _check_weights(self) -> None:
        """Refuse a folder whose weights cannot be loaded, by the headers of its files."""
        hf_folder.check_weights(Path(self._config.model_path), mtp=self._config.mtp)

    def _group_ranks(self, world: World) -> ModelReplicas:
        """Model replicas: which ranks share one. Collective."""
        sp = self._config.parallel.sp
        return ModelReplicas(
            replica_of=tuple(rank // sp for rank in range(world.size)), leaders=tuple(range(0, world.size, sp))
        )

    def _make_optimizer(self, scorer: Scorer, config: OptimizerConfig) -> StepOptimizer:
        inner = (parameter for layer in scorer.layers() for parameter in layer.parameters() if parameter.ndim == 2)
        return module_optimizer(scorer.parameters(), inner, config)

    def _leave(self, world: World) -> None:
        """Take down the process groups that were made here."""
        world.leave()

    # Building

    def check(self, world_size: int) -> dict[str, str]:
        """See `Engine`."""
        found = self._check_config(world_size)
        if self._config.init == ModelInit.PRETRAINED:
            self._check_weights()
        return found

    def _check_config(self, world_size: int) -> dict[str, str]:
        if self._config.trains_mtp and not self._trains_mtp:
            raise ConfigError("mtp is train; of the backends here megatron alone does it. Use that, or mtp=freeze.")
        if not self._config.transformer_engine and not self._has_transformer_engine:
            raise ConfigError("transformer_engine is false; of the backends here megatron alone has it. Leave it true.")
        if self._config.dist_checkpoint is not None and not self._reads_dist_checkpoints:
            raise ConfigError("dist_checkpoint is set; of the backends here megatron alone reads such folders.")
        idle = idle_accelerator()
        found = settings_status(self._config, self._check(world_size))
        if idle is not None:
            found["device"] = f"cpu, as engines here do not compute on {idle}"
        if self._exports_adapter():
            found["adapter_layers"] = " ".join(adapter_layers(self._config))
        return found

    def initialize(self) -> None:
        """Load the folder, shard it, and allocate the optimizer."""
        if self._scorer is not None:
            raise ConfigError("This engine is initialised already; make another one with create_engine.")
        config = self._config
        self._check_config(expected_size())
        for name in ("cpu_offload", "optimizer_offload", "activation_offload"):
            if getattr(config, name) and not has_gpu():
                raise ConfigError(f"{name} is true and there is no GPU: everything lies on the CPU. Set it to false.")
        if config.fp8 != Fp8.OFF and not has_float8():
            raise ConfigError(
                f"fp8 is {config.fp8} and there is no GPU that has float8 products (compute capability 8.9 or more). "
                "Set it to off."
            )
        world = join_world(timeout_s=config.timeout_s, needs_group=self._needs_group())
        try:
            with world.together():
                scorer = self._build(world)
                self._replicas = self._group_ranks(world)
            if config.optimizer is not None:
                self._optimizer = self._make_optimizer(scorer, config.optimizer)
            self._writer = CheckpointWriter(world, is_async=config.async_checkpoints, timeout_s=config.timeout_s)
        except BaseException:
            self._leave(world)
            raise
        self._world, self._scorer, self._cost = world, scorer, scorer.cost()
        self._compute_device = compute_device(config, world)
        self._places = dict.fromkeys(("model", "optimizer", "grad"), self._compute_device)
        if config.optimizer_offload:
            self._move(torch.device("cpu"), optimizer=True)
        torch.manual_seed(config.seed + world.rank)

    def close(self) -> None:
        """Free everything and take down a process group made here."""
        world, self._world = self._world, None
        writer, self._writer = self._writer, None
        self._scorer = self._optimizer = None
        self._memory.close()
        try:
            if writer is not None:
                writer.wait()
        finally:
            if world is not None:
                self._leave(world)

    # Modes and places

    def train_mode(self) -> Any:
        """Everything onto the device; back on exit."""
        self._frozen_error("be trained")
        return self._mode(train=True, grad=True)

    def eval_mode(self) -> Any:
        """The model onto the device, dropout and gradients off; back on exit."""
        return self._mode(train=False, grad=self._grads_follow)

    @contextmanager
    def _mode(self, *, train: bool, grad: bool) -> Generator[None]:
        """Move the model, and the optimizer or gradients, to the compute device; on exit back to where they were."""
        scorer = self._built()
        before, was_training = dict(self._places), scorer.training
        self.to(self._compute_device, model=True, optimizer=train, grad=grad)
        scorer.train(train)
        try:
            with torch.set_grad_enabled(train):
                yield
        finally:
            scorer.train(was_training)
            moved = {part: device for part, device in before.items() if self._places[part] != device}
            for device in set(moved.values()):
                self.to(device, **{part: moved.get(part) == device for part in before})

    def to(self, device: torch.device | str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move what is asked for; what is there already is not touched."""
        self._built()
        target = self._resolve(device)
        if target == self._compute_device and self._config.optimizer_offload:
            optimizer = False  # a step alone brings it there
        self._move(target, model=model, optimizer=optimizer, grad=grad)

    def _move(self, target: torch.device, *, model: bool = False, optimizer: bool = False, grad: bool = False) -> None:
        scorer = self._built()
        is_elsewhere = self._places["model"] != target
        if is_elsewhere and model != grad and any(parameter.grad is not None for parameter in scorer.parameters()):
            raise ConfigError("Gradients lie where their parameters lie; move both, or zero them first.")

        def move(tensor: Tensor) -> Tensor:
            return self._memory.move(tensor, target)

        is_moved = False
        if is_elsewhere and model:
            reshard(scorer)
            with torch.no_grad():
                scorer._apply(move)  # pyright: ignore[reportPrivateUsage] - `.to()` would not use page-locked memory
            self._places["model"] = self._places["grad"] = target
            is_moved = True
        if optimizer and self._optimizer is not None and self._places["optimizer"] != target:
            for state in self._optimizer.state.values():
                for key in [*state]:
                    state[key] = move(state[key])
            self._places["optimizer"] = target
            is_moved = True
        if is_moved:
            self._memory.finish()

    # A step

    def optimizer_zero_grad(self) -> None:
        """Drop every gradient."""
        self._built()
        if self._optimizer is not None:
            self._optimizer.zero_grad()

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> EngineOutput:
        """Plan with all ranks, run the micro-batches, add up their shares."""
        has_backward = loss_function is not None and not forward_only
        if has_backward:
            self._frozen_error("run a backward pass (say forward_only=True)")
        config, world, scorer = self._config, self._group(), self._built()

        def make(rows: TensorDict) -> RowBatch:
            batch = RowBatch(
                rows,
                needs_mask=loss_function is not None,
                device=world.device,
                feeds_last=config.head == Head.REWARD,
                shares_prefixes=scorer.shares_prefixes,
            )
            self._check_fit(batch)
            return batch

        assert self._replicas is not None
        assert self._cost is not None
        budget = config.max_tokens_per_gpu * config.parallel.sp * config.parallel.cp
        plan = plan_batch(world, self._replicas, data, make, budget, self._cost, work_of(loss_function, has_backward))
        if scorer.multimodal is not None:
            scorer.multimodal.num_passes = max(world.exchange(scorer.multimodal.passes_for(plan.batch)))
            scorer.multimodal.place(plan.batch)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(config.matmul_precision)
        try:
            with world.together(), torch.set_grad_enabled(has_backward):
                results = self._run(plan, loss_function, self._expert_load(plan) if has_backward else None)
        finally:
            torch.set_float32_matmul_precision(before)
            reshard(scorer)  # a forward pass alone leaves gathered weights in the place of the trained ones
        shares = results.metric_values(is_leader=world.rank in self._replicas.leaders)
        metrics = add_up(world, shares) if loss_function is not None else {}
        place = data.get("completion_token_ids").device
        columns = columns_of(world, plan, results, place, "logprobs" if config.head == Head.LM else "values")
        return EngineOutput(columns=columns, metrics=metrics, num_micro_batches=plan.num_micro_batches)

    def optimizer_step(self) -> float:
        """Clip, then step."""
        optimizer = self._frozen_error("step")
        with self._group().together():
            if not self._config.optimizer_offload:
                return optimizer.clip_and_step()
            self._move(self._compute_device, optimizer=True)
            try:
                return optimizer.clip_and_step()
            finally:
                self._move(torch.device("cpu"), optimizer=True)

    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return self._frozen_error("have a schedule").param_groups[0]["lr"]

    def lr_scheduler_step(self) -> float:
        """Move the schedule on by one."""
        self._frozen_error("have a schedule")
        self._schedule_step += 1
        return self._apply_schedule()

    def _check_fit(self, batch: RowBatch) -> None:
        scorer = self._built()
        check_lengths(batch.lengths, scorer.config)
        check_columns(batch, scorer.config.vocab_size, self._config.head)
        if scorer.multimodal is not None:
            scorer.multimodal.check(batch)
        else:
            for name in VISUAL:
                if batch.has(name):
                    raise BatchError(f"The batch has {name} and the model takes no images in that way. Drop it.")
        check_replay(batch, scorer.experts)

    def _run(
        self,
        plan: BatchPlan,
        loss_function: LossFunction | None,
        load: ExpertLoad | None = None,
        counts: Tensor | None = None,
    ) -> MicroBatchResults:
        """Run all micro-batches, forward and, where gradients are enabled and there is a loss, backward. Collective.

        Args:
            plan: The batch. A rank that has fewer micro-batches runs one-token dummies, so that collectives match.
            loss_function: None computes scores only.
            load: Load of the experts, where their auxiliary loss is wanted.
            counts: (L, E) float64, to which the load of this rank's experts is added.
        """
        scorer, results = self._built(), MicroBatchResults()
        for index in range(plan.num_micro_batches):
            packed, is_idle = plan.pack(index), plan.is_idle(index)
            routing = scorer.route(packed, None if is_idle else load, is_counting=counts is not None)
            if is_idle:
                idle: ModelOutput = scorer(packed)
                if torch.is_grad_enabled():
                    (idle.scores.sum() * 0.0).backward()
                continue
            with self._activations():
                output, shares = score_rows(plan, index, loss_function, partial(scorer, packed))
            if counts is not None:
                assert routing is not None
                routing.add_counts(counts)
            if torch.is_grad_enabled():
                share, loss = None if routing is None else routing.aux_share(), shares["loss"]
                if load is not None and share is not None:
                    shares[AUX_LOSS] = share
                    loss = loss + load.coef * share
                loss.backward()
            results.add(plan.micro_batches[index], output, shares)
        return results

    def _activations(self) -> AbstractContextManager[None]:
        """Around a forward pass that is differentiated: where what its backward pass needs is kept."""
        is_offloaded = self._config.activation_offload and torch.is_grad_enabled()
        return offload_activations(self._group().device) if is_offloaded else nullcontext()

    def _expert_load(self, plan: BatchPlan) -> ExpertLoad | None:
        """Expert load of the whole batch: counted in `routed_experts`, or in a forward pass of its own. Collective."""
        experts, coef = self._built().experts, self._config.router_aux_loss_coef
        if not coef or experts is None:
            return None
        if plan.own.routed_experts() is not None:
            counts = counts_of_column(plan.own, experts)
        else:
            device = self._group().device
            counts = torch.zeros(experts.num_layers, experts.num_experts, dtype=torch.float64, device=device)
            with torch.no_grad():
                self._run(plan, None, counts=counts)
        if self._group().size > 1:
            dist.all_reduce(counts)
        return ExpertLoad(counts=counts, coef=coef)

    # Weights out, and to disk and back

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, Tensor]], PeftConfig | None]:
        """Full tensors in `precision`, in the model's order; an unsharded one is a view of the live weight.

        With an adapter, merged into the model or alone, as the config says.
        """
        return self._exported(), self._peft if self._exports_adapter() else None

    def _exported(self) -> Iterator[tuple[str, Tensor]]:
        with self._group().together():
            yield from self._export()

    def _export(self) -> Iterator[tuple[str, Tensor]]:
        scorer = self._built()
        for name, tensor in scorer.named_weights().items():
            # Detached: a graph that somebody keeps would keep the weights on the GPU through an offload.
            yield from scorer.to_folder({name: self._as_exported(whole(tensor.detach()))}).items()

    def get_local_shards(self) -> Iterator[tuple[ShardSpec, Tensor]]:
        """Shards of this rank, in `precision`."""
        if self._peft is not None:
            raise ConfigError("An adapter is merged into whole tensors only; use get_per_tensor_param.")
        return self._local_shards()

    def _local_shards(self) -> Iterator[tuple[ShardSpec, Tensor]]:
        scorer = self._built()
        for spec, part in local_shards(scorer.named_weights(), scorer.to_folder, self._specs):
            yield spec, self._as_exported(part)

    def _exports_adapter(self) -> bool:
        return self._config.lora is not None and self._config.lora.export == LoraExport.ADAPTER

    def _as_exported(self, tensor: Tensor) -> Tensor:
        return tensor.to(DTYPES[self._config.precision]) if tensor.is_floating_point() else tensor

    def save_model(self, path: str | Path) -> None:
        """Rank 0 writes; the others take part in gathering."""
        world = self._group()
        weights = {name: tensor.cpu() for name, tensor in self._exported() if world.rank == 0}
        if not self._exports_adapter():
            with world.together():
                weights |= {name: tensor.cpu() for name, tensor in self._mtp_weights() if world.rank == 0}
        if world.rank == 0:
            self._write_model(path, weights)
        world.barrier()

    def _mtp_weights(self) -> Iterator[tuple[str, Tensor]]:
        """What `save_model` writes of layers for multi-token prediction: the folder's tensors. Collective."""
        if self._config.mtp != Mtp.REFUSE and self._group().rank == 0:
            for name, tensor in read_mtp(self._config.model_path):
                yield name, self._as_exported(tensor)

    def _write_model(self, path: str | Path, weights: dict[str, Tensor]) -> None:
        source = self._config.model_path
        if self._peft is not None and self._exports_adapter():
            write_adapter(path, weights, self._peft, source)
            return
        dtype = DTYPES[self._config.precision]
        model = hf_folder.empty_model(source, dtype=dtype, head=self._config.head)
        hf_folder.write_model(path, model, weights, source)

    def save_checkpoint(self, path: str | Path, step: int) -> None:
        """See `rl_engine.checkpoint.sharded`."""
        tensors = self._state()
        assert self._writer is not None
        self._writer.save(path, tensors, step, self._schedule_step)

    def load_checkpoint(self, path: str | Path) -> int:
        """A frozen engine reads the model alone. A rank that was not there when it was written seeds itself anew."""
        world, tensors = self._group(), self._state()
        assert self._writer is not None
        self._writer.wait()
        manifest = restore(path, tensors, world, self._config.seed, self._described())
        self._take_state(tensors)
        self._schedule_step = manifest.schedule_step
        if self._optimizer is not None:
            self._apply_schedule()
        return manifest.step

    def _state(self) -> dict[str, Tensor]:
        """Checkpoint tensors of this rank: `restore` fills them, `_take_state` then takes them over. Collective."""
        named = self._built().named_weights()
        state = {f"model.{name}": tensor for name, tensor in named.items()}
        if self._optimizer is not None:
            trained = [(name, tensor) for name, tensor in named.items() if isinstance(tensor, nn.Parameter)]
            state |= {f"optim.{name}": value for name, value in optimizer_tensors(self._optimizer, trained).items()}
        return state

    def _described(self) -> dict[str, Tensor] | None:
        """Names and shapes of what all ranks hold of a checkpoint, where that is not what this one holds."""

    def _take_state(self, tensors: dict[str, Tensor]) -> None:
        """Take what was read into `_state`, where that is not the live tensors themselves. Collective."""

    # Small helpers

    def _apply_schedule(self) -> float:
        assert self._optimizer is not None
        assert self._config.optimizer is not None
        rate = learning_rate(self._config.optimizer, self._schedule_step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _resolve(self, device: torch.device | str) -> torch.device:
        wanted, here = torch.device(device), self._group().device
        is_own = wanted in (here, torch.device(here.type))  # no index: this rank's own
        return self._compute_device if is_own else wanted

    def _built(self) -> Scorer:
        if self._scorer is None:
            raise EngineError("The engine holds no model; call initialize() first (close() is final).")
        return self._scorer

    def _group(self) -> World:
        self._built()
        assert self._world is not None
        return self._world

    def _frozen_error(self, what: str) -> StepOptimizer:
        self._built()
        if self._optimizer is None:
            raise ConfigError(f"A frozen engine cannot {what}; give EngineConfig an optimizer.")
        return self._optimizer


def score_rows(
    plan: BatchPlan,
    index: int,
    loss_function: LossFunction | None,
    score: Callable[[HeadLoss | None], ModelOutput],
) -> tuple[ModelOutput, dict[str, Tensor]]:
    """Micro-batch `index` scored by `score`, and its shares of the loss (under `loss`) and of the metrics.

    A token-local loss is made by the head, with its gradient, where there is to be one and the head can.
    """
    if loss_function is None:
        return score(None), {}
    columns = plan.batch.select(plan.micro_batches[index])
    head_loss = HeadLoss(lambda output: apply_loss(loss_function, output, columns))
    output = score(head_loss if torch.is_grad_enabled() and is_token_local(loss_function) else None)
    return output, head_loss.shares or apply_loss(loss_function, output, columns)


def compute_device(config: EngineConfig, world: World) -> torch.device:
    """Device of the parameters between uses."""
    return torch.device("cpu") if config.cpu_offload else world.device


def reshard(module: nn.Module) -> None:
    """Put this rank's shards in the place of gathered parameters."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


# What engines refuse


def refuse_fsdp_only(config: EngineConfig, backend: str) -> None:
    """Refuse what the fsdp backend alone can do.

    Raises:
        ConfigError: names the setting.
    """
    for name in ("torch_compile", "cpu_offload", "dropout"):
        if getattr(config, name):
            raise ConfigError(f"{name} is true and the {backend} backend has none; set it to false, or use fsdp.")


def check_float8(config: EngineConfig, backend: str, recipes: Sequence[Fp8]) -> bool:
    """Whether products are to be made in float8; refuses those that the backend has not.

    Raises:
        ConfigError: says which it has.
    """
    if config.fp8 not in (Fp8.OFF, *recipes):
        raise ConfigError(f"fp8 is {config.fp8}; the {backend} backend has {', '.join([Fp8.OFF, *recipes])}.")
    return config.fp8 != Fp8.OFF


def check_adapter(config: EngineConfig) -> None:
    """Refuse an adapter that would not be trained, or has nothing to be added to.

    Raises:
        ConfigError: says why.
    """
    if config.lora is not None and config.optimizer is None:
        raise ConfigError("A frozen engine's adapter would stay as it was made; leave lora out.")
    if config.lora is not None and hf_folder.block_size(config.model_path) is not None:
        raise ConfigError("lora is set and the folder's weights are quantised (fp8). Give the folder in bfloat16.")


def refuse_muon(config: EngineConfig, backend: str) -> None:
    """Refuse Muon where matrices do not lie in parameters of their own.

    Raises:
        ConfigError: says so.
    """
    if config.optimizer is not None and config.optimizer.kind != OptimizerKind.ADAMW:
        raise ConfigError(
            f"optimizer.kind is {config.optimizer.kind}; the {backend} backend shards AdamW alone. Use adamw, or fsdp."
        )


def shares_prefixes(config: EngineConfig, obstacle: str | None) -> bool:
    """Whether rows are to share prompts, where `obstacle` says what keeps them from it.

    Raises:
        ConfigError: they are told to and cannot.
    """
    if config.prefix_sharing and obstacle is not None:
        raise ConfigError(f"prefix_sharing is true and {obstacle}. Leave it out.")
    return config.prefix_sharing is not False and obstacle is None


def settings_status(config: EngineConfig, obstacle: str | None) -> dict[str, str]:
    """Settings that are left to the engine, as `Engine.check` returns them; `obstacle` keeps rows from sharing prompts.

    Raises:
        ConfigError: as `shares_prefixes`.
    """
    shares = "no" if config.prefix_sharing is False else f"no: {obstacle}"
    if shares_prefixes(config, obstacle):
        shares = "yes"
    found = {"prefix_sharing": shares}
    if config.optimizer is not None:
        if not config.dropout and (rates := hf_folder.model_dropout(config.model_path)):
            found["dropout"] = f"off: {rates}"
        separately = head_loss_obstacle(config)
        found["loss_in_head"] = "yes, of token-local losses" if separately is None else f"no: {separately}"
    return found


def check_candidates(count: int, vocab_size: int) -> None:
    """Refuse more candidates than there are tokens.

    Raises:
        ConfigError: there are not that many.
    """
    if count > vocab_size:
        raise ConfigError(f"num_candidates is {count}; the model's vocabulary has {vocab_size} entries.")


def check_columns(batch: RowBatch, vocab_size: int, head: Head) -> None:
    """Refuse token ids outside the vocabulary, and candidates that no head scores.

    Raises:
        BatchError: names the column.
    """
    batch.check_tokens(vocab_size)
    if batch.has(CANDIDATES) and head != Head.LM:
        raise BatchError(f"Column {CANDIDATES} needs a language-model head. Drop it.")


def check_lengths(lengths: Sequence[int], config: Any) -> None:
    """Check that rows fit the model's context, and that no row's positions depend on its neighbours (longrope).

    Args:
        lengths: Tokens of each row.
        config: The model's, of transformers.

    Raises:
        BatchError: a row is too long.
    """
    longest, context = max(lengths, default=0), getattr(config, "max_position_embeddings", None)
    if context is not None and longest > context:
        raise BatchError(f"A row has {longest} tokens; the model's context is {context}. Shorten the row.")
    limit = longrope_limit(getattr(config.get_text_config(), "rope_parameters", None))
    if limit is not None and longest > limit:
        raise BatchError(
            f"A row has {longest} tokens; beyond {limit} this model (longrope) turns all rows of a pass by other "
            "frequencies, so that log-probs and gradients would depend on micro-batches. Shorten the row."
        )
