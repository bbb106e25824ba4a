"""The receiving end: finds the sender, checks every bucket, hands out its tensors, votes, and hears the verdict."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

import rl_csrc
from rl_ckpt._link import Deadline, Link, wait_for
from rl_ckpt._plan import ALIGNMENT_BYTES
from rl_ckpt._sync import tree_digest
from rl_ckpt._tensors import TensorSpec, from_bytes
from rl_ckpt._wire import (
    WIRE_VERSION,
    Abort,
    AbortReason,
    Begin,
    Bucket,
    Commit,
    Committed,
    Free,
    Hello,
    HelloRole,
    Manifest,
    Message,
    Ready,
    Seal,
    Session,
    Staged,
)
from rl_ckpt._worker import Worker
from rl_ckpt.base import CheckpointEngine
from rl_ckpt.errors import (
    DigestError,
    PeerLostError,
    PeerTimeoutError,
    ProtocolError,
    SyncAbortedError,
    UsageError,
)
from rl_ckpt.types import Metadata, ReceiverState

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator

    from torch import Tensor

    from rl_ckpt._plan import Span
    from rl_ckpt._transport import ReceiveTransport
    from rl_ckpt.types import SessionConfig, SyncReport

DIAL_AGAIN_S = 0.02
_REASONS: dict[type[BaseException], AbortReason] = {
    DigestError: AbortReason.DIGEST,
    ProtocolError: AbortReason.PROTOCOL,
    PeerTimeoutError: AbortReason.TIMEOUT,
}


@dataclass(slots=True, eq=False)
class Line:
    """The connection to a sender and what it has said about the session."""

    link: Link
    inbox: deque[tuple[int, Message]] = field(default_factory=deque[tuple[int, Message]])
    """`(sync, message)` that arrived and was not looked at."""
    slots: list[Tensor] = field(default_factory=list[torch.Tensor])
    """The sender's ring; empty until it was shared."""
    specs: list[TensorSpec] = field(default_factory=list[TensorSpec])
    """The manifest so far."""
    sync: int = 0
    """Number of the sync that was asked for last."""


@dataclass(slots=True, eq=False)
class Landing:
    """What has landed of one sync."""

    line: Line
    """Where it comes from."""
    version: int
    """What it will be."""
    previous: ReceiverState
    """State to go back to as long as nothing is handed out."""
    digests: list[int] = field(default_factory=list[int])
    """Of the buckets, computed from what landed."""
    num_tensors: int = 0
    """Tensors handed out."""
    num_bytes: int = 0
    """Payload so far, bytes."""
    partial: int = -1
    """Index of a tensor that goes on in the next bucket; -1 for none."""
    partial_bytes: int = 0
    """Bytes of it that are here."""
    is_over: bool = False
    """Whether it was committed or given up."""


