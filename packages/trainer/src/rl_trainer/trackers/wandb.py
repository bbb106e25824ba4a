"""Weights & Biases. `tracking.trackers.wandb` are arguments of `wandb.init`, such as `{project: x, mode: offline}`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import wandb

from rl_trainer.trackers.base import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_trainer.metrics import StepRecord
    from rl_trainer.trackers.base import RunInfo


class WandbTracker(Tracker):
    """One wandb run; its local files are in the output folder."""

    def __init__(self, run: RunInfo, **options: Any) -> None:
        given: dict[str, Any] = {"project": run.name, "name": run.output_dir.name, "dir": str(run.output_dir)} | options
        self._run = wandb.init(config=dict(run.config), **given)

    def log(self, record: StepRecord) -> None:
        """Send the step's numbers."""
        self._run.log(record.scalars(), step=record.step)

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """Mark the run as finished, or as failed."""
        self._run.summary.update(dict(summary or {}))
        self._run.finish(exit_code=int(summary is None))
