"""Training primitives over one engine, for scripts that need no trainer: forward_backward, optim_step, save, load.

The verbs are those of Tinker's training client; every rank calls them in the same order, each with its own rows.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_engine.registry import create_engine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Self

    from tensordict import TensorDict
    from torch import Tensor

    from rl_engine.base import Engine, LossFunction
    from rl_engine.types import (
        AdamParams,
        EngineConfig,
        EngineOutput,
        LoraConfig,
        PeftConfig,
        RowsOutput,
        TrainingRow,
    )


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

    def __init__(
        self,
        config: EngineConfig,
        backend: str = "fsdp",
        *,
        max_resident: int = 8,
        idle_folder: str | Path | None = None,
    ) -> None:
        """Build the engine; see `rl_engine.registry.create_worker`.

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

    def optim_step(self, adam: AdamParams | None = None, adapter: str | None = None) -> StepOutcome:
        """Step the optimizer and the schedule, and drop the gradients.

        Args:
            adam: Numbers of this step; None: those of the configuration and its schedule.
            adapter: Adapter that steps, which needs `adam`; None: the model.

        Raises:
            NonFiniteError: the gradient norm is NaN or infinite; weights and state are as before, the gradient is gone.
            ConfigError: no such adapter.
        """
        if adam is not None or adapter is not None:
            raise NotImplementedError
        try:
            norm = self.engine.optimizer_step()
        finally:
            self.engine.optimizer_zero_grad()
        self.step += 1
        return StepOutcome(step=self.step, grad_norm=norm, lr=self.engine.lr_scheduler_step())

    def save_state(self, path: str | Path, adapter: str | None = None, *, optimizer: bool = True) -> None:
        """Write everything that `load_state` needs to go on as if nothing had happened; for any number of ranks.

        Args:
            path: Folder, which appears complete or not at all; one that was there is replaced.
            adapter: Adapter, whose folder peft reads too; None: the model.
            optimizer: Write the optimizer's state along with the weights (of the model: always).

        Raises:
            ConfigError: no such adapter.
        """
        if adapter is not None:
            raise NotImplementedError
        self.engine.save_checkpoint(path, self.step)

    def load_state(self, path: str | Path, adapter: str | None = None, *, optimizer: bool = True) -> int:
        """Go on from `save_state`; returns the steps taken by then.

        Args:
            path: Its folder.
            adapter: Adapter that takes it, of the same rank and modules; None: the model.
            optimizer: Take the optimizer's state too; False: begin with a fresh one, at step 0.

        Raises:
            CheckpointError: incomplete, of another model or adapter, or without the state asked for; nothing changed.
            ConfigError: no such adapter.
        """
        if adapter is not None:
            raise NotImplementedError
        self.step = self.engine.load_checkpoint(path)
        return self.step

    def save_weights(self, path: str | Path) -> None:
        """An ordinary Hugging Face folder."""
        self.engine.save_model(path)

    # Adapters by name, and rows that each name theirs

    @property
    def adapters(self) -> dict[str, LoraConfig]:
        """Adapters that rows may name, in the order in which they were added."""
        raise NotImplementedError

    def add_adapter(self, name: str, lora: LoraConfig, seed: int = 0) -> PeftConfig:
        """Add an adapter, equal to the one that an engine with this `lora` and `seed` begins with.

        Any other adapter's weights, gradients and state stay as they are, and nothing is compiled or allocated anew.

        Returns:
            Its description, as peft writes it to adapter_config.json.

        Raises:
            ConfigError: the name is taken or no name, the model is trained itself, or the settings do not suit it.
        """
        raise NotImplementedError

    def remove_adapter(self, name: str) -> None:
        """Free an adapter with its gradient and state.

        Raises:
            ConfigError: no such adapter.
        """
        raise NotImplementedError

    def check_rows(self, rows: Sequence[TrainingRow], losses: Mapping[str | None, LossFunction] | None = None) -> None:
        """Refuse rows that a pass would refuse, so that one tenant's do not fail another's batch. Not collective.

        Raises:
            BatchError: an unknown adapter or token, no entry or too many in a column, a row too long; names the row.
        """
        raise NotImplementedError

    def forward_rows(
        self, rows: Sequence[TrainingRow], losses: Mapping[str | None, LossFunction] | None = None
    ) -> RowsOutput:
        """Score rows, each under its adapter, without gradients. Collective; a rank may pass any rows, or none.

        Args:
            rows: Rows of any number of adapters.
            losses: Loss function by adapter; its metrics are reported.

        Raises:
            BatchError: as `check_rows`.
        """
        raise NotImplementedError

    def forward_backward_rows(
        self, rows: Sequence[TrainingRow], losses: Mapping[str | None, LossFunction]
    ) -> RowsOutput:
        """Add the gradient of each row's loss to its adapter's, all in one pass. Collective.

        An adapter's gradient is that of a pass over its rows alone. `output.counts` of a loss function are those of
        its adapter's rows over all ranks. A NaN reaches the gradient of the adapter that made it and no other.

        Raises:
            BatchError: as `check_rows`, or a row's adapter has no loss or cannot be trained; gradients are unchanged.
        """
        raise NotImplementedError

    def export_adapter(self, name: str) -> tuple[Iterator[tuple[str, Tensor]], PeftConfig]:
        """Stream an adapter's tensors as servers take them (`adapters.NAME.` + peft's name), with its description.

        Raises:
            ConfigError: no such adapter.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Free the engine. Idempotent."""
        self._modes.close()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
