"""Teachers of distillation: one behind a server, and several engines, each for the rows of some data sources."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING
from uuid import uuid4

import rl_rollout.registry
from rl_agent.types import Failure, FailureKind, GroupResult
from rl_rollout.errors import GenerationError, OverloadedError, RequestError, RequestTimeoutError
from rl_rollout.types import GenerateRequest, SamplingParams, ServerConfig
from rl_trainer.errors import ConfigError, TrainerError
from rl_trainer.workers.columns import TEACHER_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_agent.types import AgentLoopOutput
    from rl_rollout.base import RolloutServer
    from rl_tq.types import BatchMeta
    from rl_trainer.config.schema import TeacherSection
    from rl_trainer.workers.engine_worker import EngineWorker

_AT_A_TIME = 256
"""Requests in flight, of all agent workers together."""
_OF_THE_ROW = (TrainerError, GenerationError, OverloadedError, RequestError, RequestTimeoutError)
"""Errors of one request; a server that is lost ends the run."""


class ServedTeacher:
    """Served teacher: an agent worker asks it for the log-probs of a group's completions, before the group is put.

    With `teacher.model` any OpenAI-compatible server that has `prompt_logprobs`; without, one of rl-rollout's.
    """

    def __init__(self, teacher: TeacherSection, *, num_sharing: int, timeout_s: float) -> None:
        self._teacher, self._timeout_s = teacher, timeout_s
        self._turns = asyncio.Semaphore(max(_AT_A_TIME // num_sharing, 1))

    async def start(self) -> None:
        """Connect to the server.

        Raises:
            ConfigError: it does not return the log-probs of a prompt.
        """
        self._server = await self._connect(str(self._teacher.url))
        if not self._server.capabilities.gives_prompt_logprobs:
            raise ConfigError(
                f"teacher.url={self._teacher.url} does not return the log-probs of a prompt's tokens; choose another"
            )

    async def _connect(self, url: str) -> RolloutServer:
        teacher = self._teacher
        if teacher.model is None:
            server = rl_rollout.registry.connect_server(url, timeout_s=self._timeout_s)
            await server.check_health()
            return server
        config = ServerConfig(
            model_path=teacher.model,
            max_model_len=1 << 30,
            options={"url": url, "tokenizer": teacher.path},
            timeout_s=self._timeout_s,
        )
        server = rl_rollout.registry.create_server("openai", config)
        await server.start()
        return server

    async def complete(self, group: GroupResult, prompt: Sequence[int] | None) -> GroupResult:
        """Add `TEACHER_LOGPROBS` to a group's trajectories, or fail the group; `prompt` is the teacher's own."""
        outputs = [output for rollout in group.rollouts for output in rollout]
        try:
            found = iter(await asyncio.gather(*(self._logprobs(each, prompt) for each in outputs)))
        except _OF_THE_ROW as error:
            failure = Failure(kind=FailureKind.GRADER, stage="teacher", message=str(error), is_retryable=False)
            return replace(group, rollouts=(), failures=(*group.failures, failure))
        taught = (
            tuple(replace(o, extra_fields={**o.extra_fields, TEACHER_LOGPROBS: next(found)}) for o in rollout)
            for rollout in group.rollouts
        )
        return replace(group, rollouts=tuple(taught))

    async def _logprobs(self, output: AgentLoopOutput, prompt: Sequence[int] | None) -> tuple[float, ...]:
        """Log-prob of every completion token."""
        prompt = output.prompt_token_ids if prompt is None else prompt
        completion = output.completion_token_ids
        request = GenerateRequest(
            request_id=f"teach-{uuid4().hex}",
            prompt_token_ids=(*prompt, *completion),
            sampling_params=SamplingParams(max_new_tokens=1),
            sampled_spans=_runs(output.loss_mask, len(prompt)),
            returns_prompt_logprobs=True,
            timeout_s=self._timeout_s,
        )
        async with self._turns:
            answer = await self._server.generate(request)
        found = answer.prompt_logprobs[len(prompt) - 1 :]
        if len(found) != len(completion) or not all(map(math.isfinite, found)):
            raise TrainerError(
                f"teacher.url={self._teacher.url} returned {len(found)} log-probs of a completion of {len(completion)} "
                f"tokens, {sum(map(math.isfinite, found))} of them finite; every token needs one"
            )
        return tuple(found)

    async def close(self) -> None:
        """Close the connections; the server goes on."""
        await self._server.stop()


class Teachers:
    """Has every row scored by the teacher of its `data_source`.

    The teacher of "" has the rows of all other sources. A call has a row for each of an engine's `num_ranks`.
    """

    def __init__(self, by_source: Mapping[str, EngineWorker], num_ranks: int) -> None:
        self._by_source, self._num_ranks = by_source, num_ranks

    def compute_teacher_log_prob(self, batch: BatchMeta) -> BatchMeta:
        """Write what the loss reads of the teachers."""
        rows: dict[str, list[int]] = {}
        for row, tags in enumerate(batch.tags):
            source = tags["data_source"]
            rows.setdefault(source if source in self._by_source else "", []).append(row)
        columns: tuple[str, ...] = ()
        for source, own in rows.items():
            num_idle = self._num_ranks - len(own)  # they call alike, on a row that another one writes
            asked, writes = [*own, *own[:1] * num_idle], [True] * len(own) + [False] * num_idle
            columns = self._by_source[source].compute_teacher_log_prob(batch.reorder(asked), writes).columns
        return type(batch)(partition=batch.partition, sample_ids=batch.sample_ids, columns=columns)

    def offload(self) -> None:
        """Move everything to the CPU's memory."""
        for teacher in self._by_source.values():
            teacher.offload()


def _runs(mask: Sequence[int], start: int) -> tuple[tuple[int, int], ...]:
    """[start, end) of the runs of ones in a mask whose first entry is that of token `start`."""
    edges = [at for at, (before, after) in enumerate(pairwise((0, *mask, 0)), start=start) if before != after]
    return tuple(zip(edges[::2], edges[1::2], strict=True))
