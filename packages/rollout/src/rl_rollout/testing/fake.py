"""Fake rollout server and fake weight receiver, in memory."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from rl_rollout.base import RolloutServer
from rl_rollout.errors import RequestError, ServerLostError, WeightUpdateError
from rl_rollout.types import Capabilities, FinishReason, GenerateRequest, ServerAddress, TokenOutput
from rl_rollout.validation import check_extras, check_request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from torch import Tensor

    from rl_rollout.base import PauseMode, WeightReceiver


class FakeReceiver:
    """Fake weight receiver: yields the given tensors, and fails on demand.

    Args:
        weights: Names and tensors.
        version: Weight version that it reports.
        fail_after: Raise after so many tensors; None never.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], version: int | None = None, *, fail_after: int | None = None
    ) -> None:
        self.address = "fake:weights"
        self.version = version
        self._weights = dict(weights)
        self._fail_after = fail_after

    async def receive_weights(self) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield every tensor as a view that is overwritten with NaN when the next one is asked for."""
        for index, (name, tensor) in enumerate(self._weights.items()):
            if index == self._fail_after:
                raise ConnectionError(f"the sender was lost after {index} tensors")
            view = tensor.clone()
            yield name, view
            view.fill_(float("nan"))
            await asyncio.sleep(0)


class FakeServer(RolloutServer):
    """Fake rollout server: answers by a script instead of a model, at once, without an HTTP endpoint.

    Args:
        script: Called with a request, returns the tokens to answer with; cut to `max_new_tokens` and at the first
        stop token. Default: the
            prompt again.
        eos_token_ids: Stop tokens besides the request's.
        vocab_size: Ids from here on are refused.
        max_model_len: Longest prompt plus completion.
    """

    def __init__(
        self,
        script: Callable[[GenerateRequest], Sequence[int]] = lambda request: request.prompt_token_ids,
        *,
        eos_token_ids: Sequence[int] = (),
        vocab_size: int = 2**31,
        max_model_len: int = 4096,
    ) -> None:
        self.requests: list[GenerateRequest] = []
        """Requests that were answered or are held, in order."""
        self.weight_version = 0
        self.weights: dict[str, Tensor] = {}
        """Weights of the last update, by name."""
        self._script = script
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._held: dict[str, asyncio.Event] = {}
        self._is_started = self._is_stopped = False

    @property
    def capabilities(self) -> Capabilities:
        """See `RolloutServer.capabilities`: tokens without extra outputs."""
        return Capabilities(gives_top_logprobs=False, gives_prompt_logprobs=False)

    async def start(self) -> ServerAddress:
        """See `RolloutServer.start`; there is nothing to load."""
        self._is_started = True
        return ServerAddress(url="inproc:fake", model="fake", pid=os.getpid())

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """See `RolloutServer.generate`: tokens of the script, with log-probs -0.5."""
        if not self._is_started or self._is_stopped:
            raise ServerLostError("the fake server is not running; call start()")
        check_request(request, vocab_size=self._vocab_size, max_model_len=self._max_model_len)
        check_extras(request, self.capabilities)
        if request.request_id in self._held:
            raise RequestError(f"request id {request.request_id!r} is in flight already")
        self.requests.append(request)
        if not await self._wait_for_turn(request.request_id):
            return self._output(request, (), FinishReason.ABORT)
        return self._output(request, *self._cut(request, tuple(self._script(request))))

    async def _wait_for_turn(self, request_id: str) -> bool:
        """Wait while paused; returns False if the request was aborted meanwhile."""
        aborted = self._held[request_id] = asyncio.Event()
        waits = [asyncio.ensure_future(event.wait()) for event in (self._may_run, aborted)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return not aborted.is_set()
        finally:
            for wait in waits:
                wait.cancel()
            del self._held[request_id]

    def _cut(self, request: GenerateRequest, ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason]:
        params = request.sampling_params
        limit = min(params.max_new_tokens, self._max_model_len - len(request.prompt_token_ids))
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._eos_token_ids))
        end = next((i + 1 for i, token in enumerate(ids[:limit]) if token in stops), None)
        if end is not None:
            return ids[:end], FinishReason.STOP
        return ids[:limit], FinishReason.LENGTH if len(ids) >= limit else FinishReason.STOP

    def _output(self, request: GenerateRequest, ids: tuple[int, ...], reason: FinishReason) -> TokenOutput:
        return TokenOutput(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=(-0.5,) * len(ids),
            weight_versions=(self.weight_version,) * len(ids),
            finish_reason=reason,
        )

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `RolloutServer.abort`: ends requests that a pause holds."""
        for request_id in list(self._held) if request_ids is None else request_ids:
            if request_id in self._held:
                self._held[request_id].set()

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutServer.pause`: holds new requests; none is ever half done."""
        del mode
        self._may_run.clear()

    async def resume(self) -> None:
        """Answer waiting requests again."""
        self._may_run.set()

    async def update_weights(self, receive: WeightReceiver, version: int) -> None:
        """See `RolloutServer.update_weights`: keeps the tensors."""
        try:
            weights = {name: tensor.clone() async for name, tensor in receive.receive_weights()}
        except Exception as error:
            message = f"version {version} was not installed: {error}; version {self.weight_version} still serves"
            raise WeightUpdateError(message) from error
        self.weights, self.weight_version = weights, version

    async def sleep(self, level: int = 1) -> None:
        """See `RolloutServer.sleep`: holds requests."""
        del level
        self._may_run.clear()

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Answer waiting requests again."""
        if "kv_cache" in tags:
            self._may_run.set()

    async def stop(self) -> None:
        """See `RolloutServer.stop`."""
        self._is_stopped = True
        await self.abort()
