"""`EngineCalls`: what a backend knows of the third-party server that it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from rl_rollout.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_rollout.backends.external.inflight import Flight
    from rl_rollout.base import PauseMode
    from rl_rollout.multimodal import PreparedImages
    from rl_rollout.types import GenerateRequest, TokenOutput


class EngineCalls(ABC):
    """Calls of a third-party server, made one at a time but for `post_generate` and `post_abort`."""

    engine_name: str
    """Name of the engine in errors."""

    @abstractmethod
    async def post_generate(
        self, request: GenerateRequest, images: PreparedImages | None, flight: Flight
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
