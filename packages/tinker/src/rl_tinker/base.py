"""Interface of the training processes, as the scheduler of the server sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_tinker.types import AdamParams, AdapterSpec


class TrainingGroup(ABC):
    """Training processes that hold one base model and many adapters.

    One command runs at a time. Folders are absolute and written completely (fsync included) before a call returns. Any
    call raises `RanksLostError` if the processes ended or missed the deadline: what they held in memory is gone, and
    `incarnation` has changed. `CommandError` is an answer: the state of every model is unchanged.
    """

    @property
    @abstractmethod
    def incarnation(self) -> int:
        """Number of times that the processes were started; models have to be restored in each."""

    @abstractmethod
    async def start(self) -> None:
        """Start the processes unless they run, and wait until the base model is loaded.

        Raises:
            RanksLostError: they ended, or were not ready before the deadline; has their last lines of output.
        """

    @abstractmethod
    async def create(self, model: str, adapter: AdapterSpec | None, folder: str) -> None:
        """Add an adapter with new weights, and write its state to `folder`."""

    @abstractmethod
    async def restore(self, model: str, adapter: AdapterSpec | None, folder: str, *, optimizer: bool = True) -> None:
        """Add an adapter (unless it is there) and load its weights; without `optimizer` its moments are zero."""

    @abstractmethod
    async def save(self, model: str, folder: str) -> None:
        """Write the state of a model to `folder`."""

    @abstractmethod
    async def drop(self, model: str) -> None:
        """Remove a model from memory."""

    @abstractmethod
    async def forward(self, requests: Sequence[tuple[str, bytes]], *, backward: bool) -> list[bytes | str]:
        """Run requests of several models in one pass: `(model, body of forward_backward)`.

        Returns:
            For each request the encoded output, or the error that its own rows caused.
        """

    @abstractmethod
    async def optim_step(self, model: str, params: AdamParams, folder: str) -> dict[str, float]:
        """Step one model's optimizer, drop its gradient, and write the new state to `folder`; returns metrics."""

    @abstractmethod
    async def stop(self) -> None:
        """End the processes. Idempotent."""
