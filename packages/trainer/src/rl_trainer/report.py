"""What a person sees of a run, and what stays on disk: progress, table, metrics.jsonl, summary.json, learning curve."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from pathlib import Path

    from rich.console import Console

    from rl_trainer.metrics import StepRecord
    from rl_trainer.plan import BatchPlan


class Report:
    """Collects step records; writes each to `metrics.jsonl` as it comes, so a killed run keeps what it measured."""

    def __init__(self, console: Console, output_dir: Path, num_steps: int) -> None:
        self.console = console
        self._dir = output_dir
        self._num_steps = num_steps
        self._records: list[StepRecord] = []
        self._start = time.perf_counter()

    @contextmanager
    def progress(self) -> Generator[Progress]:
        """A progress bar that `step` advances."""
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}"),
        )
        with Progress(
            *columns, console=self.console, refresh_per_second=4, disable=not self.console.is_terminal
        ) as progress:
            self._progress, self._task = progress, progress.add_task("training", total=self._num_steps, status="")
            yield progress

    def add(self, record: StepRecord) -> None:
        """Take one step's record."""
        self._records.append(record)
        with (self._dir / "metrics.jsonl").open("a") as file:
            line = asdict(record) | {"pending": len(record.pending)}
            line |= {"tokens_per_s": record.tokens_per_s, "wall_s": record.wall_s}
            file.write(json.dumps(line) + "\n")
        self._progress.update(self._task, completed=record.step, status=self._status(record))
        if not self.console.is_terminal:
            self.console.print(
                f"step {record.step}/{self._num_steps}  {self._status(record)}", highlight=False, soft_wrap=True
            )

    def _status(self, record: StepRecord) -> str:
        parts = [] if record.reward is None else [f"reward {record.reward:.3f}"]
        accuracies = [r.accuracy for r in self._records if r.accuracy is not None]
        parts += [f"held-out {accuracies[-1]:.3f}"] if accuracies else []
        # To the reference where there is one, else to the policy that generated.
        kl = record.metrics.get("kl") or record.metrics.get("k3")
        parts += [f"kl {kl:.4f}"] if kl is not None else []
        parts += [f"{record.tokens_per_s:.0f} tok/s"] if record.num_tokens else []
        parts.append(" ".join(f"{name} {seconds:.2f}s" for name, seconds in record.phase_s.items()))
        return "  ".join(parts)

    def summary(self) -> dict[str, Any]:
        """The run in numbers."""
        accuracies = [r.accuracy for r in self._records if r.accuracy is not None]
        trained = [r for r in self._records if r.reward is not None]
        phase_s: dict[str, float] = {}
        for record in self._records:
            for name, seconds in record.phase_s.items():
                phase_s[name] = phase_s.get(name, 0.0) + seconds
        busy = sum(r.wall_s - r.phase_s.get("eval", 0.0) for r in trained)
        tokens = sum(r.num_tokens for r in trained)
        return {
            "accuracy_first": accuracies[0] if accuracies else None,
            "accuracy_last": accuracies[-1] if accuracies else None,
            "steps": trained[-1].step if trained else 0,
            "wall_s": time.perf_counter() - self._start,
            "tokens_per_s": tokens / busy if busy else 0.0,
            "phase_s": phase_s,
            "failed_rollouts": sum(sum(r.failures.values()) for r in trained),
        }

    def finish(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Write summary and curve, show the closing table, and return the summary."""
        summary = self.summary() | extra
        (self._dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        curve = self._write_curve()
        table = Table(title="summary", show_header=False)
        for name, value in summary.items():
            if name == "phase_s":
                value = "  ".join(f"{k} {v:.1f}" for k, v in value.items())
            table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
        table.add_row("learning curve", str(curve) if curve else "not drawn: pip install matplotlib")
        self.console.print(table)
        return summary

    def _write_curve(self) -> Path | None:
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            return None
        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        rewards = [(r.step, r.reward) for r in self._records if r.reward is not None]
        held_out = [(r.step, r.accuracy) for r in self._records if r.accuracy is not None]
        for label, points, style in (("training reward", rewards, "-"), ("held-out accuracy", held_out, "o-")):
            if points:
                axes.plot(*zip(*points, strict=True), style, label=label, alpha=0.9, markersize=4)
        axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.02), title="learning curve")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
        path = self._dir / "learning_curve.png"
        figure.savefig(path, dpi=120)
        return path


def show_plan(console: Console, plan: BatchPlan, facts: Iterable[tuple[str, str]]) -> None:
    """Print what will run, before it does."""
    table = Table(title="batch plan", show_header=False)
    for name, value in (*facts, *plan.lines()):
        table.add_row(name, value)
    console.print(table)
