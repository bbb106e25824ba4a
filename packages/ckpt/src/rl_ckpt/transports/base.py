"""`Transport`, the plug-in interface of backends: it moves payload; rl-ckpt does handshake, votes, digests, deltas.

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
    from rl_csrc.ipc import Waker

BACKLOG = 128
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Transport:
    """Data plane of a URL scheme: a stateless factory of its ends, with an `__init__` without arguments.

    Ends raise `AddressError` for an invalid URL, and `BackendError` for what this machine lacks. They contact no peer
    yet.
    """

    ends: ClassVar[tuple[Callable[[SessionConfig], SendTransport], Callable[[SessionConfig], ReceiveTransport]]]
    """Classes of the sending and of the receiving end, for `sender` and `receiver`."""
    options: ClassVar[Mapping[str, str]] = {}
    """URL options (`?name=value`), with one line on each; `connect` refuses others. Read them by `config.option`."""
    capabilities: ClassVar[frozenset[Capability]] = frozenset(Capability)
    """All capabilities by default, as rl-ckpt implements them. A backend without the transaction declares its own."""

    def sender(self, config: SessionConfig) -> SendTransport:
        """The sending end of a session."""
        return self.ends[0](config)

    def receiver(self, config: SessionConfig) -> ReceiveTransport:
        """A receiving end of a session."""
        return self.ends[1](config)


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
    """Waits of a receiver for payload; each raises if the sync ends meanwhile."""

    def readable(self, descriptor: int) -> None:
        """Wait until a descriptor is readable."""
        ...

    def until_moved(self, waker: Waker, is_done: Callable[[], bool], num_bytes: Callable[[], int]) -> None:
        """Wait until the function returns True, asked again when the waker fires; bytes that move extend the wait."""
        ...

    def until(self, is_done: Callable[[], bool]) -> None:
        """Poll until the function returns True."""
        ...

    def ended(self) -> None:
        """Raise the reason why the sender ended the stream; never returns."""
        ...


class SendTransport(ABC):
    """Sending side of a transport: an address, and a ring of slots."""

    address: str
    """URL of the session."""
    bucket_bytes: int = 8 << 20
    """Default bucket size: large enough for few messages, small enough for low latency."""
    num_streams: int = 0
    """Payload connections per receiver; 0 if receivers map the ring."""
    num_slots: int = 4
    """Slots of the ring. With more than 4, buckets are announced several in a message as a sync grows."""
    is_direct: bool = False
    """Whether streams may be written directly from a tensor, because the kernel copies the bytes."""
    token: bytes | None = None
    """Secret that receivers must prove; None if the kernel authenticates them."""

    @property
    def file(self) -> int | None:
        """Descriptor of a file that is the ring's memory, whose pages streams lend to a socket; None: they copy."""
        return None

    @abstractmethod
    def open(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """Bind the address and allocate the ring: `num_slots` writable tensors, uint8 [bucket_bytes].

        Raises:
            AddressError: another sender has the address.
        """

    @abstractmethod
    def fileno(self) -> int:
        """Descriptor that becomes readable when a receiver connects."""

    @abstractmethod
    def accept(self) -> Channel | None:
        """Accept the next receiver, without waiting; None if there is none."""

    def descriptors(self) -> Sequence[int]:
        """File descriptors sent with the `Session` message."""
        return ()

    def memory(self) -> bytes:
        """Metadata for remote reads of the ring; sent with the `Session` message."""
        return b""

    def new_group(self, members: Sequence[tuple[int, int, Channel]]) -> Sequence[NewGroup]:
        """Create the process group of a sync's receivers, `(ticket, generation, channel)` each; a message for each.

        For transports that broadcast. `generation` is that of the receiver's present group.
        """
        del members
        return ()

    def publish(self, content: Tensor) -> None:
        """Start the broadcast of a bucket's payload, after its announcement."""
        del content

    def map_source(self, items: Sequence[tuple[str, Tensor]]) -> SourceMap | None:
        """Map of the tensors of a registered source that receivers can read in place; None if there are none."""
        del items
        return None

    def synchronize(self) -> None:  # noqa: B027  # most transports have nothing to do here
        """Wait until pending work on the source's device is complete."""

    def leave_group(self) -> None:  # noqa: B027  # most transports have nothing to do here
        """Leave the process group after an aborted sync. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Free the address and the ring. Idempotent."""


class Listener(ABC):
    """Non-blocking listening socket of a session, bound by its constructor to the address of the configuration."""

    config: SessionConfig
    """Session configuration, with the final address."""
    _socket: socket.socket

    def __init__(self, config: SessionConfig) -> None:
        self.config = config

    def listen(self) -> None:
        """Start listening."""
        self._socket.listen(BACKLOG)

    def fileno(self) -> int:
        """Descriptor that becomes readable when a receiver connects."""
        return self._socket.fileno()

    @abstractmethod
    def accept(self) -> Channel | None:
        """Accept the next connection; None if there is none."""

    def close(self) -> None:
        """Close the socket and free the address."""
        self._socket.close()


class ListeningSend(SendTransport):
    """Sending side with a listener; a subclass implements `allocate`."""

    listener: ClassVar[type[Listener]]
    """Class of the listener."""

    def __init__(self, config: SessionConfig) -> None:
        self.address = config.address
        self._config = config
        self._listener: Listener | None = None

    def open(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """Bind the address, allocate the ring, and only then listen, so that a receiver finds a complete session."""
        self._listener = listener = self.listener(self._config)
        self._config = listener.config
        self.address = listener.config.address
        slots = self.allocate(num_slots, bucket_bytes)
        listener.listen()
        return slots

    @abstractmethod
    def allocate(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """Allocate the ring: `num_slots` writable tensors, uint8 [bucket_bytes]."""

    def fileno(self) -> int:
        """Descriptor of the listening socket."""
        if self._listener is None:
            raise AddressError(f"{self.address} is not open")
        return self._listener.fileno()

    def accept(self) -> Channel | None:
        """Accept the next connection; None if there is none."""
        return None if self._listener is None else self._listener.accept()

    def close(self) -> None:
        """Free the address. Extend it to free the ring."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class ReceiveTransport(ABC):
    """Receiving side of a transport: connects to the sender and gives access to its ring."""

    token: bytes | None = None
    """Secret that the sender must prove; None if the kernel authenticates it."""
    is_sender_memory: bool = False
    """Whether slots are the sender's own memory, writable by a consumer."""

    @abstractmethod
    def dial(self) -> Channel | None:
        """Connect without waiting; None if there is no sender yet.

        Raises:
            AddressError: the process at that address belongs to another user.
        """

    @abstractmethod
    def map_slots(self, session: Session, channel: Channel) -> list[Tensor]:
        """Map the sender's slots, uint8 [bucket_bytes] each. Takes the descriptors it needs from `channel`.

        With streams: slots in memory of this process, any number of them.

        Raises:
            ProtocolError: the session's descriptors or metadata are not a ring of this size.
        """

    def dial_stream(self) -> socket.socket:
        """Open a payload connection to the sender. Only for sessions with streams.

        Raises:
            ConnectionError: the sender is gone.
        """
        raise NotImplementedError(f"{type(self).__name__} has no streams")

    @property
    def generation(self) -> int:
        """Generation of this end's process group; 0: none."""
        return 0

    def new_group(self, message: NewGroup, channel: Channel) -> None:
        """Join the process group that the sender created for the sync."""
        raise ProtocolError(f"{channel.peer} sent {message} on a transport without groups")

    def pull(self, slot: int, content: Tensor, waits: PayloadWaits) -> None:
        """Read the content of a slot from the sender. A no-op if receivers map the ring.

        Args:
            slot: Number of the slot.
            content: uint8 [used_bytes], this end's slot with that number.
            waits: Waits that raise if the sync ends.
        """
        del slot, content, waits

    def map_segments(self, segments: Sequence[tuple[bytes, int]], channel: Channel) -> Sequence[Tensor]:
        """Map segments of the sender's memory, uint8 [size] each, in place of earlier ones.

        Args:
            segments: (handle, size in bytes) of each.
            channel: Channel that they came from.

        Raises:
            ProtocolError: this transport cannot map memory.
        """
        del segments
        raise ProtocolError(f"{channel.peer} offered memory to map on a transport where none can be")

    def leave_group(self) -> None:  # noqa: B027  # most transports have nothing to do here
        """Leave the process group after an aborted sync. Idempotent."""

    def release(self) -> None:  # noqa: B027  # most transports have nothing to do here
        """Release the slots after the connection was closed. Idempotent."""

    def refresh(self, slot: int) -> bool:
        """Discard this process's private writes to a slot; False if there can be none."""
        del slot
        return False


class ConnectingReceive(ReceiveTransport):
    """Receiving side over a socket; a subclass implements `connect`, `channel_of` and `map_slots`."""

    def __init__(self, config: SessionConfig) -> None:
        self._config = config

    @abstractmethod
    def connect(self) -> socket.socket | None:
        """Connection to the sender; None if there is none yet."""

    @abstractmethod
    def channel_of(self, connection: socket.socket) -> Channel:
        """Control channel over a connection."""

    def dial(self) -> Channel | None:
        """Connect if there is a sender."""
        connection = self.connect()
        return None if connection is None else self.channel_of(connection)

    def dial_stream(self) -> socket.socket:
        """Open a payload connection."""
        connection = self.connect()
        if connection is None:
            raise ConnectionRefusedError(f"no process answers at {self._config.address}")
        return connection
