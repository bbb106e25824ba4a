"""SwanLab. `tracking.trackers.swanlab` are arguments of `swanlab.init`, such as `{project: x, mode: offline}`."""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import swanlab

from rl_trainer.trackers.base import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_trainer.metrics import StepRecord
    from rl_trainer.trackers.base import RunInfo


class SwanLabTracker(Tracker):
    """One SwanLab run; its local files are in the output folder."""

    def __init__(self, run: RunInfo, **options: Any) -> None:
        folder = run.output_dir / "swanlab"
        given: dict[str, Any] = {"project": run.name, "name": run.output_dir.name, "log_dir": str(folder)} | options
        self._run = swanlab.init(config=dict(run.config), **given)

    def log(self, record: StepRecord) -> None:
        """Send the step's numbers."""
        self._run.log(record.scalars(), step=record.step)

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """Mark the run as finished, or as failed."""
        self._run.finish("success" if summary is not None else "crashed")
