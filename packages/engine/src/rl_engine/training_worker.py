"""Training primitives over one engine, for scripts that need no trainer: forward_backward, optim_step, save, load.

The verbs are those of Tinker's training client; every rank calls them in the same order, each with its own rows.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_engine.registry import create_engine

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from tensordict import TensorDict

    from rl_engine.base import Engine, LossFunction
    from rl_engine.types import EngineConfig, EngineOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """Result of one optimizer step."""

    step: int
    """Steps taken so far, this one included."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    """The rate that the next step will use."""


class TrainingWorker:
    """Worker that trains one engine and counts its steps. A context manager; leaving it frees the engine.

    Gradients of several `forward_backward` calls add up until `optim_step`.
    """

    def __init__(self, config: EngineConfig, backend: str = "fsdp") -> None:
        """Build the engine.

        Raises:
            BackendError: no such backend, or it cannot be imported.
            ConfigError, ModelFolderError: as `Engine.initialize`.
        """
        self.engine: Engine = create_engine(backend, config)
        self.step = 0
        self._modes = ExitStack()
        try:
            self.engine.initialize()
            if config.optimizer is not None:
                self._modes.enter_context(self.engine.train_mode())
                self.engine.optimizer_zero_grad()
        except BaseException:
            self.engine.close()
            raise

    def forward(self, data: TensorDict, loss_function: LossFunction | None = None) -> EngineOutput:
        """Score rows without gradients or dropout; with a loss function also its loss and metrics.

        Raises:
            BatchError: as `Engine.forward_backward_batch`.
        """
        with self.engine.eval_mode():
            return self.engine.forward_backward_batch(data, loss_function, forward_only=True)

    def forward_backward(self, data: TensorDict, loss_function: LossFunction) -> EngineOutput:
        """Add the gradient of one logical batch.

        Raises:
            BatchError, ConfigError: as `Engine.forward_backward_batch`.
        """
        return self.engine.forward_backward_batch(data, loss_function)

    def optim_step(self) -> StepOutcome:
        """Step the optimizer and the schedule, and drop the gradients.

        Raises:
            NonFiniteError: the gradient norm is NaN or infinite; weights and state are as before, the gradient is gone.
        """
        try:
            norm = self.engine.optimizer_step()
        finally:
            self.engine.optimizer_zero_grad()
        self.step += 1
        return StepOutcome(step=self.step, grad_norm=norm, lr=self.engine.lr_scheduler_step())

    def save_state(self, path: str | Path) -> None:
        """Everything that `load_state` needs to go on as if nothing had happened; for any number of ranks."""
        self.engine.save_checkpoint(path, self.step)

    def load_state(self, path: str | Path) -> int:
        """Go on from `save_state`; returns the steps taken by then.

        Raises:
            CheckpointError: incomplete, or another model's; nothing has changed.
        """
        self.step = self.engine.load_checkpoint(path)
        return self.step

    def save_weights(self, path: str | Path) -> None:
        """An ordinary Hugging Face folder."""
        self.engine.save_model(path)

    def close(self) -> None:
        """Free the engine. Idempotent."""
        self._modes.close()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
