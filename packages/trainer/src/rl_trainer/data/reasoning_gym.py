"""Prompts that are drawn from reasoning_gym's procedural tasks."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from rl_trainer.data.rows import ReasoningGymOptions, reasoning_gym_options
from rl_trainer.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rl_trainer.config import DataConfig
    from rl_trainer.data.rows import Row


def load_reasoning_gym(config: DataConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows, every problem once; the held-out ones come from another seed."""
    options = reasoning_gym_options(config)
    held_out = list(_unique(_draw(options, config.eval_size * 4, seed=10_000 + seed)).values())[: config.eval_size]
    if len(held_out) < config.eval_size:
        raise DataError(
            f"reasoning_gym task {options.task!r} gave only {len(held_out)} different problems "
            f"for data.eval_size={config.eval_size}; widen data.options.task_config"
        )
    train = _unique(_draw(options, options.num_rows, seed=seed))
    for row in held_out:
        train.pop(_question(row), None)
    return list(train.values()), held_out


def _unique(rows: Iterable[Row]) -> dict[str, Row]:
    return {_question(row): row for row in rows}


def _question(row: Row) -> str:
    return row["prompt"][-1]["content"]


def _draw(options: ReasoningGymOptions, size: int, *, seed: int) -> Iterator[Row]:
    reasoning_gym = import_reasoning_gym()
    try:
        dataset = reasoning_gym.create_dataset(options.task, size=size, seed=seed, **options.task_config)
    except (ValueError, TypeError, AssertionError) as error:
        raise DataError(
            f"reasoning_gym cannot make task {options.task!r} with {dict(options.task_config)}: {error}"
        ) from error
    for entry in dataset:
        fields = {**entry["metadata"], "question": entry["question"]}
        try:
            content = options.prompt_template.format(**fields)
        except KeyError as error:
            raise DataError(
                f"data.options.prompt_template names {error}, but task {options.task!r} has {sorted(fields)}"
            ) from error
        yield {
            "prompt": [{"role": "user", "content": content}],
            "data_source": f"reasoning_gym/{options.task}",
            "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
            "extra_info": {},
        }


def import_reasoning_gym() -> Any:
    """The reasoning_gym package, or the pip line."""
    try:
        with (
            warnings.catch_warnings()
        ):  # cellpylib, one of its dependencies, compares with `is`; goes when that is mended
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
    except ImportError as error:
        raise DataError("reasoning_gym tasks need their package: pip install 'rl-post-trainer[quickstart]'") from error
    return reasoning_gym
