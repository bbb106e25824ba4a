"""Requests in flight of the embedded server: handed to the engine's thread, and their events to who waits."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING

from rl_rollout.backends.embedded.engine_thread import EngineThread
from rl_rollout.types import TokenChunk

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from rl_rollout.backends.embedded.decode_engine import Engine, Event
    from rl_rollout.backends.embedded.grammar import Matcher
    from rl_rollout.backends.embedded.image_prompt import ImagePrompt
    from rl_rollout.types import FinishReason, GenerateRequest, TokenOutput


class RequestsInFlight:
    """Requests in flight, on one event loop; all requests of one turn of it are handed over in one call.

    Args:
        loop: Event loop of the callers.
        build: Builds the engine, in its thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, build: Callable[[], Engine]) -> None:
        self._loop = loop
        self.thread = EngineThread(build, self._post)
        """The engine's thread."""
        self.futures: dict[str, asyncio.Future[TokenOutput]] = {}
        """Where whole outputs go, by request id."""
        self.streams: dict[str, asyncio.Queue[Event]] = {}
        """Where the events of streams go."""
        self.listeners: dict[str, Callable[[TokenChunk], None]] = {}
        """Where the chunks of other requests go."""
        self._outbox: list[tuple[GenerateRequest, int]] = []
        self._abandoned: list[str] = []
        """Ids of requests whose callers have left; aborted after the outbox is handed over."""
        self._images: dict[str, ImagePrompt] = {}
        """Prepared images of the requests in the outbox."""
        self._matchers: dict[str, Matcher] = {}
        """Matchers of the requests in the outbox."""
        self._due: Counter[str] = Counter()
        """Number of final events due by request id: above 1 where a caller gave up and the id was used again."""

    def __contains__(self, request_id: str) -> bool:
        """Whether a request has a waiter."""
        return request_id in self.futures or request_id in self.streams

    def submit(
        self, request: GenerateRequest, seen: ImagePrompt | None, matcher: Matcher | None, *, report_every: int
    ) -> None:
        """Queue a request for the engine."""
        if not self._outbox:
            self._loop.call_soon(self.flush)
        self._outbox.append((request, report_every))
        self._due[request.request_id] += 1
        if seen is not None:
            self._images[request.request_id] = seen
        if matcher is not None:
            self._matchers[request.request_id] = matcher

    def flush(self) -> None:
        """Hand over the queued requests."""
        if self._abandoned:
            ids, self._abandoned = self._abandoned, []
            self.thread.call(lambda engine: engine.abort(ids))
        if self._outbox:
            batch, self._outbox = self._outbox, []
            images, self._images = self._images, {}
            matchers, self._matchers = self._matchers, {}
            submitted = self.thread.call(lambda engine: engine.submit(batch, images, matchers))
            submitted.add_done_callback(lambda done: self._refuse(batch, done.exception()))

    def _refuse(self, batch: list[tuple[GenerateRequest, int]], error: BaseException | None) -> None:
        """Fail requests that never reached the engine, for example because it had been stopped."""
        if isinstance(error, Exception):
            self._post([(request.request_id, error) for request, _ in batch])

    def abandon(self, request: GenerateRequest) -> None:
        """Abort a request whose caller has left; one command per turn of the event loop."""
        if self._outbox:
            self.flush()
        if not self._abandoned:
            self._loop.call_soon(self.flush)
        self._abandoned.append(request.request_id)

    def end(self, request: GenerateRequest, reason: FinishReason) -> None:
        """End a request with the tokens that it has."""
        self.flush()
        self.thread.call(lambda engine: engine.abort([request.request_id], reason=reason))

    def _post(self, events: list[tuple[str, Event]]) -> None:
        """Post events to the event loop in one call; runs in the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(self._hand_out, events)

    def _hand_out(self, events: list[tuple[str, Event]]) -> None:
        for request_id, event in events:
            is_of_another = self._due[request_id] > 1
            if not isinstance(event, TokenChunk):
                self._due[request_id] -= 1
                if not self._due[request_id]:
                    del self._due[request_id]
            if is_of_another:
                continue
            stream, future = self.streams.get(request_id), self.futures.get(request_id)
            if stream is not None:
                stream.put_nowait(event)
            elif isinstance(event, TokenChunk):
                if request_id in self.listeners:
                    self.listeners[request_id](event)
            elif future is not None and not future.done():
                if isinstance(event, Exception):
                    future.set_exception(event)
                else:
                    future.set_result(event)
            # Otherwise its caller gave up (deadline, cancelled), and nobody waits.
