"""The terminal: a progress bar, or a line per step where there is no terminal, and a closing table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rl_trainer.trackers.base import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_trainer.metrics import StepRecord
    from rl_trainer.trackers.base import RunInfo


class ConsoleTracker(Tracker):
    """Shows the last step's reward, accuracy, KL, speed and phases."""

    def __init__(self, run: RunInfo) -> None:
        self._run, self._accuracy = run, None
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}"),
            console=run.console,
            refresh_per_second=4,
            disable=not run.console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=run.num_steps, status="")

    def log(self, record: StepRecord) -> None:
        """Move the bar, or print a line."""
        self._accuracy = self._accuracy if record.accuracy is None else record.accuracy
        status = _status(record, self._accuracy)
        self._progress.start()  # not before: while workers start, the terminal shows that
        self._progress.update(self._task, completed=record.step, status=status)
        if not self._run.console.is_terminal:
            self._run.console.print(
                f"step {record.step}/{self._run.num_steps}  {status}", highlight=False, soft_wrap=True
            )

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """Take the bar away, and show the summary."""
        self._progress.stop()
        if summary is None:
            return
        table = Table(title="summary", show_header=False)
        for name, value in summary.items():
            if name == "phase_s":
                value = "  ".join(f"{k} {v:.1f}" for k, v in value.items())
            table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
        self._run.console.print(table)


def _status(record: StepRecord, accuracy: float | None) -> str:
    parts = [] if record.reward is None else [f"reward {record.reward:.3f}"]
    parts += [] if accuracy is None else [f"held-out {accuracy:.3f}"]
    kinds = {"kl": "kl", "reward_kl": "kl", "k3": "kl to old policy"}  # to the reference where there is one
    known = next((name for name in kinds if name in record.metrics), None)
    parts += [f"{kinds[known]} {record.metrics[known]:.4f}"] if known is not None else []
    parts += [f"{record.tokens_per_s:.0f} tok/s"] if record.num_tokens else []
    parts.append(" ".join(f"{name} {seconds:.2f}s" for name, seconds in record.phase_s.items()))
    return "  ".join(parts)
