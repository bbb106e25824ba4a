"""Rows of the recipes: drawn from a seed, with demonstrations for a warm start, and held-out tasks."""

from __future__ import annotations

import random
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rl_agent.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


Chat = list[dict[str, str]]
"""Messages with role and content."""
NUM_DEMONSTRATIONS = 2000
"""Chats for the warm start."""


class DataConfig(Protocol):
    """Configuration of the data, as far as the recipes read it."""

    format: str
    eval_size: int
    options: Mapping[str, Any]


class Rows(NamedTuple):
    """Training and held-out rows of a recipe."""

    train: list[dict[str, Any]]
    eval: list[dict[str, Any]]


def draw_rows(
    config: DataConfig,
    make: Callable[[random.Random, bool], tuple[str, dict[str, Any], Chat]],
    *,
    seed: int,
    num_train: int | None = None,
    num_demonstrations: int = NUM_DEMONSTRATIONS,
) -> Rows:
    """Draw the rows of a recipe; held-out ones do not depend on the seed, and none is there twice.

    Args:
        config: Configuration of the data.
        make: Makes a task's name, its row and a chat that demonstrates it, of the held-out tasks if asked to.
        seed: Seed of the run.
        num_train: Training rows, which share the chats; None: one per chat.
        num_demonstrations: Chats for the warm start.

    Raises:
        PluginError: `data.options` is set.
    """
    if config.options:
        raise PluginError(
            f"data.options has {', '.join(map(repr, config.options))}, but data.format={config.format} takes none; "
            "leave it out"
        )
    choose, held_out = random.Random(1), dict[str, dict[str, Any]]()
    for _ in range(20 * config.eval_size):
        name, row, _ = make(choose, True)
        held_out[name] = row
        if len(held_out) == config.eval_size:
            break
    choose = random.Random(seed)
    made = [make(choose, False)[1:] for _ in range(num_demonstrations)]
    chats, num_train = [chat for _, chat in made], num_train or num_demonstrations
    train = [{**row, "demonstrations": chats[index::num_train]} for index, (row, _) in enumerate(made[:num_train])]
    return Rows(train, [*held_out.values()])


def is_held_out(task: str) -> bool:
    """Whether a task is one of the fifth that is held out, by its name's checksum."""
    return zlib.crc32(task.encode()) % 5 == 0


def row(prompt: str, *, answer: str = "", **more: Any) -> dict[str, Any]:
    """Row with one message of the user."""
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "data_source": "recipe",
        "reward_model": {"style": "rule", "ground_truth": answer},
        **more,
    }


def said(*turns: str) -> Chat:
    """Messages of the assistant and of the user in turns, the assistant first."""
    return [{"role": ("assistant", "user")[index % 2], "content": turn} for index, turn in enumerate(turns)]
