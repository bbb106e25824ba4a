"""Receiver connection: dialling, handshake, messages of a sync; every wait has a deadline."""

from __future__ import annotations

import os
import secrets
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from rl_ckpt.errors import (
    AddressError,
    BackendError,
    DigestError,
    PeerLostError,
    PeerTimeoutError,
    ProtocolError,
    SyncAbortedError,
)
from rl_ckpt.protocol.channel import Canceller, Channel, Deadline, is_proof, proof_of, wait_for
from rl_ckpt.protocol.messages import (
    NO_VERSION,
    NONCE_BYTES,
    WIRE_VERSION,
    Abort,
    AbortReason,
    Begin,
    Bucket,
    Buckets,
    Commit,
    Free,
    Hello,
    HelloRole,
    Manifest,
    Mapped,
    Message,
    NewGroup,
    Proof,
    Ready,
    Session,
    Sources,
)
from rl_ckpt.receiver.mapped import MappedSource
from rl_ckpt.tensors.spec import TensorSpec
from rl_ckpt.transports.streams import BucketReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_ckpt.transports.base import ReceiveTransport
    from rl_ckpt.types import SessionConfig
    from rl_csrc.ipc import Waker

T = TypeVar("T")

DYING_S = 1.0
"""Seconds by which the memory of a dying process may disappear before its sockets close."""
PULL_PAUSE_S = 0.001
"""Poll interval for reads of the sender's memory, which signal no descriptor."""


