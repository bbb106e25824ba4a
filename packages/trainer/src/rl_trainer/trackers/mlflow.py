"""MLflow. `tracking.trackers.mlflow` has `tracking_uri` (default: MLflow's own), `experiment` and `run_name`."""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from rl_trainer.config.load import flat
from rl_trainer.trackers.base import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_trainer.metrics import StepRecord
    from rl_trainer.trackers.base import RunInfo

_MOST_CHARS, _MOST_PARAMS = 6000, 100
"""Characters of a parameter, and parameters of a call, that MLflow's servers take."""


class MlflowTracker(Tracker):
    """One MLflow run, with the configuration's keys as parameters."""

    def __init__(
        self,
        run: RunInfo,
        *,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
    ) -> None:
        self._client, name = MlflowClient(tracking_uri), experiment or run.name
        found = self._client.get_experiment_by_name(name)
        its = self._client.create_experiment(name) if found is None else found.experiment_id
        self._id = self._client.create_run(its, run_name=run_name or run.output_dir.name).info.run_id
        params = [Param(key, str(value)[:_MOST_CHARS]) for key, value in flat(run.config).items()]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + _MOST_PARAMS])

    def log(self, record: StepRecord) -> None:
        """Send the step's numbers."""
        now = time.time_ns() // 1_000_000
        metrics = [Metric(name, value, now, record.step) for name, value in record.scalars().items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """Mark the run as finished, or as failed."""
        self._client.set_terminated(self._id, "FAILED" if summary is None else "FINISHED")
