"""Dataset of the recipe `smollm`: sums and short word problems, made from a seed without a download."""

from __future__ import annotations

import random
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Any

from rl_trainer.data import Datasets
from rl_trainer.errors import DataError

if TYPE_CHECKING:
    from rl_trainer.config.schema import DataConfig

OPERANDS = range(2, 30)
_QUESTIONS = (
    "What is {a} + {b}?",
    "Tom has {a} apples and buys {b} more. How many apples does he have?",
    "There are {a} red cars and {b} blue cars. How many cars are there?",
)
_ENDING = "Reply with only the number."


def sums(config: DataConfig, *, seed: int) -> Datasets:
    """Dataset of sums; no pair of operands is both in training and in held-out rows, in either order.

    The held-out rows do not depend on the seed.

    Raises:
        DataError: `data.options` is set.
    """
    if config.options:
        raise DataError(
            f"data.options has {', '.join(map(repr, config.options))}, but data.format={config.format} takes none; "
            "leave it out"
        )
    pairs = list(combinations_with_replacement(OPERANDS, 2))
    random.Random(0).shuffle(pairs)
    num_held_out = min(config.eval_size, len(pairs) // 2)
    held_out = [_row(*pair, _QUESTIONS[index % len(_QUESTIONS)]) for index, pair in enumerate(pairs[:num_held_out])]
    train = [_row(a, b, each) for x, y in pairs[num_held_out:] for a, b in {(x, y), (y, x)} for each in _QUESTIONS]
    random.Random(seed).shuffle(train)
    return Datasets(train=train, eval=held_out)


def _row(a: int, b: int, question: str) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": f"{question.format(a=a, b=b)} {_ENDING}"}],
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
    }