class Receiver(CheckpointEngine):
    """The receiving end of a session over any transport with shared slots."""

    def __init__(self, config: SessionConfig, transport: ReceiveTransport) -> None:
        self.address = config.address
        self._config = config
        self._transport = transport
        self._worker = Worker(f"the receiver of {config.address}")
        self._line: Line | None = None
        self._landing: Landing | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._state = ReceiverState.IDLE
        self._version: int | None = None

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
        await self._worker.run(lambda: self._dial(Deadline(self._config.timeout_s)))

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]], *, version: int
    ) -> SyncReport:
        """Raise `UsageError`: not for this end."""
        raise UsageError(f"this is a receiving end of {self.address}; open one with role='send' to send")

    def send(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> SyncReport:
        """Raise `UsageError`: not for this end."""
        raise UsageError(f"this is a receiving end of {self.address}; open one with role='send' to send")

    async def receive_weights(self) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield tensors as they land. See `CheckpointEngine`."""
        try:
            landing = await self._worker.run(self._begin)
        except asyncio.CancelledError:
            if self._landing is not None:  # it began in the very moment of the cancellation
                self._give_up(self._landing, AbortReason.FAILED, "it was cancelled")
            raise
        try:
            while (tensors := await self._worker.run(self._next_step(landing))) is not None:
                for item in tensors:
                    yield item
        finally:
            self._give_up(landing, AbortReason.FAILED, "its consumer stopped before the end")

    def recv(self) -> Iterator[tuple[str, Tensor]]:
        """Synchronous twin of `receive_weights`: does everything in the calling thread."""
        landing = self._worker.call(self._begin)
        try:
            while (tensors := self._worker.call(self._next_step(landing))) is not None:
                yield from tensors
        finally:
            self._give_up(landing, AbortReason.FAILED, "its consumer stopped before the end")

    async def close(self) -> None:
        """Leave the session. Idempotent."""
        await asyncio.to_thread(self._worker.close, self._release, self._config.timeout_s)

    def _release(self) -> None:
        if self._landing is not None:
            self._give_up(self._landing, AbortReason.FAILED, "it was closed")
        self._hang_up()

    def _begin(self) -> Landing:
        """Ask for the next sync and wait until it starts."""
        if self._landing is not None:
            self._give_up(self._landing, AbortReason.FAILED, "its consumer began anew")
        deadline = Deadline(self._config.timeout_s)
        while True:
            try:
                line = self._dial(deadline)
                begin = self._ask(line, deadline)
            except PeerLostError as error:
                self._hang_up()  # it died before this sync began: wait for its successor
                if not self._pause(deadline):
                    raise PeerTimeoutError(f"{error}, and none began a sync within {deadline.timeout_s:g} s") from error
            except BaseException as error:
                self._leave(_REASONS.get(type(error), AbortReason.FAILED), str(error) or repr(error))
                self._hang_up()
                raise
            else:
                self._landing = Landing(line, begin.version, self._state)
                self._state = ReceiverState.PREPARING
                return self._landing

    def _dial(self, deadline: Deadline) -> Line:
        """The connection, a new one if there is none."""
        while self._line is None:
            link = self._transport.dial()
            if link is not None:
                self._line = Line(link)
                self._post(self._line, Hello(WIRE_VERSION, HelloRole.RECEIVER, os.getpid()), deadline)
            elif not self._pause(deadline):
                raise PeerTimeoutError(f"no sender came to {self.address} within {deadline.timeout_s:g} s")
        return self._line

    def _pause(self, deadline: Deadline) -> bool:
        """Wait a moment before dialling again. False when the deadline has passed."""
        wait_for(self._worker.waker, Deadline(min(DIAL_AGAIN_S, deadline.remaining_s())))
        return deadline.remaining_s() > 0

    def _ask(self, line: Line, deadline: Deadline) -> Begin:
        if not line.slots:
            self._join(line, deadline)
        line.inbox.clear()  # what is left of a sync that was given up
        line.sync += 1
        self._post(line, Ready(), deadline)
        message = self._next(line, deadline, "began no sync")
        if isinstance(message, Begin):
            return message
        raise ProtocolError(f"{line.link.peer} sent {type(message).__name__} where a sync should begin")

    def _join(self, line: Line, deadline: Deadline) -> None:
        hello = self._next(line, deadline, "did not answer the greeting")
        if not isinstance(hello, Hello) or (hello.wire_version, hello.role) != (WIRE_VERSION, HelloRole.SENDER):
            raise ProtocolError(
                f"{line.link.peer} answered {hello}; this end speaks version {WIRE_VERSION} to a sender"
            )
        session = self._next(line, deadline, "did not share its ring")
        if not isinstance(session, Session):
            raise ProtocolError(f"{line.link.peer} sent {type(session).__name__} where it should share its ring")
        line.slots = self._transport.map_slots(session, line.link)

    def _next_step(self, landing: Landing) -> Callable[[], list[tuple[str, Tensor]] | None]:
        if landing.is_over:
            raise UsageError(f"this sync of {self.address} was given up; call receive_weights again for the next")
        return lambda: self._advance(landing)

    def _advance(self, landing: Landing) -> list[tuple[str, Tensor]] | None:
        """Free the bucket handed out last; the tensors of the next one, or None after the commit."""
        try:
            if landing.digests:
                self._say(landing, Free(len(landing.digests) - 1))
            while True:
                message = self._hear(landing, "sent nothing more")
                if isinstance(message, Bucket):
                    if tensors := self._land(landing, message):
                        landing.num_tensors += len(tensors)
                        return tensors
                    self._say(landing, Free(message.sequence))
                elif isinstance(message, Seal):
                    self._finish(landing, message)
                    return None
                else:
                    raise ProtocolError(f"{landing.line.link.peer} sent {type(message).__name__} inside a sync")
        except BaseException as error:
            self._give_up(landing, _REASONS.get(type(error), AbortReason.FAILED), str(error) or repr(error))
            raise

    def _land(self, landing: Landing, bucket: Bucket) -> list[tuple[str, Tensor]]:
        """Verify a bucket and return the tensors that are whole with it."""
        peer, slots = landing.line.link.peer, landing.line.slots
        sequence = len(landing.digests)
        if (bucket.sequence, bucket.slot) != (sequence, sequence % len(slots)):
            raise ProtocolError(f"{peer} sent bucket {bucket.sequence} in slot {bucket.slot}; {sequence} is due")
        if bucket.used_bytes > slots[bucket.slot].numel():
            raise ProtocolError(f"{peer} says that a bucket has {bucket.used_bytes} bytes of {slots[0].numel()}")
        raw = slots[bucket.slot][: bucket.used_bytes]
        digest = rl_csrc.digest(raw)
        if digest != bucket.digest and self._transport.refresh(bucket.slot):
            digest = rl_csrc.digest(raw)
        if digest != bucket.digest:
            raise DigestError(
                f"bucket {sequence} of version {landing.version} landed with digest {digest:#018x}; "
                f"{peer} sent {bucket.digest:#018x}. None of its tensors is handed out"
            )
        landing.digests.append(digest)
        whole = [self._assemble(landing, span, raw) for span in bucket.spans]
        return [item for item in whole if item is not None]

    def _assemble(self, landing: Landing, span: Span, raw: Tensor) -> tuple[str, Tensor] | None:
        """The tensor that a span completes. One that came in several buckets is put together in the scratch memory."""
        specs, peer = landing.line.specs, landing.line.link.peer
        if span.tensor >= len(specs):
            raise ProtocolError(f"{peer} sent tensor {span.tensor}; it has declared {len(specs)}")
        spec = specs[span.tensor]
        end, reached = span.bucket_offset + span.num_bytes, span.tensor_offset + span.num_bytes
        is_whole, is_due = span.num_bytes == spec.num_bytes, span.tensor_offset == landing.partial_bytes
        if (
            (landing.partial >= 0 and span.tensor != landing.partial)
            or not is_due
            or end > raw.numel()
            or reached > spec.num_bytes
            or span.bucket_offset % ALIGNMENT_BYTES
            or not (is_whole or (span.num_bytes > 0 and span.bucket_offset == 0))
        ):
            raise ProtocolError(f"{peer} sent {span} of {spec}, which does not fit after what came before")
        landing.num_bytes += span.num_bytes
        is_done = reached == spec.num_bytes
        landing.partial, landing.partial_bytes = (-1, 0) if is_done else (span.tensor, reached)
        piece = raw[span.bucket_offset : end]
        if not is_whole:
            if self._scratch.numel() < spec.num_bytes:
                self._scratch = torch.empty(spec.num_bytes, dtype=torch.uint8)
            self._scratch[span.tensor_offset : reached].copy_(piece)
            piece = self._scratch[: spec.num_bytes]
        return (spec.name, from_bytes(piece, spec)) if is_done else None

    def _finish(self, landing: Landing, seal: Seal) -> None:
        """Vote, and wait for the verdict."""
        digest = tree_digest(landing.digests)
        landed = (len(landing.digests), landing.num_tensors, landing.num_bytes, digest)
        if landed != (seal.num_buckets, seal.num_tensors, seal.num_bytes, seal.digest) or landing.partial >= 0:
            raise ProtocolError(
                f"{landing.line.link.peer} sent {seal}; (buckets, tensors, bytes, digest) here {landed}"
            )
        self._state = ReceiverState.STAGED
        self._say(landing, Staged(landing.version, digest, landing.num_tensors))
        verdict = self._hear(landing, "gave no verdict")
        if verdict != Commit(landing.version):
            raise ProtocolError(f"{landing.line.link.peer} sent {verdict} where a verdict on {landing.version} is due")
        landing.is_over, self._landing = True, None
        self._version, self._state = landing.version, ReceiverState.COMMITTED
        landing.line.link.try_send(Committed(landing.version), landing.line.sync)

    def _give_up(self, landing: Landing, reason: AbortReason, text: str) -> None:
        """Leave a sync that is not over. Tells the sender without waiting; never raises."""
        if landing.is_over:
            return
        landing.is_over = True
        if self._landing is landing:
            self._landing = None
            self._state = ReceiverState.POISONED if landing.num_tensors else landing.previous
        if landing.line is self._line:
            self._leave(reason, text)

    def _leave(self, reason: AbortReason, text: str) -> None:
        """Tell the sender, if it can still hear it, and hang up if it cannot or if the two are out of step."""
        line = self._line
        if line is None:
            return
        is_told = not line.link.is_closed and line.link.try_send(Abort(reason, text), line.sync)
        if not is_told or reason is AbortReason.PROTOCOL:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.link.close()
            self._line = None
            self._transport.release()

    def _say(self, landing: Landing, message: Message) -> None:
        self._post(landing.line, message, Deadline(self._config.timeout_s))

    def _hear(self, landing: Landing, failing: str) -> Message:
        return self._next(landing.line, Deadline(self._config.timeout_s), failing)

    def _post(self, line: Line, message: Message, deadline: Deadline) -> None:
        sync = 0 if isinstance(message, Hello) else line.sync
        line.link.send(message, sync, waker=self._worker.waker, deadline=deadline)

    def _next(self, line: Line, deadline: Deadline, failing: str) -> Message:
        """The next message of this sync. An abort or the sender's death is heard before what it makes worthless.

        Raises:
            PeerTimeoutError, PeerLostError, ProtocolError, SyncAbortedError: see their names.
        """
        peer = line.link.peer
        while True:
            self._read(line)
            for sync, message in line.inbox:
                if isinstance(message, Abort) and sync == line.sync:
                    line.inbox.clear()
                    raise SyncAbortedError(f"{peer} called the sync off: {message.text}")
            has_verdict = any(isinstance(message, Commit) for _, message in line.inbox)
            if line.link.is_closed and not has_verdict:
                raise PeerLostError(f"{peer} went away")
            if line.inbox:
                return line.inbox.popleft()[1]
            if not wait_for(self._worker.waker, deadline, readable=[line.link.fileno()]):
                raise PeerTimeoutError(f"{peer} {failing} within {deadline.timeout_s:g} s")

    def _read(self, line: Line) -> None:
        """Take in what is here. Manifests count whatever sync they came in; all else of an earlier one is stale."""
        try:
            messages = line.link.receive()
        except ProtocolError as error:
            raise ProtocolError(f"{line.link.peer}: {error}") from error
        for sync, message in messages:
            if isinstance(message, Manifest):
                if message.first != len(line.specs):
                    raise ProtocolError(f"{line.link.peer} declares tensor {message.first}; {len(line.specs)} is next")
                line.specs += message.specs
            elif sync in {0, line.sync}:
                line.inbox.append((sync, message))
