"""Tracker interface: where a run's metrics go. One of your own is a subclass, named by `tracking.trackers`.

One that fails is reported once and left out from there on; metrics.jsonl goes on regardless.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rl_agent.errors import described, is_foreign
from rl_trainer.errors import InputError
from rl_trainer.output_dir import append_line
from rl_trainer.plugins import find

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    from rich.console import Console

    from rl_trainer.metrics import StepRecord

GROUP = "rl_trainer.trackers"
"""The entry points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Run information that a tracker is made with."""

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
    """Tracker of a run's metrics.

    Constructed in the controller's process as `tracker(run, **tracking.trackers[name])`, before anything else is
    started: what is wrong with its options or its account should show there. Then `log` after every step, in order and
    on one thread, and `close` once. What either raises ends the tracker, not the run.
    """

    @abstractmethod
    def log(self, record: StepRecord) -> None:
        """Log a step's record; `record.scalars()` has its numbers under flat names."""

    @abstractmethod
    def close(self, summary: Mapping[str, Any] | None) -> None:
        """Close at the end of a run: with its summary, or None after an error."""


class TrackerGroup:
    """Tracker group of a run: writes `metrics.jsonl` and passes records to each tracker. A context manager.

    Raises:
        InputError: a tracker could not be made; those before it are closed.
    """

    def __init__(self, run: RunInfo, trackers: Mapping[str, Mapping[str, Any]]) -> None:
        self._run = run
        self._trackers: dict[str, Tracker] = {}
        self._summary: Mapping[str, Any] | None = None
        for name, given in trackers.items():
            try:
                self._trackers[name] = find(name, GROUP, key="tracking.trackers")(run, **given)
            except BaseException as error:
                if not is_foreign(error):
                    raise
                self._close()
                raise InputError(
                    f"tracker {name!r} cannot start with tracking.trackers.{name}={dict(given)}: "
                    f"{described(error)}; fix it, or take it out"
                ) from error

    def log(self, record: StepRecord) -> None:
        """Log a step's record; a resumed run's first evaluation is skipped if that step's line has one already."""
        log = self._run.output_dir / "metrics.jsonl"
        if record.is_evaluation and log.is_file():
            lines = map(json.loads, log.read_text().splitlines())
            if any(line["step"] == record.step and line.get("eval_reward") is not None for line in lines):
                return
        append_line(log, json.dumps(_line(record)))
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(record)
            except BaseException as error:  # a tracker is a plug-in: what it raises must not end the run
                if not is_foreign(error):
                    raise
                del self._trackers[name]
                self._report(name, f"failed at step {record.step} and is left out from here on", error)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Set the summary of a run that ended well, which the trackers get when they are closed."""
        self._summary = summary

    def _close(self) -> None:
        for name, tracker in self._trackers.items():
            try:
                tracker.close(self._summary)
            except BaseException as error:  # as in log
                if not is_foreign(error):
                    raise
                self._report(name, "could not be closed", error)
        self._trackers.clear()

    def _report(self, name: str, what: str, error: BaseException) -> None:
        self._run.console.print(
            f"tracker {name!r} {what}: {described(error)}; all numbers are in metrics.jsonl",
            markup=False,
            soft_wrap=True,
        )

    def __enter__(self) -> TrackerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


def _line(record: StepRecord) -> dict[str, Any]:
    line = asdict(record) | {"pending": len(record.pending), "held": len(record.held)}
    del line["rows"]  # prompts.jsonl has them
    return line | {"tokens_per_s": record.tokens_per_s, "wall_s": record.wall_s}
