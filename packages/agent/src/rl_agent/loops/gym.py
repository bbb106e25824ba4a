"""Environment loop: plays environments of Gymnasium's interface, with the model's turns as actions."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from rl_agent.base import AgentLoop
from rl_agent.chat_template import TurnTemplate
from rl_agent.errors import FailureError, RowError, described
from rl_agent.media import take_images
from rl_agent.registry import create_environments, load_plugin
from rl_agent.session import Session
from rl_agent.tools.base import DeadlineError, in_thread, with_deadline
from rl_agent.types import Failure, FailureKind, well_formed

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from rl_agent.base import Generator
    from rl_agent.types import AgentLoopOutput, Message, Tokenizer


class GymLoop(AgentLoop):
    """Environment loop: observations are the user's turns, the model's turns are the actions.

    An environment has `reset(*, seed) -> (observation, info)`, `step(action) -> (observation, reward, terminated,
    truncated, info)` and, if it wants, `close()`; plain methods or coroutines (https://gymnasium.farama.org/api/env).
    One that has to wait for its turn has a coroutine `ready()`, which no deadline but that of the rollout ends.
    An action is the text of the model's turn. An observation is text, a list of content parts (text and images, as
    chat messages have them), or a list of chat messages. The reward is the sum of the steps'; `turn_rewards` holds
    each, and the metrics `reward/NAME` sum what steps list by name in `info["rewards"]`. What ended the trajectory is
    `extra_fields["end"]`: `terminated`, `truncated`, `cut` (a turn ran out of tokens, unplayed), `max_turns` or
    `max_completion_tokens`.

    A row names an installed environment in `environment`, unless the loop has one, and may hold `environment_args`,
    `seed` and `system` (a system message). An environment that raises, blocks or answers something else ends its
    rollout as a failure.

    Args:
        server: Generator of tokens, such as a rollout server.
        tokenizer: Tokenizer of the served model.
        environment: Environments to play, as `rl_agent.registry.create_environments` takes their name.
        environment_args: Their arguments, for rows that give none.
        environments: Factories by name, in addition to the entry points `rl_agent.environments`. A row that names none
            takes the only one.
        max_turns: Generations at most.
        max_completion_tokens: Tokens after the first observation at most; None leaves it to the server.
        step_timeout_s: Deadline of one call of the environment, seconds.
        template_kwargs: Further variables of the chat template.

    Raises:
        TemplateError: the chat template cannot continue a conversation.
        PluginError: there is no such environment.
    """

    def __init__(
        self,
        server: Generator,
        tokenizer: Tokenizer,
        *,
        environment: str | None = None,
        environment_args: Mapping[str, Any] | None = None,
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
        self._source = None if environment is None else create_environments(environment, environment_args)
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
        async with self._made(row) as environment:
            return await self._play(environment, sampling_params, row)

    async def close(self) -> None:
        """End what the source of environments has started."""
        if self._source is not None:
            await self._source.close()

    async def prompt(self, row: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Token ids and images of the first observation, for which an environment is made and reset."""
        async with self._made(row) as environment:
            return (await self._reset(environment, row))[:2]

    @asynccontextmanager
    async def _made(self, row: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        if self._source is None:
            environment = await make_environment(row, self._environments, timeout_s=self._timeout_s)
        else:
            arguments, make = {**self._source.arguments, **(row.get("environment_args") or {})}, self._source.make
            environment = await call_environment(lambda: make(**arguments), stage="make", timeout_s=self._timeout_s)
        try:
            if hasattr(environment, "ready"):
                await call_environment(environment.ready, timeout_s=math.inf)
            yield environment
        finally:
            if hasattr(environment, "close"):
                await call_environment(environment.close, timeout_s=self._timeout_s)

    async def _reset(
        self, environment: Any, row: Mapping[str, Any]
    ) -> tuple[tuple[int, ...], tuple[str, ...], Any, int]:
        """Reset an environment; returns the prompt's token ids and images, `info` and the number of escaped tokens."""
        found = await call_environment(environment.reset, seed=row.get("seed"), timeout_s=self._timeout_s)
        try:
            observation, info = found
        except (TypeError, ValueError) as error:
            raise environment_failure("reset", f"it gave {found!r:.80}; (observation, info) is needed") from error
        messages, images, num_escaped = self._messages(observation, "reset")
        return self._template.prompt([*system_messages(row), *messages]), images, info, num_escaped

    def _messages(self, observation: Any, stage: str) -> tuple[list[Message], tuple[str, ...], int]:
        """Messages of an observation, its images, and the number of special tokens that were escaped in it."""
        try:
            messages, images = take_images(observed_messages(observation, stage), {})
        except RowError as error:
            raise environment_failure(stage, f"its observation cannot be shown: {error}") from error
        messages, num_escaped = self._template.escaped(messages)
        return messages, images, num_escaped

    async def _play(self, environment: Any, params: Mapping[str, Any], row: Mapping[str, Any]) -> AgentLoopOutput:
        prompt, images, info, num_escaped = await self._reset(environment, row)
        session = Session(
            self.server,
            self.tokenizer,
            prompt,
            params,
            max_completion_tokens=self._max_completion_tokens,
            images=images,
            template=self._template,
        )
        rewards, terms = list[float](), Counter[str]()
        while True:
            await session.generate()
            if not session.is_stopped:  # half an action is not played; the reward so far stands
                rewards.append(0.0)
                end = "cut"
                break
            step = await call_environment(environment.step, session.last_text, timeout_s=self._timeout_s)
            observation, reward, is_terminated, is_truncated, info = check_step(step)
            rewards.append(reward)
            terms.update(reward_terms(info))
            if is_terminated or is_truncated:
                end = "terminated" if is_terminated else "truncated"
                break
            if session.num_turns == self._max_turns:
                end = "max_turns"
                break
            messages, images, num_broken = self._messages(observation, "step")
            num_escaped += num_broken
            if not session.append(messages, images):
                end = "max_completion_tokens"
                break
        counts = {"num_steps": float(len(rewards) - (end == "cut")), "num_escaped": float(num_escaped)}
        return session.finish(
            reward=sum(rewards),
            turn_rewards=rewards,
            metrics=counts | {f"reward/{name}": value for name, value in terms.items()},
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
        RowError: it raised that.
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
    except RowError:
        raise
    except Exception as error:
        raise environment_failure(stage, described(error)) from error


def check_step(step: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    """Validate the result of `step`: Gymnasium's tuple.

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
    return observation, reward, bool(is_terminated), bool(is_truncated), info


def reward_terms(info: Mapping[str, Any]) -> dict[str, float]:
    """Terms of a step's reward by name, as `info["rewards"]` lists them; empty where it lists none.

    Raises:
        FailureError: one is no finite number.
    """
    terms = cast("Mapping[str, Any]", info["rewards"]) if isinstance(info.get("rewards"), Mapping) else {}
    for name, value in terms.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise environment_failure("step", f"term {name!r} of its reward is {value!r}; a finite number is needed")
    return {str(name): float(value) for name, value in terms.items()}


def observed_messages(observation: Any, stage: str) -> list[Message]:
    """Chat messages of an observation: text, content parts, or messages; lone surrogates are replaced.

    Raises:
        FailureError: it is something else.
    """
    given = cast("list[Any]", observation) if isinstance(observation, list) else []
    items = [cast("Mapping[str, Any]", each) for each in given if isinstance(each, Mapping)]
    if isinstance(observation, str):
        observation = [{"role": "user", "content": observation}]
    elif items and len(items) == len(given) and all("type" in each for each in items):
        observation = [{"role": "user", "content": items}]
    elif not items or len(items) < len(given) or not all("role" in each and "content" in each for each in items):
        what = f"its observation is a {type(observation).__name__}"
        raise environment_failure(stage, f"{what}; text, content parts or chat messages are needed")
    return list(well_formed(observation))


def system_messages(row: Mapping[str, Any]) -> list[Message]:
    """System message of a row, if it has one."""
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


def environment_failure(stage: str, message: str) -> FailureError:
    """Failure of an environment, which says nothing about the model."""
    return FailureError(
        Failure(kind=FailureKind.ENVIRONMENT, stage=stage, message=message, is_retryable=stage != "row")
    )
