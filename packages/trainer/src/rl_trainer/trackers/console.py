"""The terminal: a live panel, or a line of at most 120 characters per step without one, and a closing table.

Without a terminal a line also says what a long step, or the start, is at, once in ten seconds.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rl_trainer.trackers.base import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping

    from rich.console import Console

    from rl_trainer.metrics import StepRecord
    from rl_trainer.trackers.base import RunInfo

_LONGEST = 120
_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red")
_NUM_SHOWN, _PHASE_WIDTH = 60, 60
_SILENCE_S = 10.0
"""Seconds without a line after which one says what is being done."""


class ConsoleTracker(Tracker):
    """Shows the last step's reward, accuracy, KL, speed, phases, staleness and failures, and the rewards so far."""

    def __init__(self, run: RunInfo) -> None:
        self._run = run
        self._held_out = ""
        self._rewards: deque[float] = deque(maxlen=_NUM_SHOWN)
        self._failures: Counter[str] = Counter()
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=run.console,
        )
        self._task = self._progress.add_task(run.name, total=run.num_steps, completed=run.start_step)
        self._live = Live(console=run.console, refresh_per_second=4)
        self._has_begun = False

    def log(self, record: StepRecord) -> None:
        """Renew the panel, or print a line."""
        self._held_out = held_out_of(record) or self._held_out
        self._failures.update(record.failures)
        if record.reward is not None:
            self._rewards.append(record.reward)
        if not self._run.console.is_terminal:
            line = line_of(record, self._run.num_steps, self._held_out)
            self._run.console.print(line, highlight=False, soft_wrap=True, markup=False)
            return
        if not self._has_begun:  # not before: while workers start, the terminal shows that
            self._live.start()
            self._has_begun = True
        self._progress.update(self._task, completed=record.step)
        self._live.update(self._panel(record), refresh=True)

    def _panel(self, record: StepRecord) -> Group:
        rows = Table.grid(padding=(0, 2))
        rows.add_row("reward", Text(f"{sparkline(self._rewards)} {_number(record.reward)}"))
        rows.add_row("now", Text("  ".join(_numbers(record, self._held_out))))
        rows.add_row("phases", phase_bar(record.phase_s))
        if record.metrics.get("staleness_max"):
            ages = f"mean {record.metrics['staleness_mean']:.2f}, at most {record.metrics['staleness_max']:g} versions"
            rows.add_row("staleness", Text(ages))
        if self._failures:
            rows.add_row("failures", Text(", ".join(f"{kind} {count}" for kind, count in self._failures.items())))
        return Group(self._progress, rows)

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """Leave the panel as it is, and show the summary."""
        if self._has_begun:
            self._live.stop()
        if summary is None:
            return
        table = Table(title="summary", show_header=False)
        for name, value in summary.items():
            if name == "phase_s":
                value = "  ".join(f"{k} {v:.1f}" for k, v in value.items())
            table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
        self._run.console.print(table)


@contextmanager
def progress_lines(
    console: Console, doing: Callable[[], str], *, silence_s: float = _SILENCE_S
) -> Generator[Callable[[], None]]:
    """Print the current activity whenever `silence_s` seconds brought no line; prints nothing in a terminal.

    `doing` gives the line, on another thread.

    Yields:
        A function to call where a line was printed.
    """
    if console.is_terminal:
        yield lambda: None
        return
    ended, last = threading.Event(), time.monotonic()

    def renew() -> None:
        nonlocal last
        last = time.monotonic()

    def follow() -> None:
        while not ended.wait(max(last + silence_s - time.monotonic(), 0.01)):
            if time.monotonic() - last >= silence_s:
                console.print(doing()[:_LONGEST], highlight=False, soft_wrap=True, markup=False)
                renew()

    thread = threading.Thread(target=follow, name="progress", daemon=True)
    thread.start()
    try:
        yield renew
    finally:
        ended.set()
        thread.join()


@contextmanager
def status(console: Console, doing: str) -> Generator[Callable[[str], None]]:
    """Show the current activity: by a spinner, or without a terminal by a line at once and one every ten seconds.

    Yields:
        A function to call with what is being done now.
    """
    start, now = time.monotonic(), doing
    if not console.is_terminal:
        console.print(doing, highlight=False)
    with console.status(doing) as shown, progress_lines(console, lambda: f"{now}, {time.monotonic() - start:.0f} s"):

        def show(what: str) -> None:
            nonlocal now
            now = what
            shown.update(what)

        yield show


def line_of(record: StepRecord, num_steps: int, held_out: str) -> str:
    """One step in at most 120 characters: what does not fit is left out from the end; `metrics.jsonl` has it."""
    line = f"step {record.step}/{num_steps}"
    longest = sorted(record.phase_s.items(), key=lambda phase: -phase[1])
    for part in (*_numbers(record, held_out), *(f"{name} {seconds:.2f}s" for name, seconds in longest)):
        if len(line) + 2 + len(part) <= _LONGEST:
            line += f"  {part}"
    return line


def held_out_of(record: StepRecord) -> str:
    """The evaluation of a step in a few words: its accuracy, or its reward if nothing measures correctness."""
    if record.eval_reward is None:
        return ""
    is_known = record.accuracy is not None
    return f"held-out {record.accuracy:.3f}" if is_known else f"held-out reward {record.eval_reward:.3f}"


def _numbers(record: StepRecord, held_out: str) -> list[str]:
    parts = [] if record.reward is None else [f"reward {record.reward:.3f}"]
    parts += [held_out] if held_out else []
    kinds = {"kl": "kl", "reward_kl": "kl", "k3": "kl to old policy"}  # to the reference where there is one
    known = next((name for name in kinds if name in record.metrics), None)
    parts += [f"{kinds[known]} {record.metrics[known]:.4f}"] if known is not None else []
    parts += [f"{record.tokens_per_s:.0f} tok/s"] if record.num_tokens else []
    return parts


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def sparkline(values: Iterable[float]) -> str:
    """A character per value, from the lowest to the highest of them."""
    values = list(values)
    low, high = min(values, default=0.0), max(values, default=0.0)
    span = high - low
    return "".join(_BARS[min(int((v - low) / span * len(_BARS)), len(_BARS) - 1)] if span else _BARS[0] for v in values)


def phase_bar(phase_s: Mapping[str, float]) -> Text:
    """The phases of a step as one bar in their colours, each with its name and seconds behind it."""
    whole, bar, names = sum(phase_s.values()), Text(), Text()
    for (name, seconds), colour in zip(phase_s.items(), _COLOURS * len(phase_s), strict=False):
        bar.append("█" * round(_PHASE_WIDTH * seconds / whole) if whole else "", style=colour)
        names.append(f" {name} {seconds:.2f}s", style=colour)
    return bar.append_text(names)
