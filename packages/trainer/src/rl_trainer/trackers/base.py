"""What a tracker is. One of your own is a class with an entry point in the group `rl_trainer.trackers`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rich.console import Console

    from rl_trainer.metrics import StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a tracker may want to know of a run."""

    name: str
    """The configuration's `name`."""
    output_dir: Path
    """An existing folder, for what the tracker writes."""
    num_steps: int
    """Training steps."""
    start_step: int = 0
    """Steps taken before, by the process that this one goes on for; later ones that it logged are taken again."""
    config: Mapping[str, Any]
    """The whole configuration, as nested mappings of JSON-able values."""
    console: Console
    """The terminal."""


class Tracker(ABC):
    """Takes the numbers of a run.

    Constructed in the controller's process as `tracker(run, **tracking.trackers[name])`, before anything else is
    started: what is wrong with its options or its account should show there. Then `log` after every step, in order and
    on one thread, and `close` once. What either raises ends the tracker, not the run.
    """

    @abstractmethod
    def log(self, record: StepRecord) -> None:
        """Take one step's record; `record.scalars()` has its numbers under flat names."""

    @abstractmethod
    def close(self, summary: Mapping[str, Any] | None) -> None:
        """The run ended: with this summary, or with an error if it is None."""
