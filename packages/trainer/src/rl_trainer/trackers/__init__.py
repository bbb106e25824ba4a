"""Where a run's numbers go: trackers by name, several at once."""

from rl_trainer.trackers.base import RunInfo, Tracker
from rl_trainer.trackers.group import TrackerGroup

__all__ = ["RunInfo", "Tracker", "TrackerGroup"]
