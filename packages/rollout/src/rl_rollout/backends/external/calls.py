"""Calls to a third-party server, and a request in flight there."""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from rl_rollout.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_rollout.base import PauseMode
    from rl_rollout.multimodal import PreparedImages
    from rl_rollout.types import GenerateRequest, TokenChunk, TokenOutput


class InFlightRequest:
    """Request in flight.

    Args:
        request: The request.
        on_progress: Called with every chunk but the last, of a server that streams.
    """

    def __init__(self, request: GenerateRequest, on_progress: Callable[[TokenChunk], None] | None = None) -> None:
        self.request = request
        self._on_progress = on_progress
        self.chunks: list[TokenChunk] = []
        """Tokens so far, where the server streams: what is kept of the request if the server is lost."""
        self.upstream_id = uuid.uuid4().hex
        """Id at the server, a fresh one. The request's own may be used again before the server has noticed that this
        connection is closed; and SGLang aborts all requests whose ids begin with the one named."""
        self.is_sent = False
        self.aborted = asyncio.Event()
        self.ended = asyncio.Event()

    def add(self, chunk: TokenChunk) -> None:
        """Keep new tokens, and report them; the last ones are reported with the output."""
        self.chunks.append(chunk)
        if self._on_progress is not None and chunk.finish_reason is None:
            self._on_progress(chunk)


class EngineCalls(ABC):
    """Calls of a third-party server, made one at a time but for `post_generate` and `post_abort`."""

    engine_name: str
    """Name of the engine in errors."""

    @abstractmethod
    async def post_generate(
        self, request: GenerateRequest, images: PreparedImages | None, flight: InFlightRequest
    ) -> TokenOutput:
        """Generate at the server under `flight.upstream_id`. Image placeholders of the prompt are expanded.

        A server that streams adds its chunks to the flight as they come.
        """

    @abstractmethod
    async def post_abort(self, upstream_ids: Sequence[str]) -> None:
        """Abort requests at the server; unknown ids are no error."""

    @abstractmethod
    async def post_pause(self, mode: PauseMode) -> None:
        """Pause the server; mode `wait` is sent when nothing is in flight any more."""

    @abstractmethod
    async def post_resume(self) -> None:
        """Resume the server."""

    async def post_slices(self, address: str) -> None:  # noqa: B027  most servers have nothing to do here
        """Wait until weights have landed next to the model, while decoding goes on; `post_update` installs them.

        Nothing where the server does not land them before it installs them.
        """

    @abstractmethod
    async def post_update(self, address: str, version: int) -> None:
        """Install weights, while nothing is computed.

        Raises:
            RolloutError: the old version serves, unless it is a `TornUpdateError`.
        """

    async def post_layout(self, url: str) -> None:
        """Have every rank answer a request of `rl_ckpt.adapters.layout`, while nothing is computed."""
        raise UnsupportedError(f"{self.engine_name} takes whole tensors")

    async def after_start(self) -> None:  # noqa: B027  a hook
        """Hook: calls to the server before its first request."""

    async def post_sleep(self, level: int) -> None:
        """Free memory of the server, while nothing is computed."""
        raise UnsupportedError(f"{self.engine_name} as it was started cannot sleep at level {level}")

    async def post_wake(self, tags: Sequence[str]) -> None:
        """Take the memory again."""
        raise UnsupportedError(f"{self.engine_name} as it was started cannot sleep, nor wake {list(tags)}")
