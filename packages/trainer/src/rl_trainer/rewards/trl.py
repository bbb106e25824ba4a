"""Reward functions written for TRL: `f(prompts, completions, **columns)`, called with all completions of one prompt.

They get what TRL's `GRPOTrainer` gives them (its documentation, "Using a custom reward function"): lists with an entry
per completion, `completion_ids`, every other column of the row, and `trainer_state`, `log_extra` and `log_metric`.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from rl_trainer.data.rows import TEXT_PROMPT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_NOT_COLUMNS = ("prompt", "completion", "completion_ids", TEXT_PROMPT)
"""Fields of a row that are not passed on as columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Completions of one prompt, for one call of a reward function."""

    texts: Sequence[str]
    """Text of each completion."""
    token_ids: Sequence[Sequence[int]]
    """Token ids of each."""
    step: int = 0
    """Step of the run."""
    num_steps: int = 0
    """Steps of the whole run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRewards:
    """Rewards of a `Batch`, and what the function logged."""

    rewards: Sequence[float | None]
    """Reward of each completion; None: the function does not apply to it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means of what `log_metric` got, by name."""
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Columns of `log_extra`: a JSON value per completion."""


def is_batched(parameters: Iterable[inspect.Parameter]) -> bool:
    """Whether a function is called as TRL calls reward functions, by the names of its parameters."""
    named = {each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD}
    return bool(named & {"prompts", "completions", "completion_ids"}) and "text" not in named


def of_batch(
    function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]
) -> Callable[[Mapping[str, Any], Mapping[str, Any]], Any]:
    """TRL's reward function as a function of a batch and its row, both JSON values; it gives `BatchRewards` as JSON."""
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())

    def called(asked: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[Any, _Log]:
        log = _Log(len(asked["texts"]))
        given = _arguments(asked, row, log)
        if lacking := [name for name, each in parameters.items() if _is_needed(each) and name not in given]:
            raise TypeError(f"it takes {', '.join(lacking)}, and the row has {', '.join(map(str, row))}")
        return function(**(given if takes_all else {n: given[n] for n in parameters if n in given})), log

    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004

        async def together(asked: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
            values, log = called(asked, row)
            return log.answer(await values)

        return together

    def one_call(asked: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
        values, log = called(asked, row)
        return log.answer(values)

    return one_call


def _arguments(asked: Mapping[str, Any], row: Mapping[str, Any], log: _Log) -> dict[str, Any]:
    prompt, texts, num = row.get("prompt"), asked["texts"], log.num_completions
    is_text = isinstance(prompt, str) or bool(row.get(TEXT_PROMPT))
    if is_text and not isinstance(prompt, str):
        prompt = row["prompt"][-1]["content"]
    columns = {name: [value] * num for name, value in row.items() if name not in _NOT_COLUMNS}
    state = SimpleNamespace(global_step=asked["step"], max_steps=asked["num_steps"])
    return {
        **columns,
        "prompts": [prompt] * num,
        "completions": texts if is_text else [[{"role": "assistant", "content": text}] for text in texts],
        "completion_ids": asked["token_ids"],
        "trainer_state": state,
        "log_extra": log.extra,
        "log_metric": log.metric,
    }


def _is_needed(parameter: inspect.Parameter) -> bool:
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return parameter.default is parameter.empty and parameter.kind not in variadic


class _Log:
    """What one call of a function logs."""

    def __init__(self, num_completions: int) -> None:
        self.num_completions = num_completions
        self._metrics: defaultdict[str, list[float]] = defaultdict(list)
        self._extra: dict[str, list[Any]] = {}

    def metric(self, name: str, value: float) -> None:
        """`log_metric`: values of one name are averaged."""
        self._metrics[str(name)].append(finite(value, f"log_metric({str(name)!r}) is"))

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """`log_extra`: a value per completion; one that JSON lacks becomes its text."""
        made = [value if isinstance(value, (str, bool, int, float, type(None))) else str(value) for value in values]
        if len(made) != self.num_completions:
            raise ValueError(f"log_extra({column!r}) got {len(made)} values for {self.num_completions} completions")
        self._extra[str(column)] = made

    def answer(self, values: Any) -> dict[str, Any]:
        found = [None if value is None else float(value) for value in values]
        if len(found) != self.num_completions:
            raise ValueError(f"it gave {len(found)} rewards for {self.num_completions} completions")
        metrics = {name: fmean(each) for name, each in self._metrics.items()}
        return {"rewards": found, "metrics": metrics, "extra": self._extra}


def batch_rewards(answer: Any, num_completions: int) -> BatchRewards:
    """Check the answer of a reward process.

    Raises:
        ValueError: it is none.
    """
    fields = cast("dict[Any, Any]", answer if isinstance(answer, dict) else {})
    rewards, metrics, extra = (fields.get(name) for name in ("rewards", "metrics", "extra"))
    if not isinstance(rewards, list) or not isinstance(metrics, dict) or not isinstance(extra, dict):
        raise ValueError("it gave no rewards of a batch")
    columns = cast("dict[Any, Any]", extra)
    for values in (cast("list[Any]", rewards), *columns.values()):
        if not isinstance(values, list) or len(cast("list[Any]", values)) != num_completions:
            raise ValueError(f"it gave a list that is not of {num_completions} completions")
    return BatchRewards(
        rewards=[None if v is None else finite(v, "a reward is") for v in cast("list[Any]", rewards)],
        metrics={str(name): finite(value, f"{name} is") for name, value in cast("dict[Any, Any]", metrics).items()},
        extra={str(name): values for name, values in columns.items()},
    )


def finite(value: Any, name: str, wanted: str = "a number is needed") -> float:
    """Number as a float.

    Raises:
        ValueError: it is no finite number; begins with `name`.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} {value!r:.80}; {wanted}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} {number}; a finite number is needed")
    return number
