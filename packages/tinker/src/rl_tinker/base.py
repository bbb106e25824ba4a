"""Interface of the training processes, as the scheduler of the server sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_tinker.types import Answer, Command


class TrainingGroup(ABC):
    """Training processes that hold one base model and many adapters. One command runs at a time."""

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
    async def call(self, command: Command) -> Answer:
        """Run a command. What it writes is complete, and on disk, before this returns.

        Raises:
            RanksLostError: the processes ended, or missed the deadline: what they held in memory is gone.
            CommandError: the request is at fault; the state of every model is unchanged.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End the processes. Idempotent."""
