"""Samples for a person's eyes: those that a run kept, or fresh ones of a policy."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from rl_trainer.samples import read_samples, steps_of

if TYPE_CHECKING:
    from rich.console import Console

    from rl_trainer.config import Config

Order = Literal["first", "best", "worst"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One sample."""

    title: str
    """Where it is from."""
    prompt: str
    """What the model read."""
    completion: str
    """What it wrote, or read from its tools."""
    reward: float
    """Its reward."""


def kept(run: str | Path, *, step: int | None, order: Order, count: int) -> list[Shown]:
    """Samples of one step that a run kept, the last step if None.

    Raises:
        DataError: the run kept none, or none of that step.
    """
    steps = steps_of(run)[-1:] if step is None else [step]
    columns = ["group_id", "prompt", "completion", "reward", "finish_reason", "weight_version_min"]
    rows: list[dict[str, Any]] = read_samples(run, steps=steps or None, columns=columns).to_pylist()
    if order != "first":
        rows.sort(key=lambda row: row["reward"], reverse=order == "best")
    return [
        Shown(
            title="step {step}, group {group_id}, weights {weight_version_min}, {finish_reason}".format_map(row),
            prompt=row["prompt"],
            completion=row["completion"],
            reward=row["reward"],
        )
        for row in rows[:count]
    ]


def fresh(config: Config, *, url: str | None, order: Order, count: int, num_samples: int) -> list[Shown]:
    """Completions of the first `count` held-out rows by the policy in `model.path`."""
    from rl_trainer.evaluate import sample

    assert config.model.path is not None, "the command has checked it"
    problems = asyncio.run(sample(config, Path(config.model.path), num_samples=num_samples, url=url, num_rows=count))
    found = [
        Shown(title=f"row {number}, sample {index}", prompt=problem.prompt, completion=text, reward=reward)
        for number, problem in enumerate(problems, 1)
        for index, (text, reward) in enumerate(zip(problem.completions, problem.rewards, strict=True), 1)
    ]
    return found if order == "first" else sorted(found, key=lambda shown: shown.reward, reverse=order == "best")


def show(console: Console, samples: list[Shown]) -> None:
    """Print each in a frame."""
    for shown in samples:
        text = Group(Text(shown.prompt.rstrip(), style="dim"), Text(shown.completion.rstrip()))
        console.print(Panel(text, title=Text(shown.title), subtitle=Text(f"reward {shown.reward:.3f}")))
