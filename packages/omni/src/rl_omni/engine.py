"""Engine of flow-matching picture models; engine backend `diffusion`."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from rl_engine.base import Engine
from rl_engine.errors import BatchError, CheckpointError, ConfigError, EngineError, ModelFolderError, NonFiniteError
from rl_engine.types import (
    BatchCounts,
    EngineConfig,
    EngineOutput,
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
from rl_omni.pipeline import check_folder, load_pipeline
from rl_omni.sampler import logprobs_of, mean_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from torch import Tensor

    from rl_engine.base import LossFunction
    from rl_engine.types import AdamParams, PeftConfig
    from rl_omni.pipeline import PipelineModel

_ADAPTER = "default"
_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Attention projections of diffusers' transformers; the ones a model lacks are not asked for."""
_USED = {
    "model_path", "lora", "optimizer", "precision", "max_tokens_per_gpu", "activation_checkpointing", "seed",
    "timeout_s",
}  # fmt: skip
_STEPS = ("step_stds", "loss_mask")
_COLUMNS = ("prompt_token_ids", "latents", "timesteps", *_STEPS)


def create(config: EngineConfig) -> Engine:
    """Create the engine; nothing is loaded before `initialize`."""
    return DiffusionEngine(config)


class DiffusionEngine(Engine):
    """Flow-matching model under training, in one process, in float32.

    Columns of a row with S denoising steps: `prompt_token_ids` (ragged), `latents` (ragged, (S + 1, C, H, W)),
    `timesteps` (ragged, S + 1), `step_stds` and `loss_mask` (ragged, S). A step is to this engine what a completion
    token is to a language model: `ModelOutput.logprobs` has one entry per step, and the loss functions of token
    policies fit. `max_tokens_per_gpu` bounds the denoising steps of one micro-batch, a row never being cut.
    """

    batch_columns = _COLUMNS

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._loaded: PipelineModel | None = None
        self._optimizer: torch.optim.AdamW | None = None
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def check(self, world_size: int) -> dict[str, str]:
        """Check settings and the pipeline's configuration."""
        if world_size != 1:
            raise ConfigError(f"world_size is {world_size}; backend 'diffusion' trains in one process.")
        config, default = self._config, EngineConfig(model_path="")
        for name in (each.name for each in fields(EngineConfig)):
            if name not in _USED and getattr(config, name) != getattr(default, name):
                raise ConfigError(
                    f"{name}={getattr(config, name)!r}: backend 'diffusion' does not have it; leave it out."
                )
        if config.precision not in (Precision.FLOAT32, Precision.AUTO):
            raise ConfigError(f"precision={config.precision}: backend 'diffusion' trains in float32.")
        if config.optimizer is not None and config.optimizer.kind != OptimizerKind.ADAMW:
            raise ConfigError(f"optimizer.kind={config.optimizer.kind}: backend 'diffusion' has adamw alone.")
        if config.optimizer is not None and (config.optimizer.warmup_steps or config.optimizer.total_steps):
            raise ConfigError("backend 'diffusion' has a constant rate; leave warmup_steps and total_steps out.")
        if config.lora is not None and config.lora.export != LoraExport.MERGED:
            raise ConfigError(f"lora.export={config.lora.export}: backend 'diffusion' exports merged weights alone.")
        try:
            check_folder(config.model_path)
        except PipelineError as error:
            raise ModelFolderError(str(error)) from error
        return {}

    def initialize(self) -> None:
        """Load the pipeline; add the adapter; build the optimizer."""
        self.check(1)
        config = self._config
        try:
            self._loaded = load_pipeline(config.model_path, self._device)
        except PipelineError as error:
            raise ModelFolderError(str(error)) from error
        transformer = self._loaded.transformer
        transformer.requires_grad_(requires_grad=config.optimizer is not None and config.lora is None)
        if config.activation_checkpointing:
            transformer.enable_gradient_checkpointing()
        if config.lora is not None:
            self._add_adapter(transformer)
        if (settings := config.optimizer) is None:
            transformer.requires_grad_(requires_grad=False)
            return
        trained = self._trained()
        groups = [
            {"params": [p for p in trained.values() if p.ndim > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in trained.values() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self._optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)

    def _add_adapter(self, transformer: Any) -> None:
        import peft

        lora: Any = peft.LoraConfig  # its type of lora_alpha is too narrow

        settings = self._config.lora
        assert settings is not None
        linear = {name for name, module in transformer.named_modules() if isinstance(module, torch.nn.Linear)}
        wanted = settings.target_modules or _TARGETS
        found = sorted(target for target in wanted if any(name.endswith(f".{target}") for name in linear))
        if not found or (settings.target_modules and len(found) < len(wanted)):
            raise ConfigError(f"lora.target_modules={wanted} names linear layers that the transformer does not have.")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._config.seed)
            transformer.add_adapter(
                lora(r=settings.rank, lora_alpha=settings.alpha, lora_dropout=settings.dropout, target_modules=found)
            )

    @property
    def _model(self) -> PipelineModel:
        if self._loaded is None:
            raise EngineError("The engine has no model: call initialize first; after close, create a new engine.")
        return self._loaded

    def _trained(self) -> dict[str, Tensor]:
        return {name: p for name, p in self._model.transformer.named_parameters() if p.requires_grad}

    def _need_optimizer(self) -> torch.optim.AdamW:
        _ = self._model
        if self._optimizer is None:
            raise ConfigError("The engine is frozen: give EngineConfig an optimizer to train it.")
        return self._optimizer

    @contextmanager
    def train_mode(self) -> Generator[None]:
        """Prepare for training; only LoRA has dropout."""
        self._model.transformer.train()
        try:
            yield
        finally:
            self._model.transformer.eval()

    @contextmanager
    def eval_mode(self) -> Generator[None]:
        """Prepare for forward passes."""
        self._model.transformer.eval()
        with torch.no_grad():
            yield

    @contextmanager
    def adapter_off(self) -> Generator[None]:
        """Turn the adapter off inside."""
        if self._config.lora is None:
            raise ConfigError("This engine has no adapter to turn off; give EngineConfig a lora.")
        self._model.transformer.disable_adapters()
        try:
            yield
        finally:
            self._model.transformer.enable_adapters()

    def optimizer_zero_grad(self) -> None:
        """Drop accumulated gradients."""
        self._need_optimizer().zero_grad(set_to_none=True)

    def check_batch(self, data: TensorDict) -> None:
        """Check the columns of a batch."""
        _ = self._model
        for name in _COLUMNS:
            if name not in data:
                raise BatchError(f"the batch has no column {name}; it has {', '.join(sorted(map(str, data.keys())))}.")
        counts = {name: [len(each) for each in data[name].unbind()] for name in ("latents", "timesteps", *_STEPS)}
        for row, num_states in enumerate(counts["latents"]):
            num_steps = num_states - 1
            expected = {"latents": num_states, "timesteps": num_states, **dict.fromkeys(_STEPS, num_steps)}
            seen = {name: lengths[row] for name, lengths in counts.items()}
            if num_steps < 1 or seen != expected:
                raise BatchError(
                    f"row {row} has lengths {seen}; S steps need S + 1 latents and timesteps, S of the others."
                )
            if num_steps > self._config.max_tokens_per_gpu:
                raise BatchError(
                    f"row {row} has {num_steps} steps, above max_tokens_per_gpu={self._config.max_tokens_per_gpu}."
                )
            times, stds, mask = (data[name].unbind()[row] for name in ("timesteps", *_STEPS))
            if not (times[:-1] > times[1:]).all() or times[0] > 1 or times[-1] < 0:
                raise BatchError(f"row {row} has timesteps {times.tolist()}; they fall from at most 1 to at least 0.")
            if ((mask > 0) & (stds <= 0)).any():
                raise BatchError(f"row {row} has loss_mask 1 at a step with step_stds 0, which has no log-prob.")

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> EngineOutput:
        """Compute the log-prob of every denoising step, and the loss and its gradient."""
        is_training = loss_function is not None and not forward_only
        if is_training:
            self._need_optimizer()
        self.check_batch(data)
        counts = BatchCounts(
            tokens=float(data["loss_mask"].values().sum()) if len(data) else 0.0,
            sequences=float(sum(bool(each.any()) for each in data["loss_mask"].unbind())) if len(data) else 0.0,
        )
        logprobs: list[Tensor] = []
        metrics: dict[str, float] = {}
        batches = self._micro_batches(data)
        for first, last in batches:
            rows = _slice(data, first, last)
            with torch.set_grad_enabled(is_training):
                output = self._score(rows, counts)
                if loss_function is not None:
                    loss, found = loss_function(output, rows)
                    for name, value in {"loss": loss, **found}.items():
                        metrics[name] = metrics.get(name, 0.0) + float(value.detach())
                    if is_training:
                        loss.backward()
            logprobs += list(output.logprobs.detach().to(data.device or "cpu").split(output.cu_seqlens.diff().tolist()))
        columns = {"logprobs": _jagged(logprobs)} if logprobs else {}
        return EngineOutput(
            columns=TensorDict(columns, batch_size=[len(data)]), metrics=metrics, num_micro_batches=len(batches)
        )

    def _micro_batches(self, data: TensorDict) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        start = used = 0
        for row, steps in enumerate(len(each) for each in data["loss_mask"].unbind()):
            if used + steps > self._config.max_tokens_per_gpu:
                spans.append((start, row))
                start = row
                used = 0
            used += steps
        return [*spans, (start, len(data))] if used else spans

    def _score(self, rows: TensorDict, counts: BatchCounts) -> ModelOutput:
        device, model = self._device, self._model
        latents, times = ([each.to(device) for each in rows[name].unbind()] for name in ("latents", "timesteps"))
        stds = rows["step_stds"].values().to(device)
        lengths = torch.tensor([len(each) - 1 for each in times])
        before, after = torch.cat([each[:-1] for each in times]), torch.cat([each[1:] for each in times])
        states, samples = torch.cat([each[:-1] for each in latents]), torch.cat([each[1:] for each in latents])
        try:
            prompts = [model.encode(tuple(each.tolist())) for each in rows["prompt_token_ids"].unbind()]
        except PipelineError as error:
            raise BatchError(str(error)) from error
        conditions = [prompt for prompt, steps in zip(prompts, lengths.tolist(), strict=True) for _ in range(steps)]
        mean = mean_of(states, model.velocity(states, before, conditions), before, after, stds)
        return ModelOutput(
            token_logprobs=logprobs_of(samples, mean, stds),
            cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device),
            counts=counts,
        )

    def optimizer_step(self, adam: AdamParams | None = None) -> float:
        """Clip the gradient, step, and return its norm before clipping."""
        optimizer = self._need_optimizer()
        if adam is not None:
            raise ConfigError("backend 'diffusion' takes AdamW's numbers from EngineConfig.optimizer; leave adam out.")
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
        """Stream the transformer's tensors under diffusers' names, the adapter merged."""
        return self._merged(), None

    @torch.no_grad()
    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        deltas: dict[str, Tensor] = {}
        if self._config.lora is not None:
            layers = self._model.transformer.named_modules()
            deltas = {name: m.get_delta_weight(_ADAPTER) for name, m in layers if hasattr(m, "get_delta_weight")}
        for name, tensor in self._model.transformer.state_dict().items():
            if ".lora_" in name:
                continue
            layer, is_base, leaf = name.rpartition(".base_layer.")
            if is_base and leaf == "weight":
                yield f"{layer}.weight", tensor + deltas[layer]
            else:
                yield name.replace(".base_layer.", "."), tensor

    def to(self, device: torch.device | str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move nothing: the engine stays on its device.

        Raises:
            ConfigError: another device is asked for.
        """
        del model, optimizer, grad
        if torch.device(device).type != self._device.type:
            raise ConfigError(f"backend 'diffusion' stays on {self._device}, and cannot move to {device}.")

    def save_checkpoint(self, path: str | Path, step: int) -> None:
        """Write weights, optimizer state, random state and step, atomically."""
        optimizer, target = self._need_optimizer(), Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        states = {
            f"{name}.{key}": value for name, p in self._trained().items() for key, value in optimizer.state[p].items()
        }
        save_file(
            {k: v.contiguous() for k, v in self._model.transformer.state_dict().items()}, draft / "model.safetensors"
        )
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
        expected = {name: tensor.shape for name, tensor in self._model.transformer.state_dict().items()}
        if {name: tensor.shape for name, tensor in weights.items()} != expected:
            raise CheckpointError(f"{root} is of another model: its tensors differ in name or shape.")
        self._model.transformer.load_state_dict(weights)
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

    def save_model(self, path: str | Path) -> None:
        """Write a pipeline folder with the trained transformer, the adapter merged."""
        target = Path(path)
        shutil.copytree(
            self._config.model_path, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.index.json")
        )
        for file in (target / "transformer").glob("*.safetensors"):
            file.unlink()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self._merged()}
        save_file(tensors, target / "transformer/diffusion_pytorch_model.safetensors", {"format": "pt"})

    def close(self) -> None:
        """Free the model."""
        self._loaded = self._optimizer = None


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
