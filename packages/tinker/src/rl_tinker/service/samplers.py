"""Sampling: servers of rl-rollout that hold the base model and the adapters in use, and the samples in progress."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rl_rollout.errors import RequestError as ServerRequestError
from rl_rollout.errors import RolloutError
from rl_rollout.types import FinishReason, GenerateRequest, SamplingParams, TokenOutput
from rl_tinker.errors import GoneError, RequestError
from rl_tinker.wire.results import encode_sample

if TYPE_CHECKING:
    from rl_tinker.service.api import Sample
    from rl_tinker.service.replicas import Replicas
    from rl_tinker.service.stop_strings import Stops
    from rl_tinker.service.store import Store
    from rl_tinker.service.tenants import Tenant
    from rl_tinker.types import Sampler

RESULT_S = 600.0
"""Seconds that a sample stays available after it ended."""
ATTEMPTS = 4
"""Times that a sample is started when sampling servers end."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _InProgress:
    """Sample of a tenant, in progress or ended."""

    tenant: str
    num_sequences: int
    task: asyncio.Task[bytes]
    ended: float = math.inf
    """Time at which it ended."""


class Samplers:
    """Samples in progress, as futures by request id.

    They are in memory alone: after a restart of this server a client is answered with 410, and sends its request again.
    """

    def __init__(self, store: Store, replicas: Replicas, stops: Stops, *, max_len: int) -> None:
        self._store, self._replicas, self._stops, self._max_len = store, replicas, stops, max_len
        self._samples: dict[str, _InProgress] = {}
        """By request id; the one that ended last at the end."""
        self.tokens_sampled = 0
        """Tokens since the start."""

    def new_id(self) -> str:
        """Request id of a sample outside a sampling session."""
        return f"sample:{uuid.uuid4().hex}"

    def pending_of(self, tenant: Tenant) -> int:
        """Number of a tenant's sequences in progress."""
        own = (each for each in self._samples.values() if each.tenant == tenant.name)
        return sum(each.num_sequences for each in own if not each.task.done())

    @property
    def num_pending(self) -> int:
        """Number of samples in progress."""
        return sum(not each.task.done() for each in self._samples.values())

    def task(self, tenant: Tenant, request_id: str) -> asyncio.Task[bytes] | None:
        """Task of a sample of a tenant, whose result is the encoded response."""
        found = self._samples.get(request_id)
        return found.task if found is not None and found.tenant == tenant.name else None

    def begin(self, tenant: Tenant, sampler: Sampler, request: Sample, request_id: str) -> None:
        """Start to sample."""
        task = asyncio.create_task(self._sample(sampler, request, request_id), name=request_id)
        task.add_done_callback(lambda _: self._end(request_id))
        self._samples[request_id] = _InProgress(tenant.name, request.num_samples, task)
        ended = [name for name, each in self._samples.items() if each.tenant == tenant.name and each.task.done()]
        for name in ended[: max(len(ended) - tenant.max_pending, 0)]:
            del self._samples[name]

    def _end(self, request_id: str) -> None:
        if (found := self._samples.pop(request_id, None)) is not None:
            self._samples[request_id] = replace(found, ended=time.monotonic())

    def expire(self) -> None:
        """Drop old results."""
        before = time.monotonic() - RESULT_S
        self._samples = {name: each for name, each in self._samples.items() if each.ended > before}

    async def stop(self) -> None:
        """Cancel what is in progress. Idempotent."""
        tasks = [each.task for each in self._samples.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(self, sampler: Sampler, request: Sample, request_id: str) -> bytes:
        for attempt in range(ATTEMPTS):
            try:
                return await self._sample_once(sampler, request, f"{request_id}:{attempt}")
            except ServerRequestError as error:
                raise RequestError(str(error)) from error
            except RolloutError as error:
                _log.warning("sample %s, attempt %d: %s", request_id, attempt + 1, error)
                if attempt + 1 == ATTEMPTS:
                    raise
                await self._replicas.recover()
        raise AssertionError("the last attempt returned or raised")

    async def _sample_once(self, sampler: Sampler, request: Sample, request_id: str) -> bytes:
        prompt = request.prompt.tokens
        async with self._replicas.adapter(self._checkpoint(sampler)) as adapter:
            base = GenerateRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling_params=self._params(request, len(prompt)),
                session_id=sampler.id or None,
                num_top_logprobs=request.topk_sample_logprobs,
                adapter=adapter,
            )
            samples = [self._one(self._numbered(base, index), request) for index in range(request.num_samples)]
            prefixes = self._prefixes(base, request)
            scored = replace(
                base,
                request_id=f"{request_id}:prompt",
                sampling_params=SamplingParams(max_new_tokens=1),
                num_top_logprobs=0,
                returns_prompt_logprobs=True,
            )
            extra = [self._replicas.generate(scored)] if request.prompt_logprobs and len(prompt) > 1 else []
            outputs = await _all([*samples, *extra, *map(self._replicas.generate, prefixes)])
        count, extras = len(samples), outputs[len(samples) :]
        return encode_sample(
            outputs[:count],
            prompt_logprobs=self._prompt_logprobs(request, len(prompt), extras[: len(extra)]),
            topk_prompt=self._topk_prompt(request, len(prompt), extras[len(extra) :]),
            k_prompt=request.topk_prompt_logprobs,
            k_sampled=request.topk_sample_logprobs,
        )

    def _checkpoint(self, sampler: Sampler) -> Any:
        if not sampler.checkpoint:
            return None
        found = self._store.checkpoints.get(sampler.checkpoint)
        if found is None:
            raise RequestError(
                f"the checkpoint {sampler.checkpoint!r} of this sampling session was deleted, or expired"
            )
        return found

    def _params(self, request: Sample, num_prompt: int) -> SamplingParams:
        given = request.sampling_params
        most = self._max_len - num_prompt
        if most < 1:
            raise RequestError(f"the prompt has {num_prompt} tokens; prompt and completion may have {self._max_len}")
        if given.max_tokens is not None and given.max_tokens > most:
            raise RequestError(
                f"max_tokens={given.max_tokens} after a prompt of {num_prompt} tokens; prompt and completion may have "
                f"{self._max_len}"
            )
        return SamplingParams(
            max_new_tokens=most if given.max_tokens is None else given.max_tokens,
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=max(given.top_k, 0),
            stop_token_ids=self._stops.split(given.stop)[0],
            ignore_eos=isinstance(given.stop, list) and not given.stop,
            seed=given.seed,
        )

    def _numbered(self, base: GenerateRequest, index: int) -> GenerateRequest:
        params = base.sampling_params
        if params.seed is not None:
            params = replace(params, seed=params.seed + index)
        return replace(base, request_id=f"{base.request_id}:{index}", sampling_params=params)

    async def _one(self, request: GenerateRequest, sample: Sample) -> TokenOutput:
        strings = self._stops.split(sample.sampling_params.stop)[1]
        if not strings:
            output = await self._replicas.generate(request)
        elif request.has_extras:
            output = self._stops.cut(await self._replicas.generate(request), strings)
        else:
            output = await self._until(request, strings)
        if output.finish_reason in (FinishReason.ABORT, FinishReason.TIMEOUT):
            raise GoneError(f"the sample was not finished: {output.finish_reason}")
        self.tokens_sampled += len(output.token_ids)
        return output

    async def _until(self, request: GenerateRequest, strings: tuple[str, ...]) -> TokenOutput:
        """Sample until one of the strings has appeared."""
        output = TokenOutput.empty(request)
        async for chunk in self._replicas.stream(request):
            output = output.extended(chunk)
            cut = self._stops.cut(output, strings)
            if cut.finish_reason == FinishReason.STOP:
                return cut
        return output

    # Numbers about the prompt

    def _prompt_logprobs(self, request: Sample, size: int, outputs: list[TokenOutput]) -> list[float] | None:
        if not request.prompt_logprobs:
            return None
        found = [math.nan, *(outputs[0].prompt_logprobs if outputs else ())]
        hidden = size - (request.prompt_logprobs_last_n or size)
        return [math.nan if index < hidden else value for index, value in enumerate(found)]

    def _prefixes(self, base: GenerateRequest, request: Sample) -> list[GenerateRequest]:
        """Requests for the most likely tokens after each prefix of the prompt: servers give those of completions."""
        if not request.topk_prompt_logprobs:
            return []
        first = len(base.prompt_token_ids) - (request.prompt_logprobs_last_n or len(base.prompt_token_ids))
        return [
            replace(
                base,
                request_id=f"{base.request_id}:prefix-{end}",
                prompt_token_ids=base.prompt_token_ids[:end],
                sampling_params=SamplingParams(max_new_tokens=1),
                num_top_logprobs=request.topk_prompt_logprobs,
            )
            for end in range(max(first, 1), len(base.prompt_token_ids))
        ]

    def _topk_prompt(
        self, request: Sample, size: int, outputs: list[TokenOutput]
    ) -> list[tuple[tuple[int, float], ...]] | None:
        if not request.topk_prompt_logprobs:
            return None
        rows = [each.top_logprobs[0] for each in outputs]
        return [()] * (size - len(rows)) + rows


async def _all(work: list[Any]) -> list[TokenOutput]:
    """Results of coroutines that run together; if one fails or the caller leaves, the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