@dataclass(slots=True, eq=False)
class Connection:
    """Connection to a sender, with the state of the session. Owns the channel and the payload streams."""

    channel: Channel
    transport: ReceiveTransport
    canceller: Canceller
    address: str
    """URL of the session."""
    timeout_s: float
    """Default deadline of waits, seconds."""
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    """Nonce over which the sender must prove the token."""
    session: Session | None = None
    """Session parameters from the sender; None before the handshake."""
    reader: BucketReader | None = None
    """Reader of bucket payloads; None before the handshake."""
    mapped_source: MappedSource | None = None
    """Mapping of the sender's registered source, if it sent one."""
    inbox: deque[tuple[int, Message | Bucket]] = field(default_factory=deque[tuple[int, Message | Bucket]])
    """Received `(sync, message)` pairs that were not handled yet."""
    _freed: list[int] = field(default_factory=list[int])
    """Freed buckets that were not reported to the sender yet."""
    _batch_ends: set[int] = field(default_factory=set[int])
    """Last bucket of each announcement message."""
    specs: list[TensorSpec] = field(default_factory=list[TensorSpec])
    """Manifest received so far."""
    sync: int = 0
    """Number of the sync requested last."""

    @property
    def peer(self) -> str:
        """Name of the sender."""
        return self.channel.peer

    @property
    def busy_s(self) -> float:
        """Seconds that a native thread has spent on verifying and unpacking buckets of the sync."""
        return 0.0 if self.reader is None else self.reader.busy_s

    def begin_sync(self) -> None:
        """Discard messages of an earlier sync, and number the next one."""
        self.inbox.clear()
        self._freed.clear()
        self._batch_ends.clear()
        self.sync += 1

    def greet(self, deadline: Deadline) -> None:
        """Send `Hello`, without waiting for the reply."""
        self.send_until(Hello(WIRE_VERSION, HelloRole.RECEIVER, os.getpid(), self.nonce), deadline)

    def join(self, deadline: Deadline) -> BucketReader:
        """Complete the handshake: receive `Hello`, prove the token, and receive the session."""
        hello = self.next(deadline, "did not answer the greeting")
        if not isinstance(hello, Hello) or (hello.wire_version, hello.role) != (WIRE_VERSION, HelloRole.SENDER):
            raise ProtocolError(f"{self.peer} answered {hello}; this end speaks version {WIRE_VERSION} to a sender")
        self.channel.introduce("sender", hello.pid)
        if self.transport.token is not None:
            self._authenticate(self.transport.token, hello.nonce, deadline)
        session = self.next(deadline, "did not share its session")
        if not isinstance(session, Session):
            raise ProtocolError(f"{self.peer} sent {type(session).__name__} where it should share its session")
        slots = self._mapped(lambda: self.transport.map_slots(session, self.channel))
        self.session = session
        self.channel.trust()
        self.reader = BucketReader(self.transport, session, slots, self)
        return self.reader

    def _mapped(self, mapping: Callable[[], T]) -> T:
        """Run a mapping of the sender's memory; if it fails because the sender has died, raise PeerLostError."""
        try:
            return mapping()
        except BackendError as error:
            if self.channel.is_closed_by_peer(DYING_S):
                raise self.channel.loss() from error
            raise

    def _authenticate(self, token: bytes, nonce: bytes, deadline: Deadline) -> None:
        proof = self.next(deadline, "did not prove that it knows the token")
        if not isinstance(proof, Proof) or not is_proof(proof.mac, token, "sender", self.nonce, nonce):
            raise AddressError(f"{self.peer} of {self.address} has another token than this end; give the same to both")
        self.send_until(Proof(proof_of(token, "receiver", self.nonce, nonce)), deadline)

    def send(self, message: Message) -> None:
        """Send a message."""
        self._report_freed()
        self.send_until(message, Deadline(self.timeout_s))

    def free(self, sequences: Sequence[int]) -> None:
        """Report freed buckets to the sender; those announced together are reported in one message."""
        self._freed += sequences
        if not self._batch_ends.isdisjoint(sequences):
            self._report_freed()

    def _report_freed(self) -> None:
        if self._freed:
            freed, self._freed = tuple(self._freed), []
            self._batch_ends.difference_update(freed)
            self.send_until(Free(freed), Deadline(self.timeout_s))

    def announced(self, can_begin: Callable[[Bucket], bool]) -> Bucket | None:
        """Next message, if it is here and a bucket that can be begun now."""
        if self.inbox and isinstance(bucket := self.inbox[0][1], Bucket) and can_begin(bucket):
            self.inbox.popleft()
            return bucket
        return None

    def is_batch_end(self, bucket: Bucket) -> bool:
        """Whether a bucket is the last of its announcement."""
        return bucket.sequence in self._batch_ends

    def receive(self, failing: str) -> Message | Bucket:
        """Next message of this sync; see `next`."""
        return self.next(Deadline(self.timeout_s), failing)

    def abort(self, reason: AbortReason, text: str) -> bool:
        """Abort the sync, without waiting. False if the connection cannot be used any more."""
        if self.reader is not None:
            self.reader.close()
        is_sent = not self.channel.is_closed and self.channel.try_send(Abort(reason, text), self.sync)
        return is_sent and reason is not AbortReason.PROTOCOL

    def close(self) -> None:
        """Close the connection."""
        self.mapped_source = None
        if self.reader is not None:
            self.reader.release()
            self.reader = None  # it refers back to the connection: the ring would stay mapped until a collection
        self.channel.close()

    def send_until(self, message: Message, deadline: Deadline) -> None:
        """Send a message, within the sync that was asked for last."""
        sync = 0 if isinstance(message, Hello | Proof) else self.sync
        self.channel.send(message, sync, canceller=self.canceller, deadline=deadline)

    def next(self, deadline: Deadline, failing: str) -> Message | Bucket:
        """Next message of this sync. An abort or the sender's death takes precedence over earlier messages.

        Raises:
            PeerTimeoutError, PeerLostError, ProtocolError, SyncAbortedError: see their names.
        """
        while True:
            self._read()
            if self.channel.is_closed and not any(isinstance(message, Commit) for _, message in self.inbox):
                raise self.channel.loss()
            if self.inbox:
                return self.inbox.popleft()[1]
            self._report_freed()
            if not wait_for(self.canceller, deadline, readable=[self.channel.fileno()]):
                raise PeerTimeoutError(f"{self.peer} {failing} within {deadline.timeout_s:g} s")

    def readable(self, descriptor: int) -> None:
        """Wait until a stream is readable; raises meanwhile if the sync is aborted."""
        deadline = Deadline(self.timeout_s)
        while True:
            self._read()
            if self.channel.is_closed:
                raise self.channel.loss()
            ready = wait_for(self.canceller, deadline, readable=[descriptor, self.channel.fileno()])
            if descriptor in ready:
                return
            if not ready:
                raise PeerTimeoutError(f"{self.peer} sent no more payload within {deadline.timeout_s:g} s")

    def until_moved(self, waker: Waker, is_done: Callable[[], bool], num_bytes: Callable[[], int]) -> None:
        """Wait for a native thread; raises meanwhile if the sync is aborted, or no byte moves before the deadline."""
        deadline, before = Deadline(self.timeout_s), num_bytes()
        waker.clear()
        while not is_done():
            if self.channel.is_closed:
                raise self.channel.loss()
            ready = wait_for(self.canceller, deadline, readable=[waker.fileno(), self.channel.fileno()])
            if waker.fileno() in ready:
                waker.clear()
            if self.channel.fileno() in ready:
                self._read()
            if not ready:
                if num_bytes() == before:
                    raise PeerTimeoutError(f"{self.peer} sent no more payload within {deadline.timeout_s:g} s")
                deadline, before = Deadline(self.timeout_s), num_bytes()

    def until(self, is_done: Callable[[], bool]) -> None:
        """Wait until a read of the sender's memory is complete; raises meanwhile if the sync is aborted."""
        deadline = Deadline(self.timeout_s)
        while not is_done():
            self._read()
            if self.channel.is_closed:
                raise self.channel.loss()
            if not deadline.remaining_s():
                raise PeerTimeoutError(f"{self.peer} let nothing be read of its memory within {deadline.timeout_s:g} s")
            wait_for(self.canceller, Deadline(PULL_PAUSE_S), readable=[self.channel.fileno()])

    def until_woken(self, waker: Waker) -> None:
        """Wait for another thread, whose waits have deadlines; raises meanwhile if the sync is aborted."""
        ready: list[int] = []
        while waker.fileno() not in ready:
            self._read()
            if self.channel.is_closed:
                raise self.channel.loss()
            ready = wait_for(self.canceller, Deadline(self.timeout_s), readable=[waker.fileno(), self.channel.fileno()])

    def ended(self) -> None:
        """Raise the reason why the sender closed a stream."""
        deadline = Deadline(self.timeout_s)
        while not self.channel.is_closed:
            self._read()
            if not wait_for(self.canceller, deadline, readable=[self.channel.fileno()]):
                break
        raise PeerLostError(f"{self.peer} closed a connection for payload")

    def _read(self) -> None:
        """Read the available messages into the inbox. Of earlier syncs, only manifests count.

        Raises:
            SyncAbortedError: the sender aborted the sync requested last.
        """
        try:
            messages = self.channel.receive()
        except ProtocolError as error:
            raise ProtocolError(f"{self.peer}: {error}") from error
        abort: Abort | None = None
        sources: Sources | None = None
        for sync, message in messages:
            if isinstance(message, Manifest):
                if message.first != len(self.specs):
                    raise ProtocolError(f"{self.peer} declares tensor {message.first}; {len(self.specs)} is next")
                self.specs += message.specs
            elif isinstance(message, NewGroup):
                self.transport.new_group(message, self.channel)
            elif isinstance(message, Sources):
                sources = message
            elif isinstance(message, Abort) and sync == self.sync:
                abort = message
            elif sync not in {0, self.sync}:
                continue
            elif isinstance(message, Buckets):
                self.inbox.extend((sync, bucket) for bucket in message.buckets)
                self._batch_ends.add(message.buckets[-1].sequence)
            else:
                self.inbox.append((sync, message))
                if isinstance(message, Mapped):
                    self._batch_ends.add(message.sequence)
        if abort is not None:
            self.inbox.clear()
            raise SyncAbortedError(f"{self.peer} called the sync off: {abort.text}")
        if sources is not None:  # after the messages behind it: if this fails, the session goes on
            described = sources.segments
            segments = self._mapped(lambda: self.transport.map_segments(described, self.channel))
            self.mapped_source = MappedSource(sources, segments, self.specs, self.peer)


