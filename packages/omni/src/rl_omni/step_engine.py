"""Base of engines of models that generate by steps: optimizer, adapter, micro-batches by steps, checkpoints."""

from __future__ import annotations

import shutil
from abc import abstractmethod
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from rl_engine.base import Engine
from rl_engine.errors import BatchError, CheckpointError, ConfigError, EngineError, ModelFolderError, NonFiniteError
from rl_engine.types import (
    BatchCounts,
    EngineConfig,
    EngineOutput,
    Head,
    LoraExport,
    ModelOutput,
    OptimizerKind,
    Precision,
    digest_files,
    find_damage,
    read_manifest,
    write_manifest,
)
from rl_omni.errors import PipelineError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from torch import Tensor

    from rl_engine.base import LossFunction
    from rl_engine.types import AdamParams, PeftConfig

_ADAPTER = "default"


class StepEngine(Engine):
    """Model under training whose rows are S steps with a log-prob each, in one process, in float32.

    A step is to this engine what a completion token is to a language model: `ModelOutput.logprobs` has one entry per
    step, and the loss functions of token policies fit. `max_tokens_per_gpu` bounds the steps of one micro-batch, a row
    never being cut. A subclass checks and loads a folder, checks a row, scores rows, and writes a folder.
    """

    name: ClassVar[str]
    """Name of the backend."""
    settings: ClassVar[frozenset[str]] = frozenset(
        {"model_path", "lora", "optimizer", "precision", "max_tokens_per_gpu", "seed", "timeout_s"}
    )
    """Fields of `EngineConfig` that the backend has."""
    targets: ClassVar[tuple[str, ...]]
    """Linear layers that an adapter changes by default; the ones a model lacks are not asked for."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._loaded: Any = None
        self._optimizer: torch.optim.AdamW | None = None
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @abstractmethod
    def _check_folder(self) -> None:
        """Check the model's folder by its JSON files.

        Raises:
            PipelineError: it cannot be used.
        """

    @abstractmethod
    def _load(self) -> torch.nn.Module:
        """Load the model; returns the module that is trained and exported.

        Raises:
            PipelineError: the folder cannot be used.
        """

    @abstractmethod
    def _check_row(self, row: int, columns: dict[str, Tensor]) -> None:
        """Check the columns of a row.

        Raises:
            BatchError: they do not fit each other.
        """

    @abstractmethod
    def _score(self, rows: TensorDict) -> dict[str, Tensor]:
        """Log-prob or value of every step of rows, packed: fields of `ModelOutput`.

        Raises:
            PipelineError: a prompt cannot be encoded.
        """

    def check(self, world_size: int) -> dict[str, str]:
        """Check settings and the model's folder."""
        if world_size != 1:
            raise ConfigError(f"world_size is {world_size}; backend {self.name!r} trains in one process.")
        config, default = self._config, EngineConfig(model_path="")
        for name in (each.name for each in fields(EngineConfig)):
            if name not in self.settings and getattr(config, name) != getattr(default, name):
                raise ConfigError(
                    f"{name}={getattr(config, name)!r}: backend {self.name!r} does not have it; leave it out."
                )
        if config.precision not in (Precision.FLOAT32, Precision.AUTO):
            raise ConfigError(f"precision={config.precision}: backend {self.name!r} trains in float32.")
        if config.optimizer is not None and config.optimizer.kind != OptimizerKind.ADAMW:
            raise ConfigError(f"optimizer.kind={config.optimizer.kind}: backend {self.name!r} has adamw alone.")
        if config.optimizer is not None and (config.optimizer.warmup_steps or config.optimizer.total_steps):
            raise ConfigError(f"backend {self.name!r} has a constant rate; leave warmup_steps and total_steps out.")
        if config.lora is not None and config.lora.export != LoraExport.MERGED:
            raise ConfigError(f"lora.export={config.lora.export}: backend {self.name!r} exports merged weights alone.")
        try:
            self._check_folder()
        except PipelineError as error:
            raise ModelFolderError(str(error)) from error
        return {}

    def initialize(self) -> None:
        """Load the model; add the adapter; build the optimizer."""
        self.check(1)
        config = self._config
        try:
            self._loaded = self._load()
        except PipelineError as error:
            raise ModelFolderError(str(error)) from error
        model = self._loaded
        model.requires_grad_(requires_grad=config.optimizer is not None and config.lora is None)
        if config.lora is not None:
            self._add_adapter(model)
        if (settings := config.optimizer) is None:
            model.requires_grad_(requires_grad=False)
            return
        trained = self._trained()
        groups = [
            {"params": [p for p in trained.values() if p.ndim > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in trained.values() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self._optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)

    def _add_adapter(self, model: torch.nn.Module) -> None:
        import peft

        lora: Any = peft.LoraConfig  # its type of lora_alpha is too narrow
        settings = self._config.lora
        assert settings is not None
        linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        wanted = settings.target_modules or self.targets
        found = sorted(target for target in wanted if any(name.endswith(f".{target}") for name in linear))
        if not found or (settings.target_modules and len(found) < len(wanted)):
            raise ConfigError(f"lora.target_modules={wanted} names linear layers that the model does not have.")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._config.seed)
            peft.inject_adapter_in_model(
                lora(r=settings.rank, lora_alpha=settings.alpha, lora_dropout=settings.dropout, target_modules=found),
                model,
                _ADAPTER,
            )

    @property
    def _module(self) -> torch.nn.Module:
        if self._loaded is None:
            raise EngineError("The engine has no model: call initialize first; after close, create a new engine.")
        return self._loaded

    def _trained(self) -> dict[str, Tensor]:
        return {name: p for name, p in self._module.named_parameters() if p.requires_grad}

    def _need_optimizer(self) -> torch.optim.AdamW:
        _ = self._module
        if self._optimizer is None:
            raise ConfigError("The engine is frozen: give EngineConfig an optimizer to train it.")
        return self._optimizer

    @contextmanager
    def train_mode(self) -> Generator[None]:
        """Prepare for training; only LoRA has dropout."""
        self._module.train()
        try:
            yield
        finally:
            self._module.eval()

    @contextmanager
    def eval_mode(self) -> Generator[None]:
        """Prepare for forward passes."""
        self._module.eval()
        with torch.no_grad():
            yield

    @contextmanager
    def adapter_off(self) -> Generator[None]:
        """Turn the adapter off inside."""
        if self._config.lora is None:
            raise ConfigError("This engine has no adapter to turn off; give EngineConfig a lora.")
        layers: list[Any] = [each for each in self._module.modules() if hasattr(each, "get_delta_weight")]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def optimizer_zero_grad(self) -> None:
        """Drop accumulated gradients."""
        self._need_optimizer().zero_grad(set_to_none=True)

    def check_batch(self, data: TensorDict) -> None:
        """Check the columns of a batch."""
        _ = self._module
        for name in self.batch_columns:
            if name not in data:
                raise BatchError(f"the batch has no column {name}; it has {', '.join(sorted(map(str, data.keys())))}.")
        columns = {name: data[name].unbind() for name in self.batch_columns}
        for row in range(len(data)):
            self._check_row(row, {name: column[row] for name, column in columns.items()})
            if (num_steps := len(columns["loss_mask"][row])) > self._config.max_tokens_per_gpu:
                raise BatchError(
                    f"row {row} has {num_steps} steps, above max_tokens_per_gpu={self._config.max_tokens_per_gpu}."
                )

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> EngineOutput:
        """Compute the log-prob or value of every step, and the loss and its gradient."""
        is_training = loss_function is not None and not forward_only
        if is_training:
            self._need_optimizer()
        self.check_batch(data)
        counts = BatchCounts(
            tokens=float(data["loss_mask"].values().sum()) if len(data) else 0.0,
            sequences=float(sum(bool(each.any()) for each in data["loss_mask"].unbind())) if len(data) else 0.0,
        )
        scores: list[Tensor] = []
        metrics: dict[str, float] = {}
        batches = _micro_batches(data, self._config.max_tokens_per_gpu)
        for first, last in batches:
            rows = _slice(data, first, last)
            with torch.set_grad_enabled(is_training):
                try:
                    scored = self._score(rows)
                except PipelineError as error:
                    raise BatchError(str(error)) from error
                offsets = rows["loss_mask"].offsets().to(self._device)
                output = ModelOutput(**scored, cu_seqlens=offsets, counts=counts)
                if loss_function is not None:
                    loss, found = loss_function(output, rows)
                    for name, value in {"loss": loss, **found}.items():
                        metrics[name] = metrics.get(name, 0.0) + float(value.detach())
                    if is_training:
                        loss.backward()
            scores += list(output.scores.detach().to(data.device or "cpu").split(offsets.diff().tolist()))
        name = "values" if self._config.head == Head.VALUE else "logprobs"
        columns = {name: _jagged(scores)} if scores else {}
        return EngineOutput(
            columns=TensorDict(columns, batch_size=[len(data)]), metrics=metrics, num_micro_batches=len(batches)
        )

    def optimizer_step(self, adam: AdamParams | None = None) -> float:
        """Clip the gradient, step, and return its norm before clipping."""
        optimizer = self._need_optimizer()
        if adam is not None:
            raise ConfigError(
                f"backend {self.name!r} takes AdamW's numbers from EngineConfig.optimizer; leave adam out."
            )
        assert self._config.optimizer is not None
        trained = [p for p in self._trained().values() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])) if trained else 0.0
        if not torch.isfinite(torch.tensor(norm)):
            raise NonFiniteError(f"the gradient norm is {norm}; the step was not taken.")
        torch.nn.utils.clip_grad_norm_(trained, self._config.optimizer.max_grad_norm)
        optimizer.step()
        return norm

    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return self._need_optimizer().param_groups[0]["lr"]

    def lr_scheduler_step(self) -> float:
        """Return the rate, which is constant."""
        return self.learning_rate()

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, Tensor]], PeftConfig | None]:
        """Stream the module's tensors under their names, the adapter merged."""
        return merged_tensors(self._module), None

    def to(self, device: torch.device | str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move nothing: the engine stays on its device.

        Raises:
            ConfigError: another device is asked for.
        """
        del model, optimizer, grad
        if torch.device(device).type != self._device.type:
            raise ConfigError(f"backend {self.name!r} stays on {self._device}, and cannot move to {device}.")

    def save_checkpoint(self, path: str | Path, step: int) -> None:
        """Write weights, optimizer state, random state and step, atomically."""
        optimizer, target = self._need_optimizer(), Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        states = {
            f"{name}.{key}": value for name, p in self._trained().items() for key, value in optimizer.state[p].items()
        }
        save_file({k: v.contiguous() for k, v in self._module.state_dict().items()}, draft / "model.safetensors")
        save_file(states, draft / "optimizer.safetensors")
        save_file({"rng": torch.get_rng_state()}, draft / "rng.safetensors")
        write_manifest(draft / "manifest.json", {"step": step}, digest_files(draft))
        if target.exists():
            shutil.rmtree(target)
        draft.replace(target)

    def load_checkpoint(self, path: str | Path, *, optimizer: bool = True) -> int:
        """Restore what `save_checkpoint` wrote."""
        own, root = self._need_optimizer(), Path(path)
        if damage := find_damage(root / "manifest.json"):
            raise CheckpointError(f"{damage[0]}.")
        weights = load_file(root / "model.safetensors")
        expected = {name: tensor.shape for name, tensor in self._module.state_dict().items()}
        if {name: tensor.shape for name, tensor in weights.items()} != expected:
            raise CheckpointError(f"{root} is of another model: its tensors differ in name or shape.")
        self._module.load_state_dict(weights)
        own.state.clear()
        if not optimizer:
            return 0
        saved = load_file(root / "optimizer.safetensors")
        for name, parameter in self._trained().items():
            entries = {
                key.removeprefix(f"{name}."): value for key, value in saved.items() if key.rpartition(".")[0] == name
            }
            if entries:
                own.state[parameter] = entries
        torch.set_rng_state(load_file(root / "rng.safetensors")["rng"])
        return read_manifest(root / "manifest.json")["step"]

    def close(self) -> None:
        """Free the model."""
        self._loaded = self._optimizer = None


@torch.no_grad()
def merged_tensors(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a module under its own names, its adapter merged."""
    layers: list[tuple[str, Any]] = list(module.named_modules())
    deltas = {name: m.get_delta_weight(_ADAPTER) for name, m in layers if hasattr(m, "get_delta_weight")}
    for name, tensor in module.state_dict().items():
        if ".lora_" in name:
            continue
        layer, is_base, leaf = name.rpartition(".base_layer.")
        if is_base and leaf == "weight":
            yield f"{layer}.weight", tensor + deltas[layer]
        else:
            yield name.replace(".base_layer.", "."), tensor


def _micro_batches(data: TensorDict, max_steps: int) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    start = used = 0
    for row, steps in enumerate(len(each) for each in data["loss_mask"].unbind()):
        if used + steps > max_steps:
            spans.append((start, row))
            start = row
            used = 0
        used += steps
    return [*spans, (start, len(data))] if used else spans


def _jagged(rows: list[Tensor]) -> Tensor:
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets)


def _slice(data: TensorDict, first: int, last: int) -> TensorDict:
    """Rows of a batch: `TensorDict` cannot slice jagged columns."""
    given: dict[str, Any] = dict(data.items())
    columns = {
        name: _jagged(list(column.unbind()[first:last])) if column.is_nested else column[first:last]
        for name, column in given.items()
    }
    return TensorDict(columns, batch_size=[last - first])
