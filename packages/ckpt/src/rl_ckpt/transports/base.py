"""The seam of a backend: `Transport` moves payload; handshake, commit, digests, votes and differences stay rl-ckpt's.

A backend is a subclass of `Transport` that an entry point of the group `rl_ckpt.backends` names by its URL scheme.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

from rl_ckpt.errors import AddressError, ProtocolError
from rl_ckpt.types import Capability

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from rl_ckpt.protocol.channel import Channel
    from rl_ckpt.protocol.messages import NewGroup, Session
    from rl_ckpt.transports.mapped_source import SourceMap
    from rl_ckpt.types import SessionConfig

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Transport(ABC):
    """Data plane of a URL scheme: makes one end of it. Has no state of its own, and an `__init__` without arguments.

    Raise `AddressError` for what a URL must not say, and `BackendError` for what this machine lacks. Touch no peer yet.
    """

    options: ClassVar[Mapping[str, str]] = {}
    """URL options (`?name=value`), with one line on each; `connect` refuses others. Read them by `config.option`."""
    capabilities: ClassVar[frozenset[Capability]] = frozenset(Capability)
    """All of them: they are rl-ckpt's own work. An engine without the transaction declares what it has."""

    @abstractmethod
    def sender(self, config: SessionConfig) -> SendTransport:
        """The sending end of a session."""

    @abstractmethod
    def receiver(self, config: SessionConfig) -> ReceiveTransport:
        """A receiving end of a session."""


def require_name(config: SessionConfig) -> None:
    """Check the name of a session on one host.

    Raises:
        AddressError: it has other characters than letters, digits, dot, dash and underscore, or more than 64; or there
            is a token.
    """
    if not _NAME.fullmatch(config.name):
        raise AddressError(
            f"the name in {config.address!r} is {config.name!r}; allowed are 1 to 64 of A-Z a-z 0-9 . _ -"
        )
    if config.token is not None:
        raise AddressError(f"{config.address} takes no token: the kernel says who is at the other end")


class PayloadWaits(Protocol):
    """How a receiver waits for payload: each returns when that is so, and raises what ends the sync meanwhile."""

    def readable(self, descriptor: int) -> None:
        """A descriptor has something to read."""
        ...

    def until(self, is_done: Callable[[], bool]) -> None:
        """It says True; it is asked again and again."""
        ...

    def ended(self) -> None:
        """Never: nothing more will come, and the sender is about to say why."""
        ...


