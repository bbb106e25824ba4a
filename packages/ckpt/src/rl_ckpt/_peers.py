"""The receivers of a session as the sender sees them: who is there, what each has said, and waiting for all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rl_ckpt._link import Deadline, Link, Waker, wait_for
from rl_ckpt._wire import (
    WIRE_VERSION,
    Abort,
    AbortReason,
    Committed,
    Free,
    Hello,
    HelloRole,
    Message,
    Ready,
    Session,
    Staged,
)
from rl_ckpt.errors import (
    CkptError,
    DigestError,
    PeerLostError,
    PeerTimeoutError,
    ProtocolError,
    SyncAbortedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_ckpt._transport import SendTransport

_ERRORS = {
    AbortReason.DIGEST: DigestError,
    AbortReason.PROTOCOL: ProtocolError,
    AbortReason.TIMEOUT: PeerTimeoutError,
    AbortReason.PEER_LOST: PeerLostError,
    AbortReason.FAILED: SyncAbortedError,
}


@dataclass(slots=True, eq=False)
class Peer:
    """One receiver, and what it has said about the sync that it takes part in."""

    link: Link
    is_greeted: bool = False
    """Whether the greetings are exchanged."""
    waiting: int = 0
    """Its number of the sync that its consumer waits for; 0 when there is no consumer."""
    sync: int = 0
    """Its number of the sync that it takes part in; 0 for none."""
    num_declared: int = 0
    """Tensors of the manifest that it was told."""
    num_freed: int = 0
    """Buckets that its consumer is done with."""
    staged: Staged | None = None
    """Its vote."""
    is_committed: bool = False
    """Whether it confirmed the commit."""
    error: CkptError | None = None
    """Why it can take no further part in this sync."""

    @property
    def name(self) -> str:
        """For messages."""
        return self.link.peer

    def join(self) -> None:
        """Take part in the sync that its consumer waits for."""
        self.sync, self.waiting = self.waiting, 0
        self.num_freed, self.staged, self.is_committed, self.error = 0, None, False, None


@dataclass(slots=True)
class Peers:
    """All receivers of a session. Whatever one of them does wrong is kept in its `error` until somebody asks."""

    transport: SendTransport
    session: Session
    waker: Waker
    timeout_s: float
    pid: int
    all: list[Peer] = field(default_factory=list[Peer])

    def pump(self, deadline: Deadline) -> bool:
        """Wait for news of any receiver and take it in. False when the deadline has passed without."""
        by_descriptor = {peer.link.fileno(): peer for peer in self.all}
        ready = wait_for(self.waker, deadline, readable=[self.transport.fileno(), *by_descriptor])
        for descriptor in ready:
            if descriptor in by_descriptor:
                self._take_in(by_descriptor[descriptor])
            else:
                self._accept()
        return bool(ready)

    def poll(self) -> None:
        """Take in what is here now."""
        while self.pump(Deadline(0)):
            pass

    def wait_for_count(self, num_peers: int) -> None:
        """Wait until `num_peers` receivers are in the session.

        Raises:
            PeerTimeoutError: they were fewer.
        """
        self.poll()
        deadline = Deadline(self.timeout_s)
        while late := self._missing(num_peers):
            if not self.pump(deadline):
                raise PeerTimeoutError(f"{late} within {self.timeout_s:g} s")

    def wait_for_ready(self, num_peers: int) -> list[Peer]:
        """Every receiver of the session, as soon as there are `num_peers` and all wait for a sync.

        Raises:
            PeerTimeoutError: they were fewer, or some did not call `receive_weights`; those are dropped.
        """
        self.poll()
        deadline = Deadline(self.timeout_s)
        while late := self._missing(num_peers) or self._idle():
            if not self.pump(deadline):
                for peer in [peer for peer in self.all if not peer.waiting]:
                    self.drop(peer)
                raise PeerTimeoutError(f"{late} within {self.timeout_s:g} s")
        return list(self.all)

    def wait_for_all(self, peers: Sequence[Peer], is_done: Callable[[Peer], bool], doing: str) -> None:
        """Wait until every one of `peers` has done it.

        Raises:
            CkptError: what one of them did wrong instead.
            PeerTimeoutError: names those that did nothing; they are dropped.
        """
        self.poll()
        deadline = Deadline(self.timeout_s)
        while True:
            for peer in peers:
                if peer.error is not None:
                    raise peer.error
            late = [peer for peer in peers if not is_done(peer)]
            if not late:
                return
            if not self.pump(deadline):
                for peer in late:
                    self.drop(peer)
                names = ", ".join(peer.name for peer in late)
                raise PeerTimeoutError(f"{names} did not {doing} within {self.timeout_s:g} s")

    def send(self, peer: Peer, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send to one receiver; what goes wrong becomes its `error`."""
        if peer.error is not None:
            return
        sync = 0 if isinstance(message, Hello | Session) else peer.sync
        try:
            peer.link.send(message, sync, waker=self.waker, deadline=Deadline(self.timeout_s), descriptors=descriptors)
        except PeerTimeoutError as error:
            self.drop(peer, error)
        except PeerLostError as error:
            self._take_in(peer)  # it may have said why
            self.drop(peer, error)

    def abort(self, peers: Sequence[Peer], reason: AbortReason, text: str) -> None:
        """Tell those that can still hear it, without waiting, that the sync is off."""
        for peer in peers:
            if peer.error is None and not peer.link.try_send(Abort(reason, text), peer.sync):
                self.drop(peer)
            peer.sync = 0

    def drop(self, peer: Peer, error: CkptError | None = None) -> None:
        """Take a receiver out of the session; when it wants to, it comes back by itself."""
        peer.error = peer.error or error or PeerLostError(f"{peer.name} was dropped from the session")
        peer.link.close()
        if peer in self.all:
            self.all.remove(peer)

    def close(self) -> None:
        """Close every connection."""
        for peer in list(self.all):
            self.drop(peer)

    def _missing(self, num_peers: int) -> str:
        greeted = sum(peer.is_greeted for peer in self.all)
        came = f"{greeted} of {num_peers} receivers came to {self.transport.address}"
        return came if greeted < num_peers else ""

    def _idle(self) -> str:
        idle = ", ".join(peer.name for peer in self.all if not peer.waiting)
        return f"{idle} did not call receive_weights" if idle else ""

    def _accept(self) -> None:
        while (link := self.transport.accept()) is not None:
            self.all.append(Peer(link))

    def _take_in(self, peer: Peer) -> None:
        try:
            for sync, message in peer.link.receive():
                self._handle(peer, sync, message)
        except ProtocolError as error:
            self.drop(peer, ProtocolError(f"{peer.name}: {error}"))
            return
        if peer.link.is_closed:
            self.drop(peer, PeerLostError(f"{peer.name} went away"))

    def _handle(self, peer: Peer, sync: int, message: Message) -> None:
        if isinstance(message, Hello):
            self._greet(peer, message)
        elif not peer.is_greeted:
            raise ProtocolError(f"it sent {type(message).__name__} before Hello")
        elif isinstance(message, Ready):
            peer.waiting = sync
        elif isinstance(message, Abort) and sync == peer.waiting:
            peer.waiting = 0
        elif sync != peer.sync:
            return  # about a sync that is over for one of the two
        elif isinstance(message, Free):
            if message.sequence != peer.num_freed:
                raise ProtocolError(f"it freed bucket {message.sequence}; its next one is {peer.num_freed}")
            peer.num_freed += 1
        elif isinstance(message, Staged):
            peer.staged = message
        elif isinstance(message, Committed):
            peer.is_committed = True
        elif isinstance(message, Abort):
            peer.error = _ERRORS[message.reason](f"{peer.name} called the sync off: {message.text}")
        else:
            raise ProtocolError(f"it sent {type(message).__name__}, which only a sender may")

    def _greet(self, peer: Peer, hello: Hello) -> None:
        self.send(peer, Hello(WIRE_VERSION, HelloRole.SENDER, self.pid))
        if hello.wire_version != WIRE_VERSION or hello.role != HelloRole.RECEIVER:
            raise ProtocolError(
                f"it speaks version {hello.wire_version} of the wire format in role {hello.role}; "
                f"this end speaks version {WIRE_VERSION} and wants role {HelloRole.RECEIVER.value}"
            )
        self.send(peer, self.session, self.transport.descriptors())
        peer.is_greeted = True
