"""`Receiver`, the receiving end of a session: verifies buckets, yields tensors, votes, and learns the outcome."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from rl_ckpt.base import WeightReceiver
from rl_ckpt.errors import (
    DigestError,
    ProtocolError,
    SyncAbortedError,
    TensorError,
    UsageError,
)
from rl_ckpt.protocol.messages import (
    NO_VERSION,
    AbortReason,
    Begin,
    Bucket,
    Commit,
    Committed,
    Mapped,
    Ready,
    Seal,
    Staged,
)
from rl_ckpt.protocol.worker import Worker
from rl_ckpt.receiver.connection import Connector, reason_of
from rl_ckpt.receiver.slots import HeldBuckets
from rl_ckpt.receiver.staging import Staging
from rl_ckpt.receiver.unpacker import Scratch, Unpacker, is_base, readable_codecs
from rl_ckpt.tensors.aliasing import AliasCheck
from rl_ckpt.tensors.digest import tree_digest
from rl_ckpt.types import Metadata, ReceiverState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping

    from torch import Tensor

    from rl_ckpt.base import Hold
    from rl_ckpt.receiver.connection import Connection
    from rl_ckpt.receiver.mapped import MappedSource
    from rl_ckpt.transports.base import ReceiveTransport
    from rl_ckpt.types import SessionConfig
    from rl_csrc.ipc import Waker


NUM_HELD = 4
"""Slots of which a consumer may hold all but one: the number that a sender uses at least."""


class RelayPipe(Protocol):
    """Relay that is notified of verified tensors, and passes them on."""

    @property
    def outcome(self) -> Waker:
        """Waker that fires when its own receivers have voted or failed."""
        ...

    def landed(self) -> None:
        """Note that more tensors may be verified; raises the error that ended the sync below."""
        ...

    def end(self) -> None:
        """Note that all tensors are verified."""
        ...

    def require_votes(self, digest: int) -> None:
        """Raise unless its receivers voted for this digest."""
        ...

    @property
    def attests(self) -> bool | None:
        """Whether the engine was seen to hold what landed, where the consumer compares; None: it is to be read."""
        ...


class Receiver(WeightReceiver):
    """Receiving end of a session over any transport."""

    def __init__(self, config: SessionConfig, transport: ReceiveTransport) -> None:
        self.address = config.address
        self._config = config
        self._worker = Worker(f"the receiver of {config.address}")
        self._connector = Connector(config, transport, self._worker.canceller)
        self._unpacker: Unpacker | None = None
        self._pipe: RelayPipe | None = None
        """Relay pipe that is notified of verified tensors; None unless this is a relay."""
        self._scratch = Scratch()
        self._staging = Staging()
        self._alias_check = AliasCheck()
        self._handed_at: float | None = None
        """Time at which the consumer got its last tensors."""
        self._state = ReceiverState.IDLE
        self._version: int | None = None
        self._digest: int | None = None
        self._held: Callable[[], Mapping[str, Tensor] | None] | None = None
        self._base: Mapping[str, Tensor] | None = None
        """Targets of the last committed sync, if deltas can be applied to them."""

    @property
    def digest(self) -> int | None:
        """Tree digest of the last committed sync."""
        return self._digest

    @property
    def version(self) -> int | None:
        """Version that is being received, or else of the last committed sync."""
        return self._version if self._unpacker is None else self._unpacker.version

    @property
    def state(self) -> ReceiverState:
        """State of this end."""
        return self._state

    async def prepare(self) -> Metadata:
        """Return the metadata; a receiver allocates nothing, as the ring is the sender's."""
        return Metadata(
            address=self.address, peer=f"receiver pid {os.getpid()}", bucket_bytes=self._config.bucket_bytes
        )

    async def connect(self, num_peers: int = 1) -> None:
        """Wait for the sender and join its session."""
        if num_peers != 1:
            raise UsageError(f"num_peers is {num_peers}; a receiver has one peer, its sender")
        await self._worker.run(self._connector.connect)

    def attest_with(self, held: Callable[[], Mapping[str, Tensor] | None] | None) -> None:
        """Set the function that reads the engine's weights before every vote. See `WeightReceiver`."""
        self._held = held

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
        if self._unpacker is None:
            raise UsageError(f"hold() is for tensors of a sync that is under way; there is none at {self.address}")
        self._scratch.forget()
        return self._unpacker.held_buckets.hold()

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
        if self._unpacker is not None:
            self._give_up(self._unpacker, AbortReason.FAILED, "it was closed")
        self._connector.close()

    async def begin(self, targets: Mapping[str, Tensor] | None, *, staged: bool = False) -> Unpacker:
        """Wait until a sync begins; to be followed by `take`."""
        try:
            return await self._worker.run(lambda: self._begin(targets, staged=staged))
        except asyncio.CancelledError:
            if self._unpacker is not None:  # the sync began at the moment of the cancellation
                self._give_up(self._unpacker, AbortReason.FAILED, "it was cancelled")
            raise

    async def take(self, unpacker: Unpacker, *, strict: bool, pipe: RelayPipe | None = None) -> None:
        """Receive a sync that has begun into its targets, up to the commit; notifies a relay pipe of progress."""
        self._pipe = pipe
        try:
            await self._worker.run(lambda: self._take_all(unpacker, strict))
        finally:
            self._pipe = None
            self._give_up(unpacker, AbortReason.FAILED, "its consumer stopped before the end")

    def _begin(self, targets: Mapping[str, Tensor] | None, *, staged: bool = False) -> Unpacker:
        """Request the next sync and wait until it begins."""
        if self._unpacker is not None:
            self._give_up(self._unpacker, AbortReason.FAILED, "its consumer began anew")
        held = NO_VERSION
        staging = self._staging if staged and targets is not None else None
        if targets is not None and targets is self._base and self._state is ReceiverState.COMMITTED and staging is None:
            held = NO_VERSION if self._version is None else self._version
        has = self._version if self._state is ReceiverState.COMMITTED else None
        ready = Ready(held, NO_VERSION if has is None else has, self._digest or 0, codecs=readable_codecs())
        connection, begin = self._connector.request_sync(ready)
        try:
            return self._land_on(connection, begin, targets, staging)
        except BaseException as error:  # targets without memory to stage
            self._connector.abort(reason_of(error), str(error) or repr(error))
            raise

    def _land_on(
        self, connection: Connection, begin: Begin, targets: Mapping[str, Tensor] | None, staging: Staging | None
    ) -> Unpacker:
        session = connection.session
        num_slots, bucket_bytes = (session.num_slots, session.bucket_bytes) if session is not None else (0, 0)
        self._unpacker = Unpacker(
            version=begin.version,
            previous=self._state,
            sender=connection.peer,
            bucket_bytes=bucket_bytes,
            held_buckets=HeldBuckets(min(NUM_HELD, num_slots), is_debug=self._config.debug),
            specs=connection.specs,
            scratch=self._scratch,
            has_base=begin.base != NO_VERSION,
            targets=targets if targets is None or staging is None else staging.open(targets),
            staging=staging,
        )
        self._state, self._handed_at = ReceiverState.PREPARING, None
        return self._unpacker

    def _next_step(self, unpacker: Unpacker) -> Callable[[], list[tuple[str, Tensor]] | None]:
        if unpacker.is_over:
            raise UsageError(f"this sync of {self.address} was given up; call receive_weights again for the next")
        return lambda: self._advance(unpacker, strict=False)

    def _take_all(self, unpacker: Unpacker, strict: bool) -> None:
        while self._advance(unpacker, strict) is not None:
            pass

    def _advance(self, unpacker: Unpacker, strict: bool) -> list[tuple[str, Tensor]] | None:
        """Free the bucket yielded last; return the tensors of the next one, or None after the commit."""
        connection = self._connection_of(unpacker)
        if self._handed_at is not None:
            unpacker.install_s += time.perf_counter() - self._handed_at
            self._handed_at = None
        try:
            connection.free(unpacker.held_buckets.recycle())
            while True:
                if unpacker.begun:
                    sequence = unpacker.begun[0].bucket.sequence
                    if tensors := self._finish_bucket(connection, unpacker):
                        self._handed_at = time.perf_counter()
                        return unpacker.held_buckets.hand_out(sequence, tensors)
                    connection.free([sequence])
                    if self._pipe is not None:
                        self._pipe.landed()
                    continue
                message = connection.receive("sent nothing more")
                if isinstance(message, Bucket) and connection.reader is not None:
                    is_stop = self._pipe is not None or connection.is_batch_end(message)
                    unpacker.begin(message, connection.reader, is_stop=is_stop)
                elif isinstance(message, Mapped) and connection.mapped_source is not None:
                    if tensors := self._copy_mapped(unpacker, connection.mapped_source, message):
                        return unpacker.held_buckets.hand_out(message.sequence, tensors)
                    connection.free([message.sequence])
                elif isinstance(message, Seal):
                    connection.free(unpacker.held_buckets.close())
                    self._finish(connection, unpacker, message, strict)
                    return None
                else:
                    raise ProtocolError(f"{connection.peer} sent {type(message).__name__} inside a sync")
                if self._pipe is not None and not unpacker.begun:
                    self._pipe.landed()
        except BaseException as error:
            self._give_up(unpacker, reason_of(error), str(error) or repr(error))
            if not isinstance(error, Exception):  # an interrupt may lose received messages, and break the next sync
                self._connector.close()
            raise

    def _finish_bucket(self, connection: Connection, unpacker: Unpacker) -> list[tuple[str, Tensor]]:
        """Finish the oldest bucket, after beginning those that are announced and can be unpacked meanwhile."""
        reader = connection.reader
        assert reader is not None, "a bucket was begun"
        is_ahead = reader.reads_ahead and unpacker.targets is not None

        def begin() -> None:
            while is_ahead and (ahead := connection.announced(unpacker.can_begin)) is not None:
                unpacker.begin(ahead, reader, is_stop=self._pipe is not None or connection.is_batch_end(ahead))

        begin()
        return unpacker.finish(reader, meanwhile=begin)

    def _copy_mapped(
        self, unpacker: Unpacker, mapped_source: MappedSource, message: Mapped
    ) -> list[tuple[str, Tensor]]:
        since = time.perf_counter()
        tensors = mapped_source.unpack(unpacker, message)
        self._handed_at = time.perf_counter()
        unpacker.verify_s += self._handed_at - since
        if not tensors:
            self._handed_at = None
        return tensors

    def _connection_of(self, unpacker: Unpacker) -> Connection:
        if self._connector.connection is None or unpacker.is_over:
            raise UsageError(f"this sync of {self.address} was given up; call receive_weights again for the next")
        return self._connector.connection

    def _finish(self, connection: Connection, unpacker: Unpacker, seal: Seal, strict: bool) -> None:
        """Check completeness, vote, and wait for the commit."""
        digest = unpacker.digest
        landed = (unpacker.num_buckets, len(unpacker.digests), unpacker.num_bytes, digest)
        if landed != (seal.num_buckets, seal.num_tensors, seal.num_bytes, seal.digest) or not unpacker.is_whole():
            raise DigestError(f"{connection.peer} sent {seal}; (buckets, tensors, bytes, digest) here {landed}")
        if strict and (missing := unpacker.missing()):
            raise TensorError(
                f"{len(missing)} tensors were to be received into and did not come, {missing[0]!r} the first; "
                "strict=False allows that"
            )
        if self._pipe is not None:
            self._pipe.end()
            connection.until_woken(self._pipe.outcome)
            self._pipe.require_votes(digest)
        vote = Staged(
            unpacker.version,
            digest,
            len(unpacker.digests),
            verify_ns=int((unpacker.verify_s + connection.busy_s) * 1e9),
            install_ns=int(unpacker.install_s * 1e9),
        )
        if unpacker.staging is not None:
            unpacker.staging.install(spec.name for spec in unpacker.digests)
        if unpacker.targets is not None:
            targets = unpacker.targets if unpacker.staging is None else unpacker.staging.targets
            self._alias_check.require_equal(targets, unpacker.digests.items())
        vote = self._attest(unpacker, vote)
        self._state = ReceiverState.STAGED
        connection.send(vote)
        try:
            verdict = connection.receive("gave no verdict")
        except SyncAbortedError:
            unpacker.is_called_off = not self._worker.canceller.is_cancelled
            raise
        if verdict != Commit(unpacker.version):
            raise ProtocolError(f"{connection.peer} sent {verdict} where a verdict on {unpacker.version} is due")
        unpacker.is_over, self._unpacker = True, None
        self._version, self._digest, self._state = unpacker.version, digest, ReceiverState.COMMITTED
        if unpacker.staging is not None:
            unpacker.staging.clear()
            self._base = None
        else:
            self._base = unpacker.targets if unpacker.targets is not None and is_base(unpacker.targets) else None
        connection.channel.try_send(Committed(unpacker.version), connection.sync)

    def _attest(self, unpacker: Unpacker, vote: Staged) -> Staged:
        """Add the attestation to a vote: the digest of what the engine holds."""
        if self._pipe is not None and (is_equal := self._pipe.attests) is not None:
            count = len(unpacker.digests)
            told = {"is_attested": 1, "held_digest": vote.digest, "num_bound": count, "num_expected": count}
            return replace(vote, **told) if is_equal else vote
        held = None if self._held is None else self._held()
        if held is None:
            return vote
        sent = {spec.name for spec in unpacker.digests}
        bound = [name for name in held if name in sent]
        digest = tree_digest((name, held[name]) for name in bound)  # one by one, as they may be copied from a device
        return replace(vote, is_attested=1, held_digest=digest, num_bound=len(bound), num_expected=len(held))

    def _give_up(self, unpacker: Unpacker, reason: AbortReason, text: str) -> None:
        """Abort a sync that is not over. Reports to the sender without waiting; never raises."""
        if unpacker.is_over:
            return
        unpacker.is_over = True
        if self._unpacker is unpacker:
            self._unpacker = None
            self._base = None
            is_mixed = (
                unpacker.is_touched if unpacker.staging is None else not self._restore(unpacker, unpacker.staging)
            )
            self._state = ReceiverState.POISONED if is_mixed else unpacker.previous
            self._connector.abort(reason, text)

    def _restore(self, unpacker: Unpacker, staging: Staging) -> bool:
        """Restore the old weights. False if they must not be served: the version may be committed, or undo failed."""
        is_in_doubt = self._state is ReceiverState.STAGED and not unpacker.is_called_off
        try:
            staging.undo()
        except Exception:  # noqa: BLE001  # the error that ended the sync is raised; the state shows this one
            return False
        return not is_in_doubt
