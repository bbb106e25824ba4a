"""What is known of a run at its end: summary.json and the learning curve; and the plan that is shown before it."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from rich.console import Console

    from rl_trainer.metrics import StepRecord
    from rl_trainer.plan import BatchPlan


class Report:
    """Collects step records."""

    def __init__(self, output_dir: Path) -> None:
        self._dir = output_dir
        self._records: list[StepRecord] = []
        self._start = time.perf_counter()
        self.has_begun = False
        """Whether anything was ever measured."""

    def add(self, record: StepRecord) -> None:
        """Take one step's record."""
        self._records.append(record)
        self.has_begun = True
        if record.rows:
            with (self._dir / "prompts.jsonl").open("a") as file:
                file.write(json.dumps({"step": record.step, "rows": record.rows}) + "\n")

    def forget_after(self, step: int) -> None:
        """Later steps will be taken again."""
        self._records = [record for record in self._records if record.step <= step]

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
        """Write summary and curve, and return the summary."""
        summary = self.summary() | extra
        (self._dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        curve = self._write_curve()
        return summary | {"learning_curve": str(curve) if curve else "not drawn: pip install matplotlib"}

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
