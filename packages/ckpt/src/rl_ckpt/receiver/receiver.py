"""`Receiver`, the receiving end of a session: verifies buckets, yields tensors, votes, and learns the outcome."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from typing import TYPE_CHECKING

from rl_ckpt.base import WeightReceiver
from rl_ckpt.errors import UsageError
from rl_ckpt.protocol.call_worker import Worker
from rl_ckpt.protocol.messages import NO_VERSION, AbortReason, Begin
from rl_ckpt.receiver.connection import Connector, reason_of
from rl_ckpt.receiver.reception import HeldVersion, Reception
from rl_ckpt.receiver.slots import HeldBuckets
from rl_ckpt.receiver.staging import Staging
from rl_ckpt.receiver.unpacker import Scratch, Unpacker
from rl_ckpt.types import Metadata, ReceiverState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping

    from torch import Tensor

    from rl_ckpt.base import Hold
    from rl_ckpt.receiver.connection import Connection
    from rl_ckpt.receiver.reception import RelayPipe
    from rl_ckpt.transports.base import ReceiveTransport
    from rl_ckpt.types import SessionConfig


NUM_HELD = 4
"""Slots of which a consumer may hold all but one: the number that a sender uses at least."""


class Receiver(WeightReceiver):
    """Receiving end of a session over any transport."""

    def __init__(self, config: SessionConfig, transport: ReceiveTransport) -> None:
        self.address = config.address
        self._config = config
        self._worker = Worker(f"the receiver of {config.address}")
        self.connector = Connector(config, transport, self._worker.canceller)
        self._reception: Reception | None = None
        """Sync that is under way."""
        self._scratch = Scratch()
        self._staging = Staging()
        self._held = HeldVersion()

    @property
    def digest(self) -> int | None:
        """Tree digest of the last committed sync."""
        return self._held.digest

    @property
    def version(self) -> int | None:
        """Version that is being received, or else of the last committed sync."""
        return self._held.version if self._reception is None else self._reception.unpacker.version

    @property
    def state(self) -> ReceiverState:
        """State of this end."""
        return self._held.state

    async def prepare(self) -> Metadata:
        """Return the metadata; a receiver allocates nothing, as the ring is the sender's."""
        return Metadata(
            address=self.address, peer=f"receiver pid {os.getpid()}", bucket_bytes=self._config.bucket_bytes
        )

    async def connect(self, num_peers: int = 1) -> None:
        """Wait for the sender and join its session."""
        if num_peers != 1:
            raise UsageError(f"num_peers is {num_peers}; a receiver has one peer, its sender")
        await self._worker.run(self.connector.connect)

    def attest_with(self, held: Callable[[], Mapping[str, Tensor] | None] | None) -> None:
        """Set the function that reads the engine's weights before every vote. See `WeightReceiver`."""
        self._held.read_engine = held

    async def receive_weights(self, *, clone: bool = False) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield tensors as they arrive. See `WeightReceiver`."""
        async with aclosing(self._batches(clone)) as batches:
            async for batch in batches:
                for item in batch:
                    yield item

    async def receive_batches(self, *, clone: bool = False) -> AsyncIterator[list[tuple[str, Tensor]]]:
        """Yield tensors bucket by bucket. See `WeightReceiver`."""
        async with aclosing(self._batches(clone)) as batches:
            async for batch in batches:
                yield batch

    async def _batches(self, clone: bool) -> AsyncGenerator[list[tuple[str, Tensor]]]:
        unpacker = await self.begin(None)
        try:
            while (tensors := await self._worker.run(self._next_step(unpacker))) is not None:
                yield [(name, tensor.clone()) for name, tensor in tensors] if clone else tensors
        finally:
            self._give_up(unpacker, AbortReason.FAILED, "its consumer stopped before the end")

    def hold(self) -> Hold:
        """Keep the tensors that were yielded last. See `WeightReceiver`."""
        if self._reception is None:
            raise UsageError(f"hold() is for tensors of a sync that is under way; there is none at {self.address}")
        self._scratch.forget()
        return self._reception.unpacker.held_buckets.hold()

    async def receive_into(self, targets: Mapping[str, Tensor], *, strict: bool = True, staged: bool = False) -> int:
        """Receive one version into tensors of the caller. See `WeightReceiver`."""
        unpacker = await self.begin(targets, staged=staged)
        await self.take(unpacker, strict=strict)
        return unpacker.version

    def recv(self, *, clone: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Synchronous twin of `receive_weights`: does everything in the calling thread."""
        unpacker = self._worker.call(lambda: self._begin(None))
        try:
            while (tensors := self._worker.call(self._next_step(unpacker))) is not None:
                for name, tensor in tensors:
                    yield name, tensor.clone() if clone else tensor
        finally:
            self._give_up(unpacker, AbortReason.FAILED, "its consumer stopped before the end")

    def recv_into(self, targets: Mapping[str, Tensor], *, strict: bool = True, staged: bool = False) -> int:
        """Synchronous twin of `receive_into`: does everything in the calling thread."""
        unpacker = self._worker.call(lambda: self._begin(targets, staged=staged))
        try:
            self._worker.call(lambda: self._take_all(unpacker, strict))
        finally:
            self._give_up(unpacker, AbortReason.FAILED, "its consumer stopped before the end")
        return unpacker.version

    async def close(self) -> None:
        """Leave the session. Idempotent."""
        await asyncio.to_thread(self._worker.close, self._release, self._config.timeout_s)

    def _release(self) -> None:
        if self._reception is not None:
            self._give_up(self._reception.unpacker, AbortReason.FAILED, "it was closed")
        self.connector.close()

    async def begin(self, targets: Mapping[str, Tensor] | None, *, staged: bool = False) -> Unpacker:
        """Wait until a sync begins; to be followed by `take`."""
        try:
            return await self._worker.run(lambda: self._begin(targets, staged=staged))
        except asyncio.CancelledError:
            if self._reception is not None:  # the sync began at the moment of the cancellation
                self._give_up(self._reception.unpacker, AbortReason.FAILED, "it was cancelled")
            raise

    async def take(self, unpacker: Unpacker, *, strict: bool, pipe: RelayPipe | None = None) -> None:
        """Receive a sync that has begun into its targets, up to the commit; notifies a relay pipe of progress."""
        if self._reception is not None:
            self._reception.pipe = pipe
        try:
            await self._worker.run(lambda: self._take_all(unpacker, strict))
        finally:
            self._give_up(unpacker, AbortReason.FAILED, "its consumer stopped before the end")

    def _begin(self, targets: Mapping[str, Tensor] | None, *, staged: bool = False) -> Unpacker:
        """Request the next sync and wait until it begins."""
        if self._reception is not None:
            self._give_up(self._reception.unpacker, AbortReason.FAILED, "its consumer began anew")
        staging = self._staging if staged and targets is not None else None
        connection, begin = self.connector.request_sync(self._held.request(targets, is_staged=staging is not None))
        try:
            return self._open(connection, begin, targets, staging)
        except BaseException as error:  # targets without memory to stage
            self.connector.abort(reason_of(error), str(error) or repr(error))
            raise

    def _open(
        self, connection: Connection, begin: Begin, targets: Mapping[str, Tensor] | None, staging: Staging | None
    ) -> Unpacker:
        session = connection.session
        num_slots, bucket_bytes = (session.num_slots, session.bucket_bytes) if session is not None else (0, 0)
        unpacker = Unpacker(
            version=begin.version,
            previous=self._held.state,
            sender=connection.peer,
            bucket_bytes=bucket_bytes,
            held_buckets=HeldBuckets(min(NUM_HELD, num_slots), is_debug=self._config.debug),
            specs=connection.specs,
            scratch=self._scratch,
            has_base=begin.base != NO_VERSION,
            targets=targets if targets is None or staging is None else staging.open(targets),
            staging=staging,
        )
        self._reception = Reception(connection, unpacker, self._held, self._worker.canceller)
        self._held.state = ReceiverState.PREPARING
        return unpacker

    def _next_step(self, unpacker: Unpacker) -> Callable[[], list[tuple[str, Tensor]] | None]:
        if unpacker.is_over:
            raise UsageError(f"this sync of {self.address} was given up; call receive_weights again for the next")
        return lambda: self._advance(unpacker, strict=False)

    def _take_all(self, unpacker: Unpacker, strict: bool) -> None:
        while self._advance(unpacker, strict) is not None:
            pass

    def _advance(self, unpacker: Unpacker, strict: bool) -> list[tuple[str, Tensor]] | None:
        """Tensors of the next bucket, or None after the commit; an error ends the sync."""
        reception = self._reception
        if reception is None or reception.unpacker is not unpacker or self.connector.connection is None:
            raise UsageError(f"this sync of {self.address} was given up; call receive_weights again for the next")
        try:
            tensors = reception.advance(strict=strict)
        except BaseException as error:
            self._give_up(unpacker, reason_of(error), str(error) or repr(error))
            if not isinstance(error, Exception):  # an interrupt may lose received messages, and break the next sync
                self.connector.close()
            raise
        if tensors is None:
            self._reception = None
        return tensors

    def _give_up(self, unpacker: Unpacker, reason: AbortReason, text: str) -> None:
        """Abort a sync that is not over. Reports to the sender without waiting; never raises."""
        if unpacker.is_over:
            return
        unpacker.is_over = True
        if self._reception is not None and self._reception.unpacker is unpacker:
            self._reception = None
            self._held.give_up(unpacker)
            self.connector.abort(reason, text)
