"""Trackers of a run's metrics: console, MLflow, SwanLab, TensorBoard, trackio, wandb, or a custom one."""

from rl_trainer.trackers.base import RunInfo, Tracker, TrackerGroup

__all__ = ["RunInfo", "Tracker", "TrackerGroup"]