DIAL_AGAIN_S = 0.02
_REASONS: dict[type[BaseException], AbortReason] = {
    DigestError: AbortReason.DIGEST,
    ProtocolError: AbortReason.PROTOCOL,
    PeerTimeoutError: AbortReason.TIMEOUT,
}


def reason_of(error: BaseException) -> AbortReason:
    """Abort reason that an error is reported with."""
    return _REASONS.get(type(error), AbortReason.FAILED)


class Connector:
    """Dials the sender, and reconnects when it is replaced; owns the current connection."""

    def __init__(self, config: SessionConfig, transport: ReceiveTransport, canceller: Canceller) -> None:
        self.connection: Connection | None = None
        """Current connection, or None."""
        self._config = config
        self._transport = transport
        self._canceller = canceller

    def connect(self) -> None:
        """Connect, waiting until there is a sender.

        Raises:
            PeerTimeoutError: there was none before the deadline.
        """
        self._dial(Deadline(self._config.timeout_s))

    def request_sync(self, ready: Ready) -> tuple[Connection, Begin]:
        """Request the next sync, and wait until it begins. Fills in `opened` of the message.

        Raises:
            CkptError: it did not begin; the connection is closed.
        """
        deadline = Deadline(self._config.timeout_s)
        while True:
            try:
                connection = self._dial(deadline)
                return connection, self._request_sync(connection, ready, deadline)
            except PeerLostError as error:
                self.close()  # the sender died before this sync began: wait for its successor
                if not self._pause(deadline):
                    raise PeerTimeoutError(f"{error}, and none began a sync within {deadline.timeout_s:g} s") from error
            except BaseException as error:
                self.abort(reason_of(error), str(error) or repr(error))
                self.close()
                raise

    def abort(self, reason: AbortReason, text: str) -> None:
        """Report an abort to the sender; close the connection if that fails, or after a protocol error."""
        if self.connection is not None and not self.connection.abort(reason, text):
            self.close()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
            self._transport.release()

    def _dial(self, deadline: Deadline) -> Connection:
        """Current connection, or a new one."""
        address = self._config.address
        while self.connection is None:
            channel = self._transport.dial()
            if channel is not None:
                self.connection = Connection(
                    channel, self._transport, self._canceller, address, timeout_s=self._config.timeout_s
                )
                self.connection.greet(deadline)
            elif not self._pause(deadline):
                raise PeerTimeoutError(f"no sender came to {address} within {deadline.timeout_s:g} s")
        return self.connection

    def _pause(self, deadline: Deadline) -> bool:
        """Wait a moment before dialling again. False when the deadline has passed."""
        wait_for(self._canceller, Deadline(min(DIAL_AGAIN_S, deadline.remaining_s())))
        return deadline.remaining_s() > 0

    def _request_sync(self, connection: Connection, ready: Ready, deadline: Deadline) -> Begin:
        reader = connection.reader or connection.join(deadline)
        connection.begin_sync()
        try:
            reader.open(connection.sync, self._config.timeout_s)
        except OSError as error:
            raise PeerLostError(f"{connection.peer} took no connection for payload: {error}") from error
        connection.send_until(replace(ready, opened=reader.opened), deadline)
        message = connection.next(deadline, "began no sync")
        if isinstance(message, Begin) and message.base in {ready.held, NO_VERSION}:
            return message
        raise ProtocolError(
            f"{connection.peer} sent {message} where a sync should begin; version {ready.held} is held here"
        )
