"""`Requests`: requests in flight at a third-party server, and the gate in front of it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rl_rollout.backends.external.calls import InFlightRequest
from rl_rollout.errors import GenerationError, RequestError, RequestTimeoutError, RolloutError, ServerLostError
from rl_rollout.types import FinishReason, TokenChunk, TokenOutput
from rl_rollout.validation import (
    check_answer,
    check_finite,
    check_length,
    check_limits,
    check_request,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_rollout.backends.external.calls import EngineCalls
    from rl_rollout.backends.external.upstream import Upstream
    from rl_rollout.multimodal import ImagePreparer, PreparedImages
    from rl_rollout.types import GenerateRequest, ServerConfig

GRACE_S = 5.0
"""Seconds that a request may take to end when its deadline is over."""
ABORT_AGAIN_S = 0.2
"""Seconds between two aborts of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Limits of a served model that requests are checked against."""

    vocab_size: int
    max_model_len: int
    """Context length, tokens."""
    end_ids: tuple[int, ...]
    """Ids that end a turn in the model folder."""

    def stop_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        """Ids at which a request stops: its own, and those that end a turn in the model folder, unless it ignores them.

        Servers read some of them from the folder themselves; which ones differs from server to server.
        """
        params = request.sampling_params
        ends = () if params.ignore_eos else self.end_ids
        return tuple(dict.fromkeys((*params.stop_token_ids, *ends)))

    def max_new_tokens(self, request: GenerateRequest) -> int:
        """New tokens that a request may have, by its own limit and the context length."""
        return min(request.sampling_params.max_new_tokens, self.max_model_len - len(request.prompt_token_ids))


class Requests:
    """Requests in flight at a server, and the gate that holds new ones while it may not compute.

    Args:
        config: Limits of requests; its `timeout_s` is the deadline of requests without one, and of `abort` and `drain`.
        limits: Limits of the model.
        upstream: Names the server in errors.
        preparer: Prepares images; None: the server takes none.
        calls: Generate and abort at the server.
    """

    def __init__(
        self,
        config: ServerConfig,
        limits: ModelLimits,
        upstream: Upstream,
        preparer: ImagePreparer | None,
        calls: EngineCalls,
    ) -> None:
        self.timeout_s = config.timeout_s
        self._config, self._limits, self._upstream, self._preparer, self._calls = (
            config,
            limits,
            upstream,
            preparer,
            calls,
        )
        self._flights: dict[str, InFlightRequest] = {}
        self._left: set[asyncio.Task[None]] = set()
        """Tasks that abort requests whose callers have left."""
        self._may_send = asyncio.Event()
        self._may_send.set()

    @property
    def num_sent(self) -> int:
        """Number of requests that were sent to the server."""
        return sum(flight.is_sent for flight in self._flights.values())

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait here."""
        return len(self._flights) - self.num_sent

    @property
    def is_held(self) -> bool:
        """Whether new requests wait here."""
        return not self._may_send.is_set()

    def hold(self) -> None:
        """Hold new requests, so that none can overtake a pause on its way."""
        self._may_send.clear()

    def release(self) -> None:
        """Send the waiting requests."""
        self._may_send.set()

    def check(self, request: GenerateRequest) -> None:
        """Check a request against the limits of the server and the model, and that its id is not in flight."""
        self._check_prompt(request)
        check_limits(request, self._config)
        if request.request_id in self._flights:
            raise RequestError(f"request id {request.request_id!r} is in flight already")

    async def generate(
        self, request: GenerateRequest, on_progress: Callable[[TokenChunk], None] | None = None
    ) -> TokenOutput:
        """Generate once the gate is open, up to the deadline; a cancelled call aborts the request at the server too."""
        flight = self._flights[request.request_id] = InFlightRequest(request, on_progress)
        deadline = None
        if request.timeout_s is not None:
            deadline = asyncio.get_running_loop().time() + request.timeout_s
        try:
            try:
                async with asyncio.timeout_at(deadline):
                    request, images = await self._prepare(request)
                    if not await self._wait_for_gate(flight):
                        return TokenOutput.empty(request)
            except TimeoutError as error:
                raise self._late(request) from error
            if deadline is None:  # the server's counts from here: what waits in its queue is unknown here
                deadline = asyncio.get_running_loop().time() + self.timeout_s
            flight.is_sent = True
            try:
                output = await self._generate_until(deadline, request, images, flight)
            except RolloutError:
                raise
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise GenerationError(
                    f"request {request.request_id!r}: {self._upstream.where} sent an answer that cannot be read: "
                    f"{type(error).__name__}: {error}"
                ) from error
            check_answer(request, output, self._upstream.where, vocab_size=self._limits.vocab_size)
            check_finite(output)
            check_length(output, self._limits.max_new_tokens(request))
            return output
        except asyncio.CancelledError:
            self._leave(flight)
            raise
        except ServerLostError as error:
            if flight.chunks:
                error.partial = TokenOutput.joined(request.request_id, flight.chunks)
            raise
        finally:
            del self._flights[request.request_id]
            flight.ended.set()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Abort requests in flight (None: all); returns when they have ended. Other ids are ignored."""
        ids = list(self._flights) if request_ids is None else request_ids
        flights = [self._flights[i] for i in ids if i in self._flights]
        for flight in flights:
            flight.aborted.set()
        try:
            async with asyncio.timeout(self.timeout_s):
                # Repeated: an abort may overtake the request that it is meant for.
                while ids := [f.upstream_id for f in flights if f.is_sent and not f.ended.is_set()]:
                    await self._calls.post_abort(ids)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(ABORT_AGAIN_S):
                            await asyncio.gather(*(flight.ended.wait() for flight in flights))
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"{self._upstream.where} did not end {len(flights)} aborted requests within {self.timeout_s} s"
            ) from error

    async def drain(self) -> None:
        """Wait until the requests that were sent have ended."""
        flights = [flight for flight in self._flights.values() if flight.is_sent]
        try:
            async with asyncio.timeout(self.timeout_s):
                await asyncio.gather(*(flight.ended.wait() for flight in flights))
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"{self._upstream.where} did not finish the requests in flight within {self.timeout_s} s; "
                "new ones are held"
            ) from error

    def close(self) -> None:
        """Stop aborting requests whose callers have left: the server ends."""
        for task in self._left:
            task.cancel()

    async def _generate_until(
        self, deadline: float, request: GenerateRequest, images: PreparedImages | None, flight: InFlightRequest
    ) -> TokenOutput:
        """Generate; at the deadline the request is aborted, and its tokens are returned with the reason `timeout`."""
        work = asyncio.ensure_future(self._calls.post_generate(request, images, flight))
        try:
            done, _ = await asyncio.wait([work], timeout=deadline - asyncio.get_running_loop().time())
            if done:
                return work.result()
            await self._abort_left(flight.upstream_id)
            done, _ = await asyncio.wait([work], timeout=GRACE_S)
            if done and (output := work.result()).token_ids:
                is_cut = output.finish_reason is FinishReason.ABORT
                return replace(output, finish_reason=FinishReason.TIMEOUT) if is_cut else output
            self._leave(flight)
            raise self._late(request)
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait([work])

    def _late(self, request: GenerateRequest) -> RequestTimeoutError:
        timeout_s = request.timeout_s or self.timeout_s
        whose = "its own" if request.timeout_s else "the server's"
        return RequestTimeoutError(
            f"request {request.request_id!r} got no token within {timeout_s} s, {whose} timeout_s, on "
            f"{self._upstream.where}; raise it, or ask for less at a time"
        )

    def _leave(self, flight: InFlightRequest) -> None:
        """Abort a request at the server too: SGLang notices a closed connection only after seconds."""
        if flight.is_sent:
            task = asyncio.create_task(self._abort_left(flight.upstream_id))
            self._left.add(task)
            task.add_done_callback(self._left.discard)

    async def _abort_left(self, upstream_id: str) -> None:
        with contextlib.suppress(RolloutError):  # it is lost, or ends the request for want of a connection
            await self._calls.post_abort([upstream_id])

    def _check_prompt(self, request: GenerateRequest) -> None:
        check_request(request, vocab_size=self._limits.vocab_size, max_model_len=self._limits.max_model_len)

    async def _prepare(self, request: GenerateRequest) -> tuple[GenerateRequest, PreparedImages | None]:
        """Expand the image placeholders of a request, and prepare its images."""
        if self._preparer is None:
            return request, None
        self._preparer.check_blind(request)
        if not request.images:
            return request, None
        request, images = await asyncio.to_thread(self._preparer.prepare, request)
        self._check_prompt(request)  # it is longer now
        return request, images

    async def _wait_for_gate(self, flight: InFlightRequest) -> bool:
        """Wait while the gate is closed; returns False if the request was aborted before it was sent."""
        if not self._may_send.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (self._may_send, flight.aborted)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return not flight.aborted.is_set()
