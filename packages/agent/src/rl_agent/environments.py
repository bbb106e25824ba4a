"""Text environments, called so that one that blocks or breaks ends its own rollout and no other."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

from rl_agent.errors import FailureError, RowError
from rl_agent.registry import load_plugin
from rl_agent.tools.base import DeadlineError, in_thread, with_deadline
from rl_agent.types import Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


async def make_environment(row: Mapping[str, Any], given: Mapping[str, Callable[..., Any]], *, timeout_s: float) -> Any:
    """The environment that a row names in `environment`, made with its `environment_args`.

    Raises:
        RowError: the row names none, or arguments that it does not take.
        PluginError: there is none of that name.
        FailureError: it could not be made, or not in time.
    """
    name, arguments = row.get("environment"), row.get("environment_args") or {}
    if name is None and len(given) == 1:
        name = next(iter(given))
    if not isinstance(name, str):
        raise RowError(f"field 'environment' of the row is {name!r}; it needs the name of an environment")
    factory = given[name] if name in given else load_plugin("environments", name)
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise RowError(f"field 'environment_args' does not suit environment {name!r}: {error}") from error
    return await call_environment(lambda: factory(**arguments), stage="make", timeout_s=timeout_s)


async def call_environment(
    method: Callable[..., Any], *args: Any, stage: str = "", timeout_s: float, **kwargs: Any
) -> Any:
    """One call of an environment's method, a coroutine function or one that blocks; `stage` is its name, else.

    Raises:
        FailureError: it raised, or did not answer in time.
    """

    async def work() -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(*args, **kwargs)
        return await in_thread(lambda: method(*args, **kwargs))

    stage = stage or method.__name__
    try:
        return await with_deadline(work(), timeout_s)
    except DeadlineError as error:
        message = f"the environment's {stage} did not answer within {timeout_s:g} s"
        raise environment_failure(stage, message) from error
    except Exception as error:
        raise environment_failure(stage, f"{type(error).__name__}: {error}") from error


def check_step(step: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """What `step` gave, if it is what Gymnasium defines, with text for observation.

    Raises:
        FailureError: it is not.
    """
    try:
        observation, reward, is_terminated, is_truncated, info = step
        reward = float(reward)
    except (TypeError, ValueError) as error:
        needed = "observation, reward, terminated, truncated, info"
        raise environment_failure("step", f"it gave {step!r}; a tuple of {needed} is needed") from error
    if not math.isfinite(reward):
        raise environment_failure("step", f"its reward is {reward}")
    return check_text(observation, "step"), reward, bool(is_terminated), bool(is_truncated), dict(info)


def check_text(observation: Any, stage: str) -> str:
    """An observation, if it is text."""
    if not isinstance(observation, str):
        raise environment_failure(stage, f"its observation is a {type(observation).__name__}; text is needed")
    return observation


def environment_failure(stage: str, message: str) -> FailureError:
    """The environment failed; nothing is said about the model."""
    return FailureError(
        Failure(kind=FailureKind.ENVIRONMENT, stage=stage, message=message, is_retryable=stage != "row")
    )
