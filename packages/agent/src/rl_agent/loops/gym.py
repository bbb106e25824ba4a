"""Environment loop: plays text environments of Gymnasium's interface, with the model's turns as actions."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

from rl_agent.base import AgentLoop
from rl_agent.chat_template import TurnTemplate
from rl_agent.errors import FailureError, RowError, described
from rl_agent.registry import load_plugin
from rl_agent.session import Session
from rl_agent.tools.base import DeadlineError, in_thread, with_deadline
from rl_agent.types import Failure, FailureKind, readable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_agent.base import Generator
    from rl_agent.types import AgentLoopOutput, Message, Tokenizer


class GymLoop(AgentLoop):
    """Environment loop: observations are the user's turns, the model's turns are the actions.

    An environment has `reset(*, seed) -> (observation, info)`, `step(action) -> (observation, reward, terminated,
    truncated, info)` and, if it wants, `close()`; plain methods or coroutines, text for observations and actions
    (https://gymnasium.farama.org/api/env). The reward is the sum of the steps'; `turn_rewards` holds each. What ended
    the trajectory is `extra_fields["end"]`: `terminated`, `truncated`, `cut` (a turn ran out of tokens, unplayed),
    `max_turns` or `max_completion_tokens`.

    A row names its environment in `environment`, with `environment_args`, and may hold `seed` and `system` (a system
    message). An environment that raises, blocks or answers something else ends its rollout as a failure.

    Args:
        server: Generator of tokens, such as a rollout server.
        tokenizer: Tokenizer of the served model.
        environments: Factories by name, besides the entry points `rl_agent.environments`. A row that names none takes
            the only one.
        max_turns: Generations at most.
        max_completion_tokens: Tokens after the first observation at most; None leaves it to the server.
        step_timeout_s: Deadline of one call of the environment, seconds.
        template_kwargs: Further variables of the chat template.

    Raises:
        TemplateError: the chat template cannot continue a conversation.
    """

    def __init__(
        self,
        server: Generator,
        tokenizer: Tokenizer,
        *,
        environments: Mapping[str, Callable[..., Any]] | None = None,
        max_turns: int = 16,
        max_completion_tokens: int | None = None,
        step_timeout_s: float = 30.0,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(server, tokenizer)
        if max_turns < 1 or step_timeout_s <= 0 or (max_completion_tokens or 1) < 1:
            raise ValueError(
                f"max_turns={max_turns}, step_timeout_s={step_timeout_s} and "
                f"max_completion_tokens={max_completion_tokens} must be positive"
            )
        self._environments = dict(environments or {})
        self._max_turns = max_turns
        self._max_completion_tokens = max_completion_tokens
        self._timeout_s = step_timeout_s
        self._template = TurnTemplate(tokenizer, template_kwargs=template_kwargs)

    async def run(self, sampling_params: dict[str, Any], row: Mapping[str, Any]) -> AgentLoopOutput:
        """Play one episode.

        Args:
            sampling_params: Fields of `SamplingParams`; `max_new_tokens` bounds each turn.
            row: The row: `environment`, `environment_args`, `seed`, `system`.

        Raises:
            RowError: the row names no environment, or arguments that it does not take.
            FailureError: the environment failed, or a generation was aborted before its first token.
        """
        environment = await make_environment(row, self._environments, timeout_s=self._timeout_s)
        try:
            return await self._play(environment, sampling_params, row)
        finally:
            if hasattr(environment, "close"):
                await call_environment(environment.close, timeout_s=self._timeout_s)

    async def prompt(self, row: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Token ids of the first observation, for which an environment is made and reset."""
        environment = await make_environment(row, self._environments, timeout_s=self._timeout_s)
        try:
            return (await self._reset(environment, row))[0], ()
        finally:
            if hasattr(environment, "close"):
                await call_environment(environment.close, timeout_s=self._timeout_s)

    async def _reset(self, environment: Any, row: Mapping[str, Any]) -> tuple[tuple[int, ...], Any, int]:
        """Reset an environment; returns the prompt's token ids, `info` and the number of escaped special tokens."""
        found = await call_environment(environment.reset, seed=row.get("seed"), timeout_s=self._timeout_s)
        try:
            observation, info = found
        except (TypeError, ValueError) as error:
            raise environment_failure("reset", f"it gave {found!r:.80}; (observation, info) is needed") from error
        text, num_escaped = self._template.escape(check_text(observation, "reset"))
        messages: list[Message] = [{"role": "user", "content": text}]
        if row.get("system"):
            messages.insert(0, {"role": "system", "content": row["system"]})
        return self._template.prompt(messages), info, num_escaped

    async def _play(self, environment: Any, params: Mapping[str, Any], row: Mapping[str, Any]) -> AgentLoopOutput:
        prompt, info, num_escaped = await self._reset(environment, row)
        session = Session(
            self.server,
            self.tokenizer,
            prompt,
            params,
            max_completion_tokens=self._max_completion_tokens,
            template=self._template,
        )
        rewards: list[float] = []
        while True:
            await session.generate()
            if not session.is_stopped:  # half an action is not played; the reward so far stands
                rewards.append(0.0)
                end = "cut"
                break
            step = await call_environment(environment.step, session.last_text, timeout_s=self._timeout_s)
            observation, reward, is_terminated, is_truncated, info = check_step(step)
            rewards.append(reward)
            if is_terminated or is_truncated:
                end = "terminated" if is_terminated else "truncated"
                break
            if session.num_turns == self._max_turns:
                end = "max_turns"
                break
            text, num_broken = self._template.escape(observation)
            num_escaped += num_broken
            if not session.append([{"role": "user", "content": text}]):
                end = "max_completion_tokens"
                break
        return session.finish(
            reward=sum(rewards),
            turn_rewards=rewards,
            metrics={"num_steps": float(len(rewards) - (end == "cut")), "num_escaped": float(num_escaped)},
            extra_fields={"end": end, "info": info},
        )


async def make_environment(row: Mapping[str, Any], given: Mapping[str, Callable[..., Any]], *, timeout_s: float) -> Any:
    """Create the environment that a row names in `environment`, with its `environment_args`.

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
    """Call a method of an environment, a coroutine function or a blocking one; `stage` defaults to its name.

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
        raise environment_failure(stage, described(error)) from error


def check_step(step: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Validate the result of `step`: Gymnasium's tuple, with a text observation.

    Raises:
        FailureError: it is not.
    """
    try:
        observation, reward, is_terminated, is_truncated, info = step
        reward, info = float(reward), dict(info)
    except (TypeError, ValueError, OverflowError) as error:
        needed = "observation, reward, terminated, truncated, info"
        raise environment_failure("step", f"it gave {step!r}; a tuple of {needed} is needed") from error
    if not math.isfinite(reward):
        raise environment_failure("step", f"its reward is {reward}")
    return check_text(observation, "step"), reward, bool(is_terminated), bool(is_truncated), info


def check_text(observation: Any, stage: str) -> str:
    """Validate an observation, which must be text; its lone surrogates are replaced."""
    if not isinstance(observation, str):
        raise environment_failure(stage, f"its observation is a {type(observation).__name__}; text is needed")
    return readable(observation)


def environment_failure(stage: str, message: str) -> FailureError:
    """Failure of an environment, which says nothing about the model."""
    return FailureError(
        Failure(kind=FailureKind.ENVIRONMENT, stage=stage, message=message, is_retryable=stage != "row")
    )
