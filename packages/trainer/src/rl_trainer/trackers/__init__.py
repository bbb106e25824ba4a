"""Trackers of a run's metrics: console, TensorBoard, wandb, trackio, or your own."""

from rl_trainer.trackers.base import RunInfo, Tracker, TrackerGroup

__all__ = ["RunInfo", "Tracker", "TrackerGroup"]
