"""trackio: a local SQLite file. `tracking.trackers.trackio` are arguments of `trackio.init`, such as `{project: x}`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trackio

from rl_trainer.trackers.base import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_trainer.metrics import StepRecord
    from rl_trainer.trackers.base import RunInfo


class TrackioTracker(Tracker):
    """One trackio run; `trackio show` displays it."""

    def __init__(self, run: RunInfo, **options: Any) -> None:
        given: dict[str, Any] = {"project": run.name, "name": run.output_dir.name} | options
        self._run = trackio.init(config=dict(run.config), **given)

    def log(self, record: StepRecord) -> None:
        """Write the step's numbers."""
        self._run.log(record.scalars(), step=record.step)

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """Write pending values."""
        self._run.finish()
