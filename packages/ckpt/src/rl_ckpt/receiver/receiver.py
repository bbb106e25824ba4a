"""The receiving end: finds the sender, checks every bucket, hands out its tensors, votes, and hears the verdict."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from rl_ckpt.base import CheckpointEngine
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
    Free,
    Mapped,
    Ready,
    Seal,
    Staged,
)
from rl_ckpt.protocol.worker import Worker
from rl_ckpt.receiver.connection import Caller, reason_of
from rl_ckpt.receiver.slots import Shelf
from rl_ckpt.receiver.staging import Stage
from rl_ckpt.receiver.unpacker import Landing, Scratch, is_base, readable_codecs
from rl_ckpt.tensors.aliasing import Sharing
from rl_ckpt.tensors.digest import tree_digest
from rl_ckpt.types import Metadata, ReceiverState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from rl_ckpt.base import Hold
    from rl_ckpt.protocol.channel import Bell
    from rl_ckpt.receiver.connection import Line
    from rl_ckpt.receiver.mapped import Mirror
    from rl_ckpt.transports.base import ReceiveTransport
    from rl_ckpt.types import SessionConfig, SyncReport


class Passage(Protocol):
    """Who is told of all that has landed: a relay, which passes it on."""

    @property
    def outcome(self) -> Bell:
        """Rung when its own receivers have voted, or not."""
        ...

    def landed(self) -> None:
        """More may have landed; raises what ended the sync below."""
        ...

    def end(self) -> None:
        """All has landed."""
        ...

    def require_votes(self, digest: int) -> None:
        """Raise if its receivers have not voted for this digest."""
        ...


class Receiver(CheckpointEngine):
    """The receiving end of a session over any transport with shared slots."""

    def __init__(self, config: SessionConfig, transport: ReceiveTransport) -> None:
        self.address = config.address
        self._config = config
        self._worker = Worker(f"the receiver of {config.address}")
        self._caller = Caller(config, transport, self._worker.waker)
        self._landing: Landing | None = None
        self._passage: Passage | None = None
        """Who is told of everything that has landed, where this is a relay."""
        self._scratch = Scratch()
        self._stage = Stage()
        self._sharing = Sharing()
        self._handed_at: float | None = None
        """Since when the consumer has its tensors."""
        self._state = ReceiverState.IDLE
        self._version: int | None = None
        self._digest: int | None = None
        self._held: Callable[[], Mapping[str, Tensor] | None] | None = None
        self._base: Mapping[str, Tensor] | None = None
        """What the last committed sync was received into, if it was, and differences can be applied to it."""

    @property
    def digest(self) -> int | None:
        """Tree digest of the last committed sync."""
        return self._digest

    @property
    def version(self) -> int | None:
        """Version that is landing, or else of the last committed sync."""
        return self._version if self._landing is None else self._landing.version

    @property
    def state(self) -> ReceiverState:
        """Where this end stands."""
        return self._state

    async def prepare(self) -> Metadata:
        """Nothing to allocate: the ring is the sender's."""
        return Metadata(
            address=self.address, peer=f"receiver pid {os.getpid()}", bucket_bytes=self._config.bucket_bytes
        )

    async def connect(self, num_peers: int = 1) -> None:
        """Wait until the sender exists, and join its session."""
        if num_peers != 1:
            raise UsageError(f"num_peers is {num_peers}; a receiver has one peer, its sender")
        await self._worker.run(self._caller.connect)

    async def send_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]] | None = None,
        *,
        version: int,
        num_peers: int | None = None,
    ) -> SyncReport:
        """Raise `UsageError`: not for this end."""
        raise UsageError(f"this is a receiving end of {self.address}; open one with role='send' to send")

    def send(
        self, weights: Iterable[tuple[str, Tensor]] | None = None, *, version: int, num_peers: int | None = None
    ) -> SyncReport:
        """Raise `UsageError`: not for this end."""
        raise UsageError(f"this is a receiving end of {self.address}; open one with role='send' to send")

    def attest_with(self, held: Callable[[], Mapping[str, Tensor] | None] | None) -> None:
        """Look into the engine before every vote. See `CheckpointEngine`."""
        self._held = held

    async def receive_weights(self, *, clone: bool = False) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield tensors as they land. See `CheckpointEngine`."""
        async with aclosing(self._batches(clone)) as batches:
            async for batch in batches:
                for item in batch:
                    yield item

    async def receive_batches(self, *, clone: bool = False) -> AsyncIterator[list[tuple[str, Tensor]]]:
        """Yield the tensors of a bucket at a time. See `CheckpointEngine`."""
        async with aclosing(self._batches(clone)) as batches:
            async for batch in batches:
                yield batch

    async def _batches(self, clone: bool) -> AsyncGenerator[list[tuple[str, Tensor]]]:
        landing = await self.begin(None)
        try:
            while (tensors := await self._worker.run(self._next_step(landing))) is not None:
                yield [(name, tensor.clone()) for name, tensor in tensors] if clone else tensors
        finally:
            self._give_up(landing, AbortReason.FAILED, "its consumer stopped before the end")

    def hold(self) -> Hold:
        """Keep the tensors that were handed out last. See `CheckpointEngine`."""
        if self._landing is None:
            raise UsageError(f"hold() is for tensors of a sync that is under way; there is none at {self.address}")
        self._scratch.forget()
        return self._landing.shelf.hold()

    async def receive_into(self, targets: Mapping[str, Tensor], *, strict: bool = True, staged: bool = False) -> int:
        """Land tensors where they belong. See `CheckpointEngine`."""
        landing = await self.begin(targets, staged=staged)
        await self.take(landing, strict=strict)
        return landing.version

    def recv(self, *, clone: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Synchronous twin of `receive_weights`: does everything in the calling thread."""
        landing = self._worker.call(lambda: self._begin(None))
        try:
            while (tensors := self._worker.call(self._next_step(landing))) is not None:
                for name, tensor in tensors:
                    yield name, tensor.clone() if clone else tensor
        finally:
            self._give_up(landing, AbortReason.FAILED, "its consumer stopped before the end")

    def recv_into(self, targets: Mapping[str, Tensor], *, strict: bool = True, staged: bool = False) -> int:
        """Synchronous twin of `receive_into`: does everything in the calling thread."""
        landing = self._worker.call(lambda: self._begin(targets, staged=staged))
        try:
            self._worker.call(lambda: self._take_all(landing, strict))
        finally:
            self._give_up(landing, AbortReason.FAILED, "its consumer stopped before the end")
        return landing.version

    async def close(self) -> None:
        """Leave the session. Idempotent."""
        await asyncio.to_thread(self._worker.close, self._release, self._config.timeout_s)

    def _release(self) -> None:
        if self._landing is not None:
            self._give_up(self._landing, AbortReason.FAILED, "it was closed")
        self._caller.hang_up()

    async def begin(self, targets: Mapping[str, Tensor] | None, *, staged: bool = False) -> Landing:
        """Wait until a sync begins; whoever calls it goes on with `take`, or leaves it to `receive_into`."""
        try:
            return await self._worker.run(lambda: self._begin(targets, staged=staged))
        except asyncio.CancelledError:
            if self._landing is not None:  # it began in the very moment of the cancellation
                self._give_up(self._landing, AbortReason.FAILED, "it was cancelled")
            raise

    async def take(self, landing: Landing, *, strict: bool, passage: Passage | None = None) -> None:
        """Land all of a sync that has begun in its targets, to the commit; tell a passage of what has landed."""
        self._passage = passage
        try:
            await self._worker.run(lambda: self._take_all(landing, strict))
        finally:
            self._passage = None
            self._give_up(landing, AbortReason.FAILED, "its consumer stopped before the end")

    def _begin(self, targets: Mapping[str, Tensor] | None, *, staged: bool = False) -> Landing:
        """Ask for the next sync and wait until it starts."""
        if self._landing is not None:
            self._give_up(self._landing, AbortReason.FAILED, "its consumer began anew")
        held = NO_VERSION
        stage = self._stage if staged and targets is not None else None
        if targets is not None and targets is self._base and self._state is ReceiverState.COMMITTED and stage is None:
            held = NO_VERSION if self._version is None else self._version
        has = self._version if self._state is ReceiverState.COMMITTED else None
        ready = Ready(held, NO_VERSION if has is None else has, self._digest or 0, codecs=readable_codecs())
        line, begin = self._caller.ask(ready)
        try:
            return self._land_on(line, begin, targets, stage)
        except BaseException as error:  # targets that nothing can be landed in front of
            self._caller.leave(reason_of(error), str(error) or repr(error))
            raise

    def _land_on(self, line: Line, begin: Begin, targets: Mapping[str, Tensor] | None, stage: Stage | None) -> Landing:
        self._landing = Landing(
            version=begin.version,
            previous=self._state,
            sender=line.peer,
            bucket_bytes=line.session.bucket_bytes if line.session is not None else 0,
            shelf=Shelf(line.session.num_slots if line.session is not None else 0, is_debug=self._config.debug),
            specs=line.specs,
            scratch=self._scratch,
            has_base=begin.base != NO_VERSION,
            targets=targets if targets is None or stage is None else stage.open(targets),
            stage=stage,
        )
        self._state, self._handed_at = ReceiverState.PREPARING, None
        return self._landing

    def _next_step(self, landing: Landing) -> Callable[[], list[tuple[str, Tensor]] | None]:
        if landing.is_over:
            raise UsageError(f"this sync of {self.address} was given up; call receive_weights again for the next")
        return lambda: self._advance(landing, strict=False)

    def _take_all(self, landing: Landing, strict: bool) -> None:
        while self._advance(landing, strict) is not None:
            pass

    def _advance(self, landing: Landing, strict: bool) -> list[tuple[str, Tensor]] | None:
        """Free the bucket handed out last; the tensors of the next one, or None after the commit."""
        line = self._line_of(landing)
        if self._handed_at is not None:
            landing.install_s += time.perf_counter() - self._handed_at
            self._handed_at = None
        try:
            for sequence in landing.shelf.recycle():
                line.say(Free(sequence))
            while True:
                message = line.hear("sent nothing more")
                if isinstance(message, Bucket) and line.inlet is not None:
                    if tensors := landing.land(message, line.inlet):
                        self._handed_at = time.perf_counter()
                        return landing.shelf.hand_out(message.sequence, tensors)
                    line.say(Free(message.sequence))
                elif isinstance(message, Mapped) and line.mirror is not None:
                    if tensors := self._mirror(landing, line.mirror, message):
                        return landing.shelf.hand_out(message.sequence, tensors)
                    line.say(Free(message.sequence))
                elif isinstance(message, Seal):
                    for sequence in landing.shelf.close():
                        line.say(Free(sequence))
                    self._finish(line, landing, message, strict)
                    return None
                else:
                    raise ProtocolError(f"{line.peer} sent {type(message).__name__} inside a sync")
                if self._passage is not None:
                    self._passage.landed()
        except BaseException as error:
            self._give_up(landing, reason_of(error), str(error) or repr(error))
            if not isinstance(error, Exception):  # an interrupt: what was heard may be lost, and the next sync with it
                self._caller.hang_up()
            raise

    def _mirror(self, landing: Landing, mirror: Mirror, message: Mapped) -> list[tuple[str, Tensor]]:
        since = time.perf_counter()
        tensors = mirror.land(landing, message)
        self._handed_at = time.perf_counter()
        landing.verify_s += self._handed_at - since
        if not tensors:
            self._handed_at = None
        return tensors

    def _line_of(self, landing: Landing) -> Line:
        if self._caller.line is None or landing.is_over:
            raise UsageError(f"this sync of {self.address} was given up; call receive_weights again for the next")
        return self._caller.line

    def _finish(self, line: Line, landing: Landing, seal: Seal, strict: bool) -> None:
        """Vote, and wait for the verdict."""
        digest = landing.digest
        landed = (landing.num_buckets, len(landing.digests), landing.num_bytes, digest)
        if landed != (seal.num_buckets, seal.num_tensors, seal.num_bytes, seal.digest) or not landing.is_whole():
            raise DigestError(f"{line.peer} sent {seal}; (buckets, tensors, bytes, digest) here {landed}")
        if strict and (missing := landing.missing()):
            raise TensorError(
                f"{len(missing)} tensors were to be received into and did not come, {missing[0]!r} the first; "
                "strict=False allows that"
            )
        if self._passage is not None:
            self._passage.end()
            line.until_rung(self._passage.outcome)
            self._passage.require_votes(digest)
        vote = Staged(
            landing.version,
            digest,
            len(landing.digests),
            verify_ns=int(landing.verify_s * 1e9),
            install_ns=int(landing.install_s * 1e9),
        )
        if landing.stage is not None:
            landing.stage.install(spec.name for spec in landing.digests)
        if landing.targets is not None:
            targets = landing.targets if landing.stage is None else landing.stage.targets
            self._sharing.require_equal(targets, landing.digests.items())
        vote = self._attest(landing, vote)
        self._state = ReceiverState.STAGED
        line.say(vote)
        try:
            verdict = line.hear("gave no verdict")
        except SyncAbortedError:
            landing.is_called_off = not self._worker.waker.is_woken
            raise
        if verdict != Commit(landing.version):
            raise ProtocolError(f"{line.peer} sent {verdict} where a verdict on {landing.version} is due")
        landing.is_over, self._landing = True, None
        self._version, self._digest, self._state = landing.version, digest, ReceiverState.COMMITTED
        if landing.stage is not None:
            landing.stage.close()
            self._base = None
        else:
            self._base = landing.targets if landing.targets is not None and is_base(landing.targets) else None
        line.link.try_send(Committed(landing.version), line.sync)

    def _attest(self, landing: Landing, vote: Staged) -> Staged:
        """The vote, with what the engine holds."""
        held = None if self._held is None else self._held()
        if held is None:
            return vote
        sent = {spec.name for spec in landing.digests}
        bound = [name for name in held if name in sent]
        digest = tree_digest((name, held[name]) for name in bound)  # one by one: they may be read back from a device
        return replace(vote, is_attested=1, held_digest=digest, num_bound=len(bound), num_expected=len(held))

    def _give_up(self, landing: Landing, reason: AbortReason, text: str) -> None:
        """Leave a sync that is not over. Tells the sender without waiting; never raises."""
        if landing.is_over:
            return
        landing.is_over = True
        if self._landing is landing:
            self._landing = None
            self._base = None
            is_mixed = landing.is_touched if landing.stage is None else not self._restore(landing, landing.stage)
            self._state = ReceiverState.POISONED if is_mixed else landing.previous
            self._caller.leave(reason, text)

    def _restore(self, landing: Landing, stage: Stage) -> bool:
        """Put back what was before. False if it may not be served: the version may be in force, or that failed."""
        is_in_doubt = self._state is ReceiverState.STAGED and not landing.is_called_off
        try:
            stage.undo()
        except Exception:  # noqa: BLE001  # the error that ended the sync is the one to raise; the state tells of this one
            return False
        return not is_in_doubt
