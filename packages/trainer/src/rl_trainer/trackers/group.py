"""All trackers of a run. One that fails is told once and left out from there on; metrics.jsonl goes on regardless."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rl_trainer.errors import InputError
from rl_trainer.plugins import find

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from rl_trainer.metrics import StepRecord
    from rl_trainer.trackers.base import RunInfo, Tracker

GROUP = "rl_trainer.trackers"
"""The entry points."""


class TrackerGroup:
    """Writes every record to `metrics.jsonl` as it comes, and hands it to each tracker. A context manager.

    Args:
        run: The run.
        trackers: Installed trackers, by name, with their keyword arguments.

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
            except Exception as error:
                self._close()
                raise InputError(
                    f"tracker {name!r} cannot start with tracking.trackers.{name}={dict(given)}: "
                    f"{type(error).__name__}: {error}; mend it, or take it out"
                ) from error

    def log(self, record: StepRecord) -> None:
        """Take one step's record; the evaluation with which a run goes on is no news where its step's line has one."""
        log = self._run.output_dir / "metrics.jsonl"
        if record.is_evaluation and log.is_file():
            lines = map(json.loads, log.read_text().splitlines())
            if any(line["step"] == record.step and line["accuracy"] is not None for line in lines):
                return
        with log.open("a") as file:
            file.write(json.dumps(_line(record)) + "\n")
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(record)
            except Exception as error:  # noqa: BLE001 - a tracker is a plug-in: what it raises must not end the run
                del self._trackers[name]
                self._tell(name, f"failed at step {record.step} and is left out from here on", error)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run ended well: say so to the trackers when they are closed."""
        self._summary = summary

    def _close(self) -> None:
        for name, tracker in self._trackers.items():
            try:
                tracker.close(self._summary)
            except Exception as error:  # noqa: BLE001 - as in log
                self._tell(name, "could not be closed", error)
        self._trackers.clear()

    def _tell(self, name: str, what: str, error: Exception) -> None:
        self._run.console.print(
            f"tracker {name!r} {what}: {type(error).__name__}: {error}; all numbers are in metrics.jsonl",
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
