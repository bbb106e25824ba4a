"""Training processes in memory, for tests of clients and of the server: no model, deterministic numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rl_tinker.base import TrainingGroup
from rl_tinker.durable import sync_tree
from rl_tinker.errors import CommandError, RanksLostError
from rl_tinker.types import Answer, Command, Verb
from rl_tinker.wire.results import encode_forward_backward
from rl_tinker.wire.rows import decode_forward_backward


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

    async def stop(self) -> None:
        """See `TrainingGroup`."""

    async def call(self, command: Command) -> Answer:
        """See `TrainingGroup`."""
        models = tuple(model for model, _ in command.requests) or (command.model,)
        self.calls.append(("backward" if command.backward else str(command.verb), models))
        if command.verb not in (Verb.CREATE, Verb.RESTORE) and (lost := set(models) - self.values.keys()):
            raise CommandError(f"there is no model {lost.pop()}")
        if self.lose_next or len(self.calls) == self.lose_at + 1:
            self.lose_next = max(self.lose_next - 1, 0)
            self._incarnation += 1
            self.values.clear()
            self.gradients.clear()
            raise RanksLostError("lost on purpose")
        return self._run(command, command.model)

    def _run(self, command: Command, model: str) -> Answer:
        match command.verb:
            case Verb.FORWARD:
                results = [self._pass(*request, backward=command.backward) for request in command.requests]
                return Answer(results=results, errors=[""] * len(results))
            case Verb.CREATE:
                self.values[model] = float(command.adapter.seed if command.adapter else 0)
            case Verb.RESTORE:
                self.values[model] = json.loads((Path(command.folder) / "adapter.json").read_text())
            case Verb.DROP:
                del self.values[model], self.gradients[model]
                return Answer()
            case _:
                pass
        gradient = self.gradients.get(model, 0.0)
        if command.adam is not None:
            self.gradients[model] = 0.0
            if not np.isfinite(gradient * command.adam.learning_rate):
                raise CommandError("the gradient norm is not finite")
            self.values[model] += command.adam.learning_rate * gradient
        elif command.verb in (Verb.CREATE, Verb.RESTORE):
            self.gradients[model] = 0.0
        if command.verb != Verb.RESTORE:
            self._write(model, Path(command.folder))
        return Answer(metrics={"grad_norm": abs(gradient)} if command.adam else {})

    def _pass(self, model: str, body: bytes, *, backward: bool) -> bytes:
        rows = decode_forward_backward(body).rows
        loss = float(sum(row.inputs.get("weights", np.ones(1)).sum(dtype=np.float64) for row in rows))
        if backward:
            self.gradients[model] += loss
        logprobs = [np.full(row.targets.shape, -self.values[model], np.float32) for row in rows]
        return encode_forward_backward(logprobs, {"loss:sum": loss})

    def _write(self, model: str, folder: Path) -> None:
        folder.mkdir()
        (folder / "adapter.json").write_text(json.dumps(self.values[model]))
        (folder / "optimizer.json").write_text("{}")
        sync_tree(folder)
