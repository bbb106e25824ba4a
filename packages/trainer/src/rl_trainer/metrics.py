"""Metrics of a training step, the timer of its phases, and the report of a run."""

from __future__ import annotations

import json
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_engine.errors import naming
from rl_trainer.output_dir import append_line, write_whole
from rl_trainer.runtime.tracing import span

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

    from rl_ckpt.types import SyncReport


class HeldGroup(NamedTuple):
    """A finished group in the queue that was not learned from yet; a checkpoint stores its values in this order."""

    group_id: int
    row_index: int
    """Number of its prompt's row in the data."""
    place: int
    """Its position in the batch that it was released with."""
    released: int
    """Weight version that the servers held then."""
    attempt: int = 0
    """Number of workers that died while they generated it; a tag of its samples too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Evaluation of a policy on held-out rows."""

    reward: float
    accuracy: float | None
    """Share of the completions that are correct; None where the reward does not say what is."""
    num_prompts: int = 0
    """Held-out rows that it covers."""
    num_failed: int = 0
    """Completions that failed; they are in no mean."""
    last_failure: str = ""
    """Row, type and message of one failure."""
    policy_rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Mean reward of each of several policies, as `NAME/eval_reward`."""

    @property
    def failures(self) -> dict[str, int]:
        """Failed completions, as those of training are counted per kind."""
        return {"evaluation": self.num_failed} if self.num_failed else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step as the controller saw it."""

    step: int
    """1-based; 0 is the evaluation before training."""
    position: int
    """Prompts drawn so far; a run that resumes after this step draws the next one."""
    pending: tuple[int, ...] = ()
    """Rows among those whose groups are being generated; a resumed run takes them first."""
    held: tuple[HeldGroup, ...] = ()
    """Groups among those that are finished, in the queue, and wait to be learned from."""
    rows: tuple[int, ...] = ()
    """Numbers of the data's rows that the step learned from, one per group."""
    reward: float | None
    """Mean reward of the step's completions."""
    accuracy: float | None
    """Share of held-out completions that are correct after the step, where it was evaluated and the reward says so."""
    eval_reward: float | None = None
    """Mean reward on held-out rows after the step, where it was evaluated."""
    eval_prompts: int | None = None
    """Held-out rows of that evaluation; the first one may cover a sample (see the plan)."""
    num_tokens: int
    """Completion tokens generated."""
    num_truncated: int
    """Completions that hit the length limit."""
    failures: Mapping[str, int]
    """Failed rollouts per kind."""
    last_failure: str = ""
    """Message of the last of them."""
    last_tool_error: str = ""
    """Row, tool, type and message of the last exception that a tool raised; the model was shown it and went on."""
    weights: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Receipt of the weights that were sent after the step: version, digest, bytes, how many confirmed, seconds. Of
    several policies a receipt each, by name."""
    metrics: Mapping[str, float]
    """Loss, KL, clip fractions, gradient norm, learning rate."""
    phase_s: Mapping[str, float]

    @property
    def is_evaluation(self) -> bool:
        """Whether the record is that of an evaluation alone."""
        return self.reward is None

    @property
    def wall_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self.phase_s.values())

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens over the step's time without evaluation."""
        busy = self.wall_s - self.phase_s.get("eval", 0.0)
        return self.num_tokens / busy if busy > 0 else 0.0

    def scalars(self) -> dict[str, float]:
        """Every number of the step under a flat name: `reward`, `policy_loss`, `phase_s/update`, `failures/timeout`."""
        found = {"reward": self.reward, "accuracy": self.accuracy, "eval_reward": self.eval_reward}
        found["eval_prompts"] = self.eval_prompts
        numbers = {name: value for name, value in found.items() if value is not None}
        numbers |= {"num_tokens": self.num_tokens, "num_truncated": self.num_truncated}
        numbers |= {"tokens_per_s": self.tokens_per_s, "wall_s": self.wall_s, **self.metrics}
        numbers |= {f"phase_s/{name}": seconds for name, seconds in self.phase_s.items()}
        return numbers | {f"failures/{kind}": count for kind, count in self.failures.items()}

    @classmethod
    def of_evaluation(cls, step: int, found: Evaluation, phase_s: Mapping[str, float], *, position: int) -> StepRecord:
        """The record of an evaluation alone."""
        return cls(
            step=step,
            position=position,
            reward=None,
            accuracy=found.accuracy,
            eval_reward=found.reward,
            eval_prompts=found.num_prompts,
            num_tokens=0,
            num_truncated=0,
            failures=found.failures,
            last_failure=found.last_failure,
            metrics=found.policy_rewards,
            phase_s=phase_s,
        )


