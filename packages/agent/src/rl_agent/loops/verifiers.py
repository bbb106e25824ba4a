"""Loop over environments of verifiers: they run their own rollout, which the recording proxy records."""

# Verifiers is there where its tests run, and not where types are checked.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rl_agent.base import AgentLoop
from rl_agent.environments.verifiers import VerifiersEnvironments
from rl_agent.errors import FailureError, RowError, contained, described, is_foreign
from rl_agent.proxy import RecordingProxy
from rl_agent.types import Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_agent.base import Generator
    from rl_agent.types import AgentLoopOutput, ParsedTurn, Tokenizer

_SEED_STEP = 0x632BE5AB
"""Distance of the seeds of an episode's agents."""


class VerifiersLoop(AgentLoop):
    """Loop that lets verifiers run an episode of a task, with its own harness, tools and rewards.

    A row holds `index`, the number of the task. Every agent of an episode gives the trajectories of its requests, with
    the reward of its trace; agents that the environment marks as not trainable give none. The metrics `reward/NAME` are
    the rewards by name, weighted. Tokens are drawn by the run's sampling parameters, with seeds by agent and turn,
    whatever a harness asks for. An error of the environment or the harness is a failure.

    Args:
        server: Generator of tokens, such as a rollout server.
        tokenizer: Tokenizer of the served model.
        environment: `verifiers:NAME`.
        environment_args: Keys of verifiers' environment configuration.
        parser: Tool-call parser; see `ToolLoop`.
        template_kwargs: Further variables of the chat template.

    Raises:
        PluginError: there is no such environment.
    """

    def __init__(
        self,
        server: Generator,
        tokenizer: Tokenizer,
        *,
        environment: str,
        environment_args: Mapping[str, Any] | None = None,
        parser: str | Callable[[str], ParsedTurn] = "hermes",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(server, tokenizer)
        self._source = VerifiersEnvironments(environment.partition(":")[2], environment_args)
        self._proxy = RecordingProxy(server, tokenizer, parser=parser, template_kwargs=template_kwargs)
        self._serving: asyncio.Task[None] | None = None
        self._is_served: asyncio.Future[None] | None = None

    async def run(self, sampling_params: dict[str, Any], row: Mapping[str, Any]) -> list[AgentLoopOutput]:
        """Run an episode of one task.

        Raises:
            RowError: the row has no index of a task.
            FailureError: the episode failed, or nothing was generated for an agent that learns.
        """
        from verifiers.v1 import EvalClientConfig, ModelContext, SamplingConfig

        index = row.get("index")
        if type(index) is not int or index < 0:
            raise RowError(f"field 'index' of the row is {index!r}; it needs the number of a task, from 0 on")
        task = self._source.task(index)
        await self._serve()
        # Requests name no session: verifiers sends the id of their agent's trace along.
        context = ModelContext(
            model="policy",
            client=EvalClientConfig(base_url=self._proxy.url, api_key_var="RL_AGENT_UNSET"),
            sampling=SamplingConfig(max_tokens=sampling_params.get("max_new_tokens")),
        )
        traces = dict[str, Any]()

        def begin(trace: Any) -> None:
            params = dict(sampling_params)
            if params.get("seed") is not None:  # with one seed, all agents would draw alike
                params["seed"] = (params["seed"] + _SEED_STEP * len(traces)) % 2**31
            traces[trace.id] = trace
            self._proxy.create_session(trace.id, sampling_params=params, has_key=False)

        try:
            episode = await contained(self._source.environment.run_episode(task, context, on_trace=begin))
        except Exception as error:
            raise _failure(described(error)) from error
        finally:
            recorded = {name: self._proxy.finish(name, reward=trace.reward) for name, trace in traces.items()}
        errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
        if errors or not episode.ok:
            message = "; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode did not end well"
            raise _failure(message)
        learning = [trace for trace in episode.traces if trace.agent.trainable]
        outputs = [_with_terms(output, trace) for trace in learning for output in recorded[trace.id]]
        if not outputs:
            raise _failure("no agent that learns has asked for anything")
        return outputs

    async def _serve(self) -> None:
        """Start the proxy and what the environment serves, once; the task that starts it ends it too."""
        if self._is_served is None:
            self._is_served = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._hold(self._is_served))
        await asyncio.shield(self._is_served)

    async def _hold(self, is_served: asyncio.Future[None]) -> None:
        try:
            await self._proxy.start()
            async with self._source.environment.serving():
                is_served.set_result(None)
                await asyncio.Event().wait()
        except BaseException as error:
            if not is_foreign(error):
                raise
            if not is_served.done():
                is_served.set_exception(_failure(described(error)))
        finally:
            await self._proxy.stop()

    async def close(self) -> None:
        """End what the environment serves, and the proxy."""
        if self._serving is not None:
            self._serving.cancel()
            with suppress(asyncio.CancelledError):
                await self._serving


def _with_terms(output: AgentLoopOutput, trace: Any) -> AgentLoopOutput:
    terms = {f"reward/{name}": float(reward.value) for name, reward in trace.rewards.items() if reward is not None}
    fields = {**output.extra_fields, "agent": trace.agent.name, "end": trace.stop_condition or "answer"}
    return replace(output, metrics={**output.metrics, **terms}, extra_fields=fields)


def _failure(message: str) -> FailureError:
    return FailureError(Failure(kind=FailureKind.ENVIRONMENT, stage="episode", message=message, is_retryable=True))
