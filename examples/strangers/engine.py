"""Engine of a stranger: a table of logits, in which a token depends on the one before it. One process, on the CPU."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from rl_engine import errors
from rl_engine.base import Engine
from rl_engine.registry import describe_model
from rl_engine.types import BatchCounts, EngineConfig, EngineOutput, ModelOutput
from rl_engine.types.manifest import digest_files, find_damage, read_manifest, write_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor

    from rl_engine.base import LossFunction
    from rl_engine.types import PeftConfig

WEIGHTS = "bigram.pt"


def create(config: EngineConfig) -> BigramEngine:
    return BigramEngine(config)


class BigramEngine(Engine):
    """Logits of the next token by the previous one, all 0 at first."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def check(self, world_size: int) -> dict[str, str]:
        if world_size != 1 or self._config.lora is not None:
            raise errors.ConfigError(
                "a table of logits is trained by one rank, without an adapter; set engine.world_size=1"
            )
        describe_model(self._config.model_path)
        return {"prefix_sharing": "no: a token depends on the one before it alone"}

    def initialize(self) -> None:
        size = describe_model(self._config.model_path).config["vocab_size"]
        saved = Path(self._config.model_path) / WEIGHTS
        table = torch.load(saved) if saved.is_file() else torch.zeros(size, size)
        self._table = table.requires_grad_(self._config.optimizer is not None)
        settings = self._config.optimizer
        self._optimizer = None if settings is None else torch.optim.Adam([self._table], lr=settings.lr)

    def train_mode(self) -> AbstractContextManager[None]:
        return nullcontext()

    def eval_mode(self) -> AbstractContextManager[None]:
        return torch.no_grad()

    def optimizer_zero_grad(self) -> None:
        self._table.grad = None

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> EngineOutput:
        completions = data["completion_token_ids"]
        labels, offsets = completions.values(), completions.offsets().to(torch.int64)
        previous = labels.roll(1)
        previous[offsets[:-1]] = data["prompt_token_ids"].values()[data["prompt_token_ids"].offsets()[1:] - 1]
        scores = torch.log_softmax(self._table[previous] / self._config.temperature, -1)
        mask = data.get("loss_mask")
        learned = torch.ones_like(labels) if mask is None else mask.values()
        rows = torch.stack([row.any() for row in learned.split(offsets.diff().tolist())])
        output = ModelOutput(
            token_logprobs=scores.gather(1, labels[:, None])[:, 0],
            entropy=-(scores.exp() * scores).sum(-1) if self._config.entropy else None,
            cu_seqlens=offsets,
            counts=BatchCounts(tokens=float(learned.sum()), sequences=float(rows.sum())),
        )
        metrics: dict[str, float] = {}
        if loss_function is not None:
            loss, found = loss_function(output, data)
            if not forward_only:
                loss.backward()
            metrics = {"loss": loss.item(), **{name: float(value) for name, value in found.items()}}
        given = {"logprobs": output.logprobs, "entropy": output.entropy}
        columns = {
            name: torch.nested.nested_tensor_from_jagged(value.detach(), completions.offsets())
            for name, value in given.items()
            if value is not None
        }
        return EngineOutput(
            columns=TensorDict(columns, batch_size=data.batch_size), metrics=metrics, num_micro_batches=1
        )

    def optimizer_step(self) -> float:
        if self._optimizer is None or self._config.optimizer is None:
            raise errors.ConfigError("this engine is frozen; give it an optimizer")
        norm = float(torch.nn.utils.clip_grad_norm_([self._table], self._config.optimizer.max_grad_norm))
        if not torch.isfinite(torch.tensor(norm)):
            raise errors.NonFiniteError(f"the gradient norm is {norm}; the step was not taken")
        self._optimizer.step()
        return norm

    def learning_rate(self) -> float:
        return self._config.optimizer.lr if self._config.optimizer is not None else 0.0

    def lr_scheduler_step(self) -> float:
        return self.learning_rate()

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, Tensor]], PeftConfig | None]:
        return iter([("bigram.weight", self._table.detach())]), None

    def to(self, device: torch.device | str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """It stays on the CPU."""

    def save_checkpoint(self, path: str | Path, step: int) -> None:
        draft = Path(f"{path}.unfinished")
        draft.mkdir(parents=True)
        state = None if self._optimizer is None else self._optimizer.state_dict()
        torch.save({"table": self._table.detach(), "optimizer": state}, draft / "state.pt")
        write_manifest(draft / "manifest.json", {"step": step}, digest_files(draft, ["state.pt"]))
        shutil.rmtree(path, ignore_errors=True)
        draft.rename(path)

    def load_checkpoint(self, path: str | Path, *, optimizer: bool = True) -> int:
        manifest = Path(path) / "manifest.json"
        if damage := find_damage(manifest):
            raise errors.CheckpointError(damage[0])
        state = torch.load(Path(path) / "state.pt")
        self._table.data.copy_(state["table"])
        if self._optimizer is not None and optimizer:
            self._optimizer.load_state_dict(state["optimizer"])
        return read_manifest(manifest)["step"] if optimizer else 0

    def save_model(self, path: str | Path) -> None:
        shutil.copytree(self._config.model_path, path, dirs_exist_ok=True)
        torch.save(self._table.detach(), Path(path) / WEIGHTS)

    def close(self) -> None:
        """The table goes with the engine."""