PEAK_FLOPS = {
    "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "H800": 989e12, "H20": 148e12, "GH200": 989e12,
    "A100": 312e12, "A800": 312e12, "B200": 2250e12, "L40S": 362e12,
}  # fmt: skip
"""Dense bfloat16 operations per second by what a GPU's name holds, from the vendor's data sheets."""


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations per second of a GPU; None of one that is not in `PEAK_FLOPS`."""
    found = [name for name in PEAK_FLOPS if re.search(rf"\b{name}\b", device_name.replace("-", " "))]
    return PEAK_FLOPS[max(found, key=len)] if found else None


def receipt_of(report: SyncReport) -> dict[str, int | float | str]:
    """Receipt of a weight sync, for `StepRecord.weights`."""
    return {
        "version": report.version,
        "digest": f"{report.digest:016x}",
        "tensors": report.num_tensors,
        "bytes": report.num_bytes,
        "wire_bytes": report.num_wire_bytes,
        "confirmed": len(report.receipts),
        "pause_s": report.pause_s,
        "wall_s": report.wall_s,
    }


@dataclass(slots=True)
class PhaseTimer:
    """Timer that adds up the wall time of named phases, seconds."""

    _seconds: dict[str, float] = field(default_factory=dict)
    current: tuple[str, float] | None = None
    """Name of the phase that is under way, and when it began, by `time.perf_counter`."""

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Attribute the body's time to `name`."""
        start = time.perf_counter()
        self.current = name, start
        try:
            with span(name):
                yield
        finally:
            self.current = None
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """The seconds since the last call, per phase."""
        seconds, self._seconds = self._seconds, {}
        return seconds


class Report:
    """Report of a run: `prompts.jsonl`, `summary.json` and `learning_curve.png` in its output folder."""

    def __init__(self, output_dir: Path) -> None:
        self._dir = output_dir
        self._records: list[StepRecord] = []
        self._start = time.perf_counter()
        self.has_begun = False
        """Whether anything was ever measured."""

    def add(self, record: StepRecord) -> None:
        """Add a step's record."""
        self._records.append(record)
        self.has_begun = True
        if record.rows:
            append_line(self._dir / "prompts.jsonl", json.dumps({"step": record.step, "rows": record.rows}))

    def next_step(self, first: int) -> int:
        """Number of the step that is under way; `first` while there was none."""
        return self._records[-1].step + 1 if self._records else first

    def forget_after(self, step: int) -> None:
        """Drop the records of later steps, which will be taken again."""
        self._records = [record for record in self._records if record.step <= step]

    def summary(self) -> dict[str, Any]:
        """The summary: first and last evaluation, steps, seconds, tokens per second, failed rollouts."""
        evaluated = [r for r in self._records if r.eval_reward is not None]
        accuracies, rewards = [r.accuracy for r in evaluated], [r.eval_reward for r in evaluated]
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
            "eval_reward_first": rewards[0] if rewards else None,
            "eval_reward_last": rewards[-1] if rewards else None,
            "steps": trained[-1].step if trained else 0,
            "wall_s": time.perf_counter() - self._start,
            "tokens_per_s": tokens / busy if busy else 0.0,
            "phase_s": phase_s,
            "failed_rollouts": sum(sum(r.failures.values()) for r in trained),
        }

    def finish(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Write summary and curve, and return the summary."""
        summary = self.summary() | extra
        write_whole(self._dir / "summary.json", json.dumps(summary, indent=2) + "\n")
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
        held_out = [(r.step, r.eval_reward) for r in self._records if r.eval_reward is not None]
        right = [(r.step, r.accuracy) for r in self._records if r.accuracy not in (None, r.eval_reward)]
        lines = (("training reward", rewards, "-"), ("held-out reward", held_out, "o-"), ("accuracy", right, "s-"))
        for label, points, style in lines:
            if points:
                axes.plot(*zip(*points, strict=True), style, label=label, alpha=0.9, markersize=4)
        axes.set(xlabel="step", ylabel="mean reward", title="learning curve")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
        path = self._dir / "learning_curve.png"
        with naming(path):
            figure.savefig(path, dpi=120)
        return path
