"""`SourceSender`: base class of sending ends that runs syncs of a source in a thread or for an event loop."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import TYPE_CHECKING, cast

from rl_ckpt.base import WeightSender
from rl_ckpt.errors import SyncAbortedError
from rl_ckpt.protocol.call_worker import AsyncSource, Worker
from rl_ckpt.tensors.source import Clock, RegisteredSource, Source, items_of
from rl_ckpt.types import ReceiverState

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable, Iterable, Mapping

    from torch import Tensor

    from rl_ckpt.types import SessionConfig, SyncReport


class SourceSender(WeightSender):
    """Base class of sending ends; a subclass implements one sync (`_run`) and the release of its resources."""

    def __init__(self, config: SessionConfig) -> None:
        self.address = config.address
        self._config = config
        self._worker = Worker(f"the sender of {config.address}")
        self._registered: RegisteredSource | None = None
        self._version: int | None = None
        self._digest: int | None = None

    @property
    def version(self) -> int | None:
        """Version of the last committed sync."""
        return self._version

    @property
    def digest(self) -> int | None:
        """Tree digest of the last committed sync."""
        return self._digest

    @property
    def state(self) -> ReceiverState:
        """`IDLE` before the first commit, `COMMITTED` after."""
        return ReceiverState.IDLE if self._version is None else ReceiverState.COMMITTED

    async def send_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]] | None = None,
        *,
        version: int,
        num_peers: int | None = None,
    ) -> SyncReport:
        """Send, verify and commit. See `WeightSender`."""
        self._require(num_peers)
        if not hasattr(weights, "__aiter__"):
            source = cast("Iterable[tuple[str, Tensor]] | None", weights)
            return await self._worker.run(lambda: self._sync(source, version))
        bridge = AsyncSource(cast("AsyncIterable[tuple[str, Tensor]]", weights), asyncio.get_running_loop())
        return await self._worker.run(lambda: self._sync(bridge, version), on_cancel=bridge.cancel)

    def send(
        self, weights: Iterable[tuple[str, Tensor]] | None = None, *, version: int, num_peers: int | None = None
    ) -> SyncReport:
        """Synchronous twin of `send_weights`: does everything in the calling thread."""
        self._require(num_peers)
        return self._worker.call(lambda: self._sync(weights, version))

    def register_source(self, named_tensors: Mapping[str, Tensor] | Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """Register a source once for all syncs. See `WeightSender`."""
        self._registered = RegisteredSource(named_tensors)

    async def close(self) -> None:
        """Close the session and free its buffers. Idempotent."""
        await asyncio.to_thread(self._worker.close, self._release, self._config.timeout_s)

    @abstractmethod
    def _require(self, num_peers: int | None) -> None:
        """Check and store the number of receivers that a sync needs."""

    @abstractmethod
    def _run(self, source: Source, version: int, clock: Clock) -> SyncReport:
        """Run one sync of a source. An error means that nothing was committed."""

    @abstractmethod
    def _release(self) -> None:
        """Free all resources."""

    def _sync(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> SyncReport:
        """Run one sync in this thread; if it fails, the source is drained to its end."""
        clock = Clock()
        source = Source(() if weights is None else weights, clock)
        try:
            if weights is None:
                source = Source(items_of(self._registered), clock, self._registered)
            return self._run(source, version, clock)
        except Exception as error:
            if not self._worker.canceller.is_cancelled:
                source.drain(error)
            raise SyncAbortedError(
                f"the sync of version {version} over {self.address} was called off: {error}"
            ) from error
        finally:
            source.close()
