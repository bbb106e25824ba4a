"""TensorBoard: an event file in `output_dir/tensorboard`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.tensorboard import SummaryWriter

from rl_trainer.trackers.base import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_trainer.metrics import StepRecord
    from rl_trainer.trackers.base import RunInfo


class TensorBoardTracker(Tracker):
    """One scalar per number and step, and the configuration as text."""

    def __init__(self, run: RunInfo) -> None:
        import yaml

        # What a process that was killed logged of steps that are taken again is hidden.
        again = run.start_step + 1 if run.start_step else 0
        self._writer = SummaryWriter(str(run.output_dir / "tensorboard"), purge_step=again)
        self._writer.add_text("config", "```yaml\n" + yaml.safe_dump(dict(run.config), sort_keys=False) + "```")

    def log(self, record: StepRecord) -> None:
        """Write the step's numbers, to be seen at once."""
        for name, value in record.scalars().items():
            self._writer.add_scalar(name, value, record.step)
        self._writer.flush()

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """Close the file."""
        self._writer.close()
