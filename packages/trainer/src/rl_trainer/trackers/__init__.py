"""Where a run's numbers go: trackers by name, several at once."""

from rl_trainer.trackers.base import RunInfo, Tracker, TrackerGroup

__all__ = ["RunInfo", "Tracker", "TrackerGroup"]
