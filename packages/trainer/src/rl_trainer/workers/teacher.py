"""Teachers of distillation: one behind a server, and several engines, each for the rows of some data sources."""

from __future__ import annotations

import asyncio
import math
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

import rl_rollout.registry
import rl_tq.registry
from rl_rollout.types import GenerateRequest, SamplingParams, ServerConfig
from rl_trainer.errors import ConfigError, TrainerError
from rl_trainer.runtime.base import Dispatch, WorkerContext, register
from rl_trainer.workers.columns import TEACHER_PROMPT
from rl_trainer.workers.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_rollout.base import RolloutServer
    from rl_tq.types import BatchMeta
    from rl_trainer.config.schema import TeacherSection
    from rl_trainer.workers.engine_worker import EngineWorker

_AT_A_TIME = 256
"""Requests in flight."""


class ServedTeacherWorker:
    """Served teacher: asks a server for the log-probs of every completion token and writes them to the queue.

    With `teacher.model` any OpenAI-compatible server that tells `prompt_logprobs`; without, one of rl-rollout's.

    Raises:
        ConfigError: the server does not tell the log-probs of a prompt.
    """

    def __init__(
        self, context: WorkerContext, *, teacher: TeacherSection, queue_address: str, timeout_s: float
    ) -> None:
        del context
        assert teacher.url is not None, "the caller has checked it"
        self._url, self._timeout_s = teacher.url, timeout_s
        self._prompt = "prompt_token_ids" if teacher.context is None else TEACHER_PROMPT
        self._queue = rl_tq.registry.connect(queue_address, timeout_s=timeout_s)
        self._loop = LoopThread("teacher")
        self._server = self._loop.run(self._connect(teacher), timeout_s)
        if not self._server.capabilities.gives_prompt_logprobs:
            raise ConfigError(
                f"teacher.url={self._url} does not return the log-probs of a prompt's tokens; choose another"
            )

    async def _connect(self, teacher: TeacherSection) -> RolloutServer:
        if teacher.model is None:
            server = rl_rollout.registry.connect_server(self._url, timeout_s=self._timeout_s)
            await server.check_health()
            return server
        options = {"url": self._url, "tokenizer": teacher.path}
        config = ServerConfig(
            model_path=teacher.model, max_model_len=1 << 30, options=options, timeout_s=self._timeout_s
        )
        server = rl_rollout.registry.create_server("openai", config)
        await server.start()
        return server

    @register(Dispatch.RANK_ZERO)
    def compute_teacher_log_prob(self, batch: BatchMeta) -> BatchMeta:
        """Write `teacher_logprobs`, float32 of every completion token."""
        names = (self._prompt, "completion_token_ids", "loss_mask")
        data = self._queue.get(batch, names)
        rows = [
            tuple(part.tolist() for part in row) for row in zip(*(data[name].unbind() for name in names), strict=True)
        ]
        scored = self._loop.run(self._score_all(rows), self._timeout_s)
        values = torch.tensor([value for row in scored for value in row], dtype=torch.float32)
        column = torch.nested.nested_tensor_from_jagged(values, data["completion_token_ids"].offsets())
        from tensordict import TensorDict

        columns = TensorDict({"teacher_logprobs": column}, batch_size=[len(batch)])
        return self._queue.put(columns, partition=batch.partition, sample_ids=batch.sample_ids)

    @register(Dispatch.RANK_ZERO)
    def offload(self) -> None:
        """Do nothing: the model is in the server."""

    async def _score_all(self, rows: Sequence[tuple[list[int], ...]]) -> list[tuple[float, ...]]:
        turns = asyncio.Semaphore(_AT_A_TIME)

        async def score(number: int) -> tuple[float, ...]:
            prompt, completion, mask = rows[number]
            request = GenerateRequest(
                request_id=f"teach-{number}",
                prompt_token_ids=(*prompt, *completion),
                sampling_params=SamplingParams(max_new_tokens=1),
                sampled_spans=_runs(mask, len(prompt)),
                returns_prompt_logprobs=True,
                timeout_s=self._timeout_s,
            )
            async with turns:
                output = await self._server.generate(request)
            found = output.prompt_logprobs[len(prompt) - 1 :]
            if len(found) != len(completion) or not all(map(math.isfinite, found)):
                raise TrainerError(
                    f"teacher.url={self._url} returned {len(found)} log-probs of a completion of {len(completion)} "
                    f"tokens, {sum(map(math.isfinite, found))} of them finite; every token needs one"
                )
            return found

        return await asyncio.gather(*map(score, range(len(rows))))

    def close(self) -> None:
        """Close the connections; the server goes on."""
        self._loop.run(self._server.stop(), 30.0)
        self._loop.close()
        self._queue.close()


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
