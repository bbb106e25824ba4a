"""`Membership`: receivers of a session at the sender, and what their messages mean. Knows no socket."""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rl_ckpt.errors import DigestError, PeerLostError, PeerTimeoutError, ProtocolError, SyncAbortedError
from rl_ckpt.protocol.channel import is_proof, proof_of
from rl_ckpt.protocol.messages import (
    NO_VERSION,
    NONCE_BYTES,
    WIRE_VERSION,
    Abort,
    AbortReason,
    Committed,
    Free,
    Hello,
    HelloRole,
    Proof,
    Ready,
    Staged,
    Stream,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rl_ckpt.errors import CkptError
    from rl_ckpt.protocol.channel import Channel, Deadline
    from rl_ckpt.protocol.messages import Message, Session
    from rl_ckpt.transports.streams import StreamWriter

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


@dataclass(frozen=True, slots=True)
class Attach:
    """Reply: the connection is a payload stream of an admitted receiver."""

    owner: Peer
    stream: Stream


@dataclass(slots=True)
class Membership:
    """Admission of receivers, and their state in a sync, as messages change it. Replies are for the caller to send."""

    session: Session
    memory: Callable[[], bytes]
    """Returns the transport's metadata for a receiver."""
    token: bytes | None
    """Secret that receivers must prove; None if the kernel authenticates them."""
    pid: int
    admitted: list[Peer] = field(default_factory=list[Peer])
    """Admitted receivers."""
    joining: list[Peer] = field(default_factory=list[Peer])
    """Connections whose handshake is not complete. Syncs do not wait for them."""
    num_freed: Counter[int] = field(default_factory=Counter[int])
    """Per bucket of the sync, the number of receivers that freed it."""

    def is_ready(self, peer: Peer) -> bool:
        """Whether a receiver requests a sync, and its streams are attached."""
        return peer.waiting > 0 and peer.writer.is_open(self.session.num_streams, peer.opened)

    def missing(self, needed: int, num_peers: int, address: str) -> str:
        """Sentence on receivers that have not come; empty if there are `needed`."""
        if len(self.admitted) >= needed:
            return ""
        came = f"{len(self.admitted)} of {num_peers} receivers came to {address}"
        silent = ", ".join(peer.name for peer in self.joining if peer.hello is not None)
        return f"{came}, and {silent} did not call receive_weights" if silent else came

    def idle(self) -> str:
        """Sentence on receivers that request no sync; empty if all do."""
        idle = ", ".join(peer.name for peer in self.admitted if not self.is_ready(peer))
        return f"{idle} did not call receive_weights" if idle else ""

    def remove(self, peer: Peer) -> None:
        """Remove a receiver."""
        for group in (self.admitted, self.joining):
            if peer in group:
                group.remove(peer)

    def handle(self, peer: Peer, sync: int, message: Message) -> Iterator[Message | Attach]:
        """Apply a message; yields the replies, in order. To be iterated to its end.

        Raises:
            ProtocolError: the message may not come now.
        """
        if peer in self.joining:
            yield from self._join(peer, message)
        elif isinstance(message, Ready):
            peer.waiting, peer.held, peer.opened = sync, message.held, message.opened
            peer.codecs = message.codecs
            peer.committed = (message.version, message.digest)
        elif isinstance(message, Abort) and sync == peer.waiting:
            peer.waiting = 0
        elif sync == peer.sync:  # else of a sync that is over for one side
            self._apply(peer, message)

    def _apply(self, peer: Peer, message: Message) -> None:
        """Apply a message of the current sync."""
        if isinstance(message, Free):
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

    def _join(self, peer: Peer, message: Message) -> Iterator[Message | Attach]:
        """Handle a handshake message: `Hello` and, with a token, `Proof` admit a receiver; `Stream` adds to another."""
        if isinstance(message, Hello) and peer.hello is None:
            yield from self._greet(peer, message)
            if self.token is None:
                yield from self._admit(peer)
        elif isinstance(message, Proof) and peer.hello is not None and self.token is not None:
            if not is_proof(message.mac, self.token, "receiver", peer.hello.nonce, peer.nonce):
                raise ProtocolError("its token is not that of this session")
            yield from self._admit(peer)
        elif isinstance(message, Stream) and peer.hello is None:
            owner = next((known for known in self.admitted if known.ticket == message.ticket), None)
            if owner is None or message.index >= self.session.num_streams:
                raise ProtocolError(f"it offered {message}, which belongs to no receiver of this session")
            self.joining.remove(peer)
            yield Attach(owner, message)
        else:
            raise ProtocolError(f"it sent {type(message).__name__} before it was in the session")

    def _greet(self, peer: Peer, hello: Hello) -> Iterator[Message]:
        peer.channel.introduce("receiver", hello.pid)
        peer.hello = hello
        yield Hello(WIRE_VERSION, HelloRole.SENDER, self.pid, peer.nonce)
        if hello.wire_version != WIRE_VERSION or hello.role != HelloRole.RECEIVER:
            raise ProtocolError(
                f"it speaks version {hello.wire_version} of the wire format in role {hello.role}; "
                f"this end speaks version {WIRE_VERSION} and wants role {HelloRole.RECEIVER.value}"
            )
        if self.token is not None:
            yield Proof(proof_of(self.token, "sender", hello.nonce, peer.nonce))

    def _admit(self, peer: Peer) -> Iterator[Message]:
        yield replace(self.session, ticket=peer.ticket, memory=self.memory())
        if peer.error is None:  # the reply was sent
            peer.channel.trust()
            self.joining.remove(peer)
            self.admitted.append(peer)
