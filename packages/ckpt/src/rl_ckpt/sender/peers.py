"""Receivers of a session at the sender: admission, their state in a sync, and waits for all of them."""

from __future__ import annotations

import secrets
import selectors
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from rl_ckpt.errors import (
    CkptError,
    DigestError,
    PeerLostError,
    PeerTimeoutError,
    ProtocolError,
    SyncAbortedError,
)
from rl_ckpt.protocol.channel import Canceller, Channel, Deadline, is_proof, proof_of
from rl_ckpt.protocol.messages import (
    NO_VERSION,
    NONCE_BYTES,
    WIRE_VERSION,
    Abort,
    AbortReason,
    Committed,
    Encoded,
    Free,
    Hello,
    HelloRole,
    Message,
    Proof,
    Ready,
    Session,
    Staged,
    Stream,
)
from rl_ckpt.transports.streams import StreamWriter
from rl_csrc.ipc import Waker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_ckpt.transports.base import SendTransport
    from rl_ckpt.transports.streams import ByteRun

_ERRORS = {
    AbortReason.DIGEST: DigestError,
    AbortReason.PROTOCOL: ProtocolError,
    AbortReason.TIMEOUT: PeerTimeoutError,
    AbortReason.PEER_LOST: PeerLostError,
    AbortReason.FAILED: SyncAbortedError,
}


@dataclass(slots=True, eq=False)
class Peer:
    """Receiver, and its state in the current sync."""

    channel: Channel
    writer: StreamWriter
    """Writer of its payload streams."""
    deadline: Deadline
    """Deadline of its handshake."""
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    """Nonce over which it must prove the token."""
    ticket: int = field(default_factory=lambda: secrets.randbits(64))
    """Random id by which its streams are matched."""
    hello: Hello | None = None
    """Its `Hello`; None before."""
    waiting: int = 0
    """Its number of the sync it requested; 0 if none."""
    held: int = NO_VERSION
    """Version that its targets hold, as a base for deltas."""
    committed: tuple[int, int] = (NO_VERSION, 0)
    """Version committed there, and its tree digest."""
    is_complete: bool = False
    """Whether it has every tensor of the base copy."""
    opened: int = 0
    """Generation of the streams that it reads."""
    codecs: int = 0
    """Bit mask of the `Codec`s that it can read."""
    sync: int = 0
    """Its number of the current sync; 0: it takes part in none."""
    mapped: int = 0
    """Generation of the registered source that it has mapped; 0: none."""
    num_declared: int = 0
    """Number of specs sent to it."""
    num_sent: int = 0
    """Number of buckets announced to it."""
    freed: set[int] = field(default_factory=set[int])
    """Buckets that it has freed."""
    staged: Staged | None = None
    """Its vote; None before."""
    is_committed: bool = False
    """Whether it confirmed the commit."""
    error: CkptError | None = None
    """Error that ended its part in this sync."""
    is_gone: bool = False
    """Whether its connection is closed."""

    @property
    def name(self) -> str:
        """Name, for messages."""
        return self.channel.peer

    def join(self) -> None:
        """Reset its state for the sync that it requested."""
        self.sync, self.waiting = self.waiting, 0
        self.num_sent, self.staged, self.is_committed, self.error = 0, None, False, None
        self.freed.clear()


