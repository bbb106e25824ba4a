"""From the rows that were loaded to the prompts that a run draws: without those that are too long, in an order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_trainer.data.datasets import PART
from rl_trainer.data.order import CurriculumOrder, MixtureOrder, Order, PromptOrder, StreamOrder
from rl_trainer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_trainer.config import Config
    from rl_trainer.data.datasets import Datasets
    from rl_trainer.data.rows import Row

    Measure = Callable[[list[Any]], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """What a run draws from."""

    rows: Sequence[Row] | StreamOrder
    """By index."""
    order: Order
    """Gives indices."""
    eval_rows: list[Row]
    """Held-out rows."""
    num_too_long: int
    """Rows that were left out already; a stream counts on."""


def make_prompts(
    config: Config, datasets: Datasets, measure: Measure, *, position: int, returned: Sequence[int]
) -> Prompts:
    """Filter the rows and build their order, which goes on from `position` after the rows `returned`.

    Raises:
        InputError: no training or no held-out prompt is short enough, or none of a part of the mixture.
    """
    data, longest = config.data, config.data.max_prompt_tokens
    eval_rows = short_enough(datasets.eval, measure, longest)
    num_too_long = len(datasets.eval) - len(eval_rows)
    where: dict[str, Any] = {"position": position, "returned": returned}
    if datasets.stream is not None:
        order = StreamOrder(rows=datasets.stream, measure=measure, longest=longest, **where)
        return Prompts(rows=order, order=order, eval_rows=eval_rows, num_too_long=num_too_long)
    rows = short_enough(datasets.train, measure, longest)
    num_too_long += len(datasets.train) - len(rows)
    if data.mixture:
        parts = [row[PART] for row in rows]
        if lost := set(data.mixture) - set(parts):
            raise InputError(
                f"no prompt of data.mixture.{min(lost)} has at most data.max_prompt_tokens={longest} tokens; raise it, "
                "or leave the part out"
            )
        weights = {name: part.weight for name, part in data.mixture.items()}
        order = MixtureOrder(parts=parts, weights=weights, seed=config.seed, **where)
    elif data.curriculum is not None:
        low, high = data.curriculum.pass_rate
        order = CurriculumOrder(
            num_rows=len(rows), seed=config.seed, low=low, high=high, revisit=data.curriculum.revisit, **where
        )
    else:
        order = PromptOrder(num_rows=len(rows), seed=config.seed, **where)
    return Prompts(rows=rows, order=order, eval_rows=eval_rows, num_too_long=num_too_long)


def short_enough(rows: Sequence[Row], measure: Measure, longest: int) -> list[Row]:
    """The rows whose prompts have at most `longest` tokens.

    Raises:
        InputError: there is none.
    """
    lengths = measure(list(rows))
    kept = [row for row, length in zip(rows, lengths, strict=True) if length <= longest]
    if not kept:
        raise InputError(
            f"none of {len(rows)} prompts has at most data.max_prompt_tokens={longest} tokens; the shortest has "
            f"{min(lengths)}"
        )
    return kept
