"""Training processes in memory, for tests of clients and of the server: no model, deterministic numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl_tinker.base import TrainingGroup
from rl_tinker.durable import sync_tree
from rl_tinker.errors import CommandError, RanksLostError
from rl_tinker.wire.results import encode_forward_backward
from rl_tinker.wire.rows import decode_forward_backward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_tinker.types import AdamParams, AdapterSpec


class FakeGroup(TrainingGroup):
    """Group whose models are one number each: its gradient is the sum of the weights of the rows' losses.

    A step adds the learning rate times the gradient. `calls` lists what was called; `lose_next` loses the processes in
    the middle of that many commands, `lose_at` in the one of that number.
    """

    def __init__(self) -> None:
        self._incarnation = 1
        self.values: dict[str, float] = {}
        """Value of each model in memory."""
        self.gradients: dict[str, float] = {}
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.lose_next, self.lose_at = 0, -1

    @property
    def incarnation(self) -> int:
        """See `TrainingGroup`."""
        return self._incarnation

    async def start(self) -> None:
        """See `TrainingGroup`."""

    async def create(self, model: str, adapter: AdapterSpec | None, folder: str) -> None:
        """See `TrainingGroup`."""
        self._note("create", model)
        self.values[model], self.gradients[model] = float(adapter.seed if adapter else 0), 0.0
        self._write(model, folder)

    async def restore(self, model: str, adapter: AdapterSpec | None, folder: str, *, optimizer: bool = True) -> None:
        """See `TrainingGroup`."""
        del adapter, optimizer
        self._note("restore", model)
        self.values[model] = json.loads((Path(folder) / "adapter.json").read_text())
        self.gradients[model] = 0.0

    async def save(self, model: str, folder: str) -> None:
        """See `TrainingGroup`."""
        self._note("save", model)
        self._write(model, folder)

    async def drop(self, model: str) -> None:
        """See `TrainingGroup`."""
        self._note("drop", model)
        del self.values[model], self.gradients[model]

    async def forward(self, requests: Sequence[tuple[str, bytes]], *, backward: bool) -> list[bytes | str]:
        """See `TrainingGroup`."""
        self._note("backward" if backward else "forward", *(model for model, _ in requests))
        results: list[bytes | str] = []
        for model, body in requests:
            rows = decode_forward_backward(body).rows
            loss = float(sum(row.inputs.get("weights", np.ones(1)).sum(dtype=np.float64) for row in rows))
            if backward:
                self.gradients[model] += loss
            logprobs = [np.full(row.targets.shape, -self.values[model], np.float32) for row in rows]
            results.append(encode_forward_backward(logprobs, {"loss:sum": loss}))
        return results

    async def optim_step(self, model: str, params: AdamParams, folder: str) -> dict[str, float]:
        """See `TrainingGroup`."""
        self._note("optim_step", model)
        gradient, self.gradients[model] = self.gradients[model], 0.0
        if not np.isfinite(gradient * params.learning_rate):
            raise CommandError("the gradient norm is not finite", is_user=True)
        self.values[model] += params.learning_rate * gradient
        self._write(model, folder)
        return {"grad_norm": abs(gradient)}

    async def stop(self) -> None:
        """See `TrainingGroup`."""

    def _note(self, name: str, *models: str) -> None:
        self.calls.append((name, models))
        if name not in ("create", "restore") and (lost := [each for each in models if each not in self.values]):
            raise CommandError(f"there is no model {lost[0]}", is_user=False)
        if self.lose_next or len(self.calls) == self.lose_at + 1:
            self.lose_next = max(self.lose_next - 1, 0)
            self._incarnation += 1
            self.values.clear()
            self.gradients.clear()
            raise RanksLostError("lost on purpose")

    def _write(self, model: str, folder: str) -> None:
        Path(folder).mkdir()
        (Path(folder) / "adapter.json").write_text(json.dumps(self.values[model]))
        (Path(folder) / "optimizer.json").write_text("{}")
        sync_tree(Path(folder))