@dataclass(slots=True)
class Peers:
    """Receivers of a session. A failure of one is kept in its `error` until a wait raises it."""

    transport: SendTransport
    session: Session
    canceller: Canceller
    timeout_s: float
    pid: int
    all: list[Peer] = field(default_factory=list[Peer])
    """Admitted receivers."""
    unauthenticated: list[Peer] = field(default_factory=list[Peer])
    """Connections whose handshake is not complete. Syncs do not wait for them."""

    num_freed: Counter[int] = field(default_factory=Counter[int])
    """Per bucket of the sync, the number of receivers that freed it."""
    _written: Waker = field(default_factory=Waker)
    """Woken by stream threads that failed, or are idle while that is awaited."""
    _awaits_streams: bool = False
    _failed: deque[tuple[Channel, OSError]] = field(default_factory=deque[tuple[Channel, OSError]])
    """Unhandled stream errors, with the channel of the receiver."""
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    """Selector of all connections, kept between waits because they may be many."""

    def __post_init__(self) -> None:
        """Register the listener and the wakers."""
        self._selector.register(self.canceller.fileno(), selectors.EVENT_READ)
        self._selector.register(self.transport.fileno(), selectors.EVENT_READ)
        self._selector.register(self._written.fileno(), selectors.EVENT_READ)

    def pump(self, deadline: Deadline, wakers: Sequence[int] = ()) -> bool:
        """Wait for events of any receiver and handle them. False: the deadline passed.

        Wakers are further descriptors that end the wait when readable.
        """
        self._drop_unauthenticated()
        for waker in wakers:
            self._selector.register(waker, selectors.EVENT_READ)
        try:
            ready = self._selector.select(deadline.remaining_s())
        finally:
            for waker in wakers:
                self._selector.unregister(waker)
        self.canceller.check()
        for key, _ in ready:
            peer: Peer | None = key.data
            if key.fd == self.transport.fileno():
                self._accept()
            elif key.fd == self._written.fileno():
                self._look_at_streams()
            elif peer is not None and not peer.is_gone:
                self._read(peer)
        return bool(ready)

    def poll(self) -> None:
        """Handle all pending events, without waiting."""
        while self.pump(Deadline(0)):
            pass

    def wait_for_count(self, num_peers: int) -> None:
        """Wait until `num_peers` receivers have connected and sent `Hello`; their proof may come with the first sync.

        Raises:
            PeerTimeoutError: there were fewer.
        """
        self.poll()
        deadline = Deadline(self.timeout_s)
        while late := self._missing(
            num_peers - sum(peer.hello is not None for peer in self.unauthenticated), num_peers
        ):
            if not self.pump(deadline):
                raise PeerTimeoutError(f"{late} within {self.timeout_s:g} s")

    def wait_for_ready(self, num_peers: int) -> list[Peer]:
        """Wait until there are `num_peers` receivers and all of them request a sync; returns all receivers.

        Raises:
            PeerTimeoutError: there were fewer, or some did not call `receive_weights`; those are dropped.
        """
        self.poll()
        deadline = Deadline(self.timeout_s)
        while late := self._missing(num_peers, num_peers) or self._idle():
            if not self.pump(deadline):
                for peer in [peer for peer in self.all if not self._is_ready(peer)]:
                    self.drop(peer)
                raise PeerTimeoutError(f"{late} within {self.timeout_s:g} s")
        return list(self.all)

    def out_of_date(self, committed_versions: set[tuple[int, int]]) -> list[Peer]:
        """Receivers that request a sync and hold none of these (version, digest) pairs."""
        self.poll()
        return [peer for peer in self.all if self._is_ready(peer) and peer.committed not in committed_versions]

    def wait_for_all(self, peers: Sequence[Peer], is_done: Callable[[Peer], bool], doing: str) -> None:
        """Wait until a condition holds for each of `peers`. Raises as `wait_until` does."""
        self.wait_until(peers, lambda: all(map(is_done, peers)), lambda peer: not is_done(peer), doing)

    def wait_for_streams(self, peers: Sequence[Peer]) -> None:
        """Wait until the kernel has accepted all payload, so that tensors may change. Raises as `wait_until` does."""
        self._awaits_streams = True
        try:
            self.wait_for_all(peers, lambda peer: peer.writer.is_empty, "take the bytes of a tensor")
        finally:
            self._awaits_streams = False

    def wait_until(
        self, peers: Sequence[Peer], is_done: Callable[[], bool], is_late: Callable[[Peer], bool], doing: str
    ) -> None:
        """Wait until a condition holds that depends on `peers`.

        Raises:
            CkptError: the failure of one of them.
            PeerTimeoutError: the deadline passed; names the late ones, which are dropped.
        """
        deadline = Deadline(self.timeout_s)
        while True:
            for peer in peers:
                if peer.error is not None:
                    raise peer.error
            if is_done():
                return
            if not self.pump(deadline):
                late = [peer for peer in peers if is_late(peer)]
                for peer in late:
                    self.drop(peer)
                names = ", ".join(peer.name for peer in late)
                raise PeerTimeoutError(f"{names} did not {doing} within {self.timeout_s:g} s")

    def wait_for_news(self, peers: Sequence[Peer], news: Waker, is_there: Callable[[], bool], missing: str) -> None:
        """Wait for a condition that another thread signals by a waker, and handle events of `peers` meanwhile.

        Raises:
            CkptError: the failure of one of the peers.
            PeerTimeoutError: the deadline passed; names what is `missing`.
        """
        deadline = Deadline(self.timeout_s)
        while True:
            for peer in peers:
                if peer.error is not None:
                    raise peer.error
            news.clear()
            if is_there():
                return
            if not self.pump(deadline, [news.fileno()]):
                raise PeerTimeoutError(f"{missing} did not come within {self.timeout_s:g} s")

    def send(self, peer: Peer, message: Message | Encoded, descriptors: Sequence[int] = ()) -> None:
        """Send a message to one receiver; a failure becomes its `error`."""
        if peer.error is not None:
            return
        sync = 0 if isinstance(message, Hello | Proof | Session) else peer.sync
        try:
            peer.channel.send(
                message, sync, canceller=self.canceller, deadline=Deadline(self.timeout_s), descriptors=descriptors
            )
        except PeerTimeoutError as error:
            self.drop(peer, error)
        except PeerLostError as error:
            if not peer.is_gone:
                self._read(peer)  # it may have sent the reason
            self.drop(peer, error)

    def put(self, peer: Peer, payloads: Sequence[tuple[int, Sequence[ByteRun]]]) -> None:
        """Queue the payload of buckets, `(sequence, runs)` each, on one receiver's streams."""
        if peer.error is None:
            peer.writer.put(payloads, is_alone=len(self.all) == 1)

    def new_group(self, peers: Sequence[Peer]) -> None:
        """Create the transport's process group of these receivers, if it broadcasts."""
        messages = self.transport.new_group([(peer.ticket, peer.opened, peer.channel) for peer in peers])
        for peer, message in zip(peers, messages, strict=False):
            self.send(peer, message)

    def abort(self, peers: Sequence[Peer], reason: AbortReason, text: str) -> None:
        """Send `Abort` to all receivers that can still get it, without waiting."""
        for peer in peers:
            if peer.error is None and not peer.channel.try_send(Abort(reason, text), peer.sync):
                self.drop(peer)
            peer.writer.close()
            peer.sync = peer.mapped = 0  # it may not have mapped the source
        self.transport.leave_group()

    def dismiss(self, reason: AbortReason, text: str) -> None:
        """Tell those that wait for a sync that none begins, without waiting."""
        for peer in [peer for peer in self.all if peer.waiting]:
            if not peer.channel.try_send(Abort(reason, text), peer.waiting):
                self.drop(peer)
            peer.waiting = 0

    def drop(self, peer: Peer, error: CkptError | None = None) -> None:
        """Remove a receiver from the session; it may reconnect."""
        peer.error = peer.error or error or PeerLostError(f"{peer.name} was dropped from the session")
        peer.writer.close()
        if not peer.is_gone:
            peer.is_gone = True
            self._selector.unregister(peer.channel)
        peer.channel.close()
        for group in (self.all, self.unauthenticated):
            with suppress(ValueError):
                group.remove(peer)

    def close(self) -> None:
        """Close every connection."""
        for peer in [*self.all, *self.unauthenticated]:
            self.drop(peer)
        self._selector.close()
        self._written.close()

    def _missing(self, needed: int, num_peers: int) -> str:
        if len(self.all) >= needed:
            return ""
        came = f"{len(self.all)} of {num_peers} receivers came to {self.transport.address}"
        silent = ", ".join(peer.name for peer in self.unauthenticated if peer.hello is not None)
        return f"{came}, and {silent} did not call receive_weights" if silent else came

    def _is_ready(self, peer: Peer) -> bool:
        return peer.waiting > 0 and peer.writer.is_open(self.session.num_streams, peer.opened)

    def _idle(self) -> str:
        idle = ", ".join(peer.name for peer in self.all if not self._is_ready(peer))
        return f"{idle} did not call receive_weights" if idle else ""

    def _accept(self) -> None:
        while (channel := self.transport.accept()) is not None:
            writer = StreamWriter(self.transport.write, self._note_idle, partial(self._note_failure, channel))
            peer = Peer(channel, writer, Deadline(self.timeout_s))
            self.unauthenticated.append(peer)
            self._selector.register(channel, selectors.EVENT_READ, peer)

    def _drop_unauthenticated(self) -> None:
        for peer in [peer for peer in self.unauthenticated if not peer.deadline.remaining_s()]:
            self.drop(peer)

    def _note_idle(self) -> None:
        """Callback of a stream thread."""
        if self._awaits_streams:
            self._written.wake()

    def _note_failure(self, channel: Channel, error: OSError) -> None:
        """Callback of a stream thread."""
        self._failed.append((channel, error))
        self._written.wake()

    def _look_at_streams(self) -> None:
        self._written.clear()
        while self._failed:
            channel, cause = self._failed.popleft()
            for peer in [peer for peer in self.all if peer.channel is channel]:
                self._read(peer)  # it may have sent the reason
                self.drop(peer, PeerLostError(f"{peer.name} takes no payload any more: {cause}"))

    def _read(self, peer: Peer) -> None:
        try:
            for sync, message in peer.channel.receive():
                self._handle(peer, sync, message)
        except ProtocolError as error:
            self.drop(peer, ProtocolError(f"{peer.name}: {error}"))
            return
        except BaseException:  # an interrupt may lose messages, whose replies it would wait for
            self.drop(peer)
            raise
        if peer.channel.is_closed:
            self.drop(peer, peer.channel.loss())

    def _handle(self, peer: Peer, sync: int, message: Message) -> None:
        if peer in self.unauthenticated:
            self._authenticate(peer, message)
        elif isinstance(message, Ready):
            peer.waiting, peer.held, peer.opened = sync, message.held, message.opened
            peer.codecs = message.codecs
            peer.committed = (message.version, message.digest)
        elif isinstance(message, Abort) and sync == peer.waiting:
            peer.waiting = 0
        elif sync != peer.sync:
            return  # of a sync that is over for one side
        elif isinstance(message, Free):
            freed = set(message.sequences)
            if len(freed) < len(message.sequences) or not freed.isdisjoint(peer.freed) or max(freed) >= peer.num_sent:
                raise ProtocolError(f"it freed buckets {sorted(freed)}, not all of which it has")
            peer.freed |= freed
            self.num_freed.update(freed)
        elif isinstance(message, Staged):
            if len(peer.freed) < peer.num_sent:
                raise ProtocolError(f"it voted, and has freed {len(peer.freed)} of {peer.num_sent} buckets")
            peer.staged = message
        elif isinstance(message, Committed):
            peer.is_committed = True
        elif isinstance(message, Abort):
            peer.error = _ERRORS[message.reason](f"{peer.name} called the sync off: {message.text}")
        else:
            raise ProtocolError(f"it sent {type(message).__name__}, which only a sender may")

    def _authenticate(self, peer: Peer, message: Message) -> None:
        """Handle a handshake message: `Hello` and, with a token, `Proof` admit a receiver; `Stream` adds to another."""
        token = self.transport.token
        if isinstance(message, Hello) and peer.hello is None:
            self._greet(peer, message)
            if token is None:
                self._admit(peer)
        elif isinstance(message, Proof) and peer.hello is not None and token is not None:
            if not is_proof(message.mac, token, "receiver", peer.hello.nonce, peer.nonce):
                raise ProtocolError("its token is not that of this session")
            self._admit(peer)
        elif isinstance(message, Stream) and peer.hello is None:
            self._attach(peer, message)
        else:
            raise ProtocolError(f"it sent {type(message).__name__} before it was in the session")

    def _greet(self, peer: Peer, hello: Hello) -> None:
        peer.channel.introduce("receiver", hello.pid)
        peer.hello = hello
        self.send(peer, Hello(WIRE_VERSION, HelloRole.SENDER, self.pid, peer.nonce))
        if hello.wire_version != WIRE_VERSION or hello.role != HelloRole.RECEIVER:
            raise ProtocolError(
                f"it speaks version {hello.wire_version} of the wire format in role {hello.role}; "
                f"this end speaks version {WIRE_VERSION} and wants role {HelloRole.RECEIVER.value}"
            )
        if self.transport.token is not None:
            self.send(peer, Proof(proof_of(self.transport.token, "sender", hello.nonce, peer.nonce)))

    def _admit(self, peer: Peer) -> None:
        self.send(
            peer,
            replace(self.session, ticket=peer.ticket, memory=self.transport.memory()),
            self.transport.descriptors(),
        )
        if peer.error is None:
            peer.channel.trust()
            self.unauthenticated.remove(peer)
            self.all.append(peer)

    def _attach(self, peer: Peer, stream: Stream) -> None:
        """Attach a stream connection to the receiver with its ticket."""
        owner = next((known for known in self.all if known.ticket == stream.ticket), None)
        if owner is None or stream.index >= self.session.num_streams:
            raise ProtocolError(f"it offered {stream}, which belongs to no receiver of this session")
        self.unauthenticated.remove(peer)
        self._selector.unregister(peer.channel)
        peer.is_gone = True
        owner.writer.attach(stream.index, stream.opened, peer.channel.detach())