class SendTransport(ABC):
    """The sender's side: a name to be found under, and a ring of slots."""

    address: str
    """URL under which it is found."""
    bucket_bytes: int = 8 << 20
    """Size of a bucket where the caller asked for none: few messages, and the other end is not kept waiting long."""
    num_streams: int = 0
    """Connections per receiver that payload is written to; 0 where receivers see the ring itself."""
    num_slots: int = 4
    """Slots of the ring. With more than 4, buckets are announced several in a message as a sync grows."""
    is_direct: bool = False
    """Whether a stream may be written straight from a tensor, because the kernel copies what it takes."""
    token: bytes | None = None
    """Secret that receivers must know; None where the kernel vouches for them."""

    @abstractmethod
    def open(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """Take the name and allocate the ring: `num_slots` writable CPU tensors, uint8 [bucket_bytes].

        Raises:
            AddressError: another sender has the name.
        """

    @abstractmethod
    def fileno(self) -> int:
        """Becomes readable when a receiver dials."""

    @abstractmethod
    def accept(self) -> Channel | None:
        """The next receiver that dialled, without waiting."""

    def descriptors(self) -> Sequence[int]:
        """File descriptors that go with the `Session` message."""
        return ()

    def write(self, connection: socket.socket, slot: int, start: int, end: int) -> int:
        """Put bytes `start` to `end` of a slot on a stream and return how many went. Only for sessions with streams.

        Each stream has a thread that calls this on a blocking socket, several streams at once. The slot does not
        change before the receiver has freed its bucket, so the kernel may refer to it till then.

        Raises:
            OSError: the receiver is gone, or the socket was shut down because the sync is off.
        """
        raise NotImplementedError(f"{type(self).__name__} has no streams")

    def memory(self) -> bytes:
        """What a receiver must know to read the ring from afar; goes with the `Session` message."""
        return b""

    def new_group(self, members: Sequence[tuple[int, int, Channel]]) -> Sequence[NewGroup]:
        """Prepare for a sync with receivers, `(ticket, generation, channel)` each; what to tell each, if anything.

        For transports that send to all at once. `generation` is what the receiver's transport last said it has.
        """
        del members
        return ()

    def publish(self, content: Tensor) -> None:
        """Begin to send the payload of a bucket, which every receiver was just told of, to all at once."""
        del content

    def map_source(self, items: Sequence[tuple[str, Tensor]]) -> SourceMap | None:
        """Of a registered source, what receivers can read where it is; None where they can read nothing so."""
        del items
        return None

    def synchronize(self) -> None:  # noqa: B027  # most transports have nothing to do here
        """Wait until what was begun on the source's device is in its memory."""

    def leave_group(self) -> None:  # noqa: B027  # most transports have nothing to do here
        """The sync is off: forget what `new_group` made. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Give the name and the ring back. Idempotent."""


class Listener(Protocol):
    """Socket that holds an address and accepts connections, without waiting."""

    config: SessionConfig
    """Of the session, with the address that it is reached at."""

    def listen(self) -> None:
        """Accept connections from now on."""
        ...

    def fileno(self) -> int:
        """Becomes readable when a receiver connects."""
        ...

    def accept(self) -> Channel | None:
        """The next connection."""
        ...

    def close(self) -> None:
        """Give the address back."""
        ...


class ListeningSend(SendTransport):
    """Sending end that receivers connect to, at a listener. Give it `listener` and `allocate`."""

    def __init__(self, config: SessionConfig) -> None:
        self.address = config.address
        self._config = config
        self._listener: Listener | None = None

    def open(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """Take the address, allocate, and only then accept: who connects finds all of it ready."""
        self._listener = listener = self.listener(self._config)
        self._config = listener.config
        self.address = listener.config.address
        slots = self.allocate(num_slots, bucket_bytes)
        listener.listen()
        return slots

    @abstractmethod
    def listener(self, config: SessionConfig) -> Listener:
        """Take the address; raises `AddressError` if another sender has it."""

    @abstractmethod
    def allocate(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """Make the ring: `num_slots` writable tensors, uint8 [bucket_bytes]."""

    def fileno(self) -> int:
        """The listening socket."""
        if self._listener is None:
            raise AddressError(f"{self.address} is not open")
        return self._listener.fileno()

    def accept(self) -> Channel | None:
        """The next connection."""
        return None if self._listener is None else self._listener.accept()

    def close(self) -> None:
        """Give the address back. Extend it to give the ring back."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class ReceiveTransport(ABC):
    """A receiver's side: how to reach the sender, and how to see its ring."""

    token: bytes | None = None
    """Secret that the sender must know; None where the kernel vouches for it."""
    is_sender_memory: bool = False
    """Whether slots are the sender's own memory, which a consumer could write to."""

    @abstractmethod
    def dial(self) -> Channel | None:
        """Connect without waiting; None while there is no sender of this name.

        Raises:
            AddressError: who answers under the name is not to be trusted.
        """

    @abstractmethod
    def map_slots(self, session: Session, channel: Channel) -> list[Tensor]:
        """The sender's slots, uint8 [bucket_bytes] each. Takes the descriptors it needs out of `channel`.

        With streams: memory of this process for one bucket at a time, as many slots as the transport likes.

        Raises:
            ProtocolError: what came with the session is not a ring of this size.
        """

    def dial_stream(self) -> socket.socket:
        """Connect once more to the sender, for payload. Only for sessions with streams.

        Raises:
            ConnectionError: the sender is gone.
        """
        raise NotImplementedError(f"{type(self).__name__} has no streams")

    @property
    def generation(self) -> int:
        """Of the group that this end is in; 0 where there is none."""
        return 0

    def new_group(self, message: NewGroup, channel: Channel) -> None:
        """The sender has made a group for the sync that begins."""
        raise ProtocolError(f"{channel.peer} sent {message} on a transport without groups")

    def pull(self, slot: int, content: Tensor, waits: PayloadWaits) -> None:
        """Bring what the sender has put into a slot here. Nothing where receivers see the ring itself.

        Args:
            slot: Number of the slot.
            content: uint8 [used_bytes], this end's own slot of that number.
            waits: How to wait for it.
        """
        del slot, content, waits

    def map_segments(self, segments: Sequence[tuple[bytes, int]], channel: Channel) -> Sequence[Tensor]:
        """Map memory of the sender's, uint8 [size] each, in place of what was mapped before.

        Args:
            segments: The handle and the size of each, bytes.
            channel: Who sent them.

        Raises:
            ProtocolError: this transport has no such memory.
        """
        del segments
        raise ProtocolError(f"{channel.peer} offered memory to map on a transport where none can be")

    def leave_group(self) -> None:  # noqa: B027  # most transports have nothing to do here
        """The sync is off: forget what `new_group` made. Idempotent."""

    def release(self) -> None:  # noqa: B027  # most transports have nothing to do here
        """Let go of the slots; the connection they came with is closed. Idempotent."""

    def refresh(self, slot: int) -> bool:
        """Undo what this process itself has written to a slot; False if that cannot hide what the sender wrote."""
        del slot
        return False


class ConnectingReceive(ReceiveTransport):
    """Receiving end that connects a socket to its sender. Give it `connect`, `channel_of` and `map_slots`."""

    def __init__(self, config: SessionConfig) -> None:
        self._config = config

    @abstractmethod
    def connect(self) -> socket.socket | None:
        """A connection to the sender, or None while there is none."""

    @abstractmethod
    def channel_of(self, connection: socket.socket) -> Channel:
        """The control channel over a connection."""

    def dial(self) -> Channel | None:
        """Connect, if there is a sender."""
        connection = self.connect()
        return None if connection is None else self.channel_of(connection)

    def dial_stream(self) -> socket.socket:
        """Connect once more."""
        connection = self.connect()
        if connection is None:
            raise ConnectionRefusedError(f"nobody answers at {self._config.address}")
        return connection
