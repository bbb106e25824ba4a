"""Message framing on sockets, and the limits of a server per peer.

TCP: a header of 16 bytes, the message, and a payload of raw bytes. UNIX socket: a header of 8 bytes with the length and
whether a file descriptor is attached, then the message; tensors are never sent there. A message has at most one
descriptor, so that one dropped by the kernel (the receiver has no free slot) is not mistaken for the next.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from rl_csrc import ipc
from rl_csrc.ipc import limit_sends
from rl_tq.errors import AddressError
from rl_tq.memory.pool import new_memory
from rl_tq.protocol.codec import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

MAX_REPLY_BYTES = 1 << 30
"""Largest reply, from a server that has proved the token."""
MAX_MESSAGE_BYTES = 64 << 20
"""Largest request, without the values, which are the payload."""
Payload: TypeAlias = "list[torch.Tensor]"
"""Payload of a message: uint8 tensors, concatenated on the wire."""
Place: TypeAlias = "Callable[[dict[str, Any], int], torch.Tensor | None]"
"""Callback `place(message, n)` that returns memory for a payload, uint8 [n]; None: new memory is allocated."""
ALIGNMENT = 64
"""Alignment of columns in a payload, bytes."""
HEADER = struct.Struct("<4sIQ")
MAGIC = b"RLTQ"
_CHUNK_BYTES = 1 << 16
_DEAD_S = 30
"""Seconds without an answer after which a peer's host counts as dead."""


def prepare(connection: socket.socket, timeout_s: float) -> None:
    """Set the options of a TCP socket: no delay, a deadline for sends, and keep-alive probes that find a dead host."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 5),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_KEEPCNT, 5),
        (socket.TCP_USER_TIMEOUT, 1000 * _DEAD_S),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    limit_sends(connection, timeout_s)


def encode_request(message: dict[str, Any]) -> bytes:
    """Encode a request.

    Raises:
        ValueError: it is longer than a server accepts.
    """
    text = encode(message)
    if len(text) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"this {message.get('op')!r} has {len(text)} bytes of names, tags and row numbers, and a server takes "
            f"{MAX_MESSAGE_BYTES}: use fewer rows at once"
        )
    return text


def send(connection: socket.socket, text: bytes, payload: Sequence[torch.Tensor] = ()) -> None:
    """Send one encoded message and its payload."""
    nbytes = sum(len(part) for part in payload)
    head = HEADER.pack(MAGIC, len(text), nbytes) + text
    if not nbytes:
        connection.sendall(head)
        return
    connection.sendall(head, socket.MSG_MORE)
    for part in payload:
        connection.sendall(part.numpy().data)


def receive(
    connection: socket.socket,
    place: Place | None = None,
    *,
    max_text_bytes: int = MAX_REPLY_BYTES,
    max_payload_bytes: int = 1 << 40,
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Receive one message and its payload, uint8 [n], into what `place(message, n)` gives, or into new memory.

    Lengths in a header are not trusted: memory for the message grows with what has arrived, and that of the payload is
    allocated page by page as it is written.

    Raises:
        ConnectionError: the peer closed, violates the protocol, or announces more than the limits.
    """
    head = bytearray(HEADER.size)
    _fill(connection, memoryview(head))
    magic, text_bytes, payload_bytes = HEADER.unpack(head)
    if magic != MAGIC or text_bytes > max_text_bytes or payload_bytes > max_payload_bytes:
        raise ConnectionAbortedError(
            f"the other side sent {bytes(head)!r}, which begins no message of rl-tq of at most {max_text_bytes} bytes "
            f"and a payload of at most {max_payload_bytes}"
        )
    message = decode(_receive_text(connection, text_bytes))
    if not payload_bytes:
        return message, None
    payload = place(message, payload_bytes) if place is not None else None
    if payload is None:
        payload = new_memory(payload_bytes)
    _fill(connection, payload.numpy().data)
    return message, payload


def _receive_text(connection: socket.socket, nbytes: int) -> bytearray:
    """Receive `nbytes`, using at most twice the memory of what has arrived."""
    text = bytearray(min(nbytes, _CHUNK_BYTES))
    start = 0
    while True:
        with memoryview(text) as view:
            _fill(connection, view[start:])
        start = len(text)
        if start == nbytes:
            return text
        text.extend(bytes(min(nbytes - start, start)))


def _fill(connection: socket.socket, target: memoryview) -> None:
    while target:
        size = connection.recv_into(target)
        if not size:
            raise ConnectionResetError("the other side closed the connection")
        target = target[size:]


def _quarter_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a server per peer host. Memory is allocated as bytes arrive, not as a header announces them."""

    connections: int = 1024
    """Most authenticated connections of one peer host."""
    unauthenticated: int = 64
    """Most unauthenticated connections of one peer host: beyond that, the oldest is closed."""
    payload_bytes: int = field(default_factory=_quarter_of_memory)
    """Most bytes of values in one put; and, per connection, in puts that wait for room and in unsent replies.
    Default: a quarter of the host's memory."""

    @classmethod
    def from_options(cls, max_connections: str | None = None, max_put_bytes: str | None = None) -> Limits:
        """Limits from the options of an address.

        Raises:
            AddressError: an option is not a positive number.
        """
        given: dict[str, int] = {}
        for name, option, value in (
            ("connections", "max_connections", max_connections),
            ("payload_bytes", "max_put_bytes", max_put_bytes),
        ):
            if value is None:
                continue
            if not value.isdecimal() or not int(value):
                raise AddressError(f"{option} is {value!r}: write a positive number, for example {option}=1024")
            given[name] = int(value)
        return cls(**given)


_UNIX_HEADER = struct.Struct("<II")
_MAX_UNIX_BYTES = 1 << 30
# As plain integers: the arithmetic of enumerations takes longer than the call.
_SEND_FLAGS = int(socket.MSG_NOSIGNAL)


def pack(message: dict[str, Any], *, has_fd: bool = False) -> bytes:
    """Encode a message for a UNIX socket. A descriptor must be sent with its first byte."""
    body = encode(message)
    return _UNIX_HEADER.pack(len(body), has_fd) + body


def send_some(connection: socket.socket, data: bytes | memoryview, fd: int | None) -> int:
    """Send as much as fits and return the byte count; the descriptor is attached to the first byte."""
    if fd is None:
        return connection.send(data, _SEND_FLAGS)
    return socket.send_fds(connection, [data], [fd], _SEND_FLAGS)


class Inbox:
    """Receive buffer of a UNIX socket: assembles messages and their descriptors."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._chunk = memoryview(bytearray(1 << 16))
        self._buffer = bytearray()
        self._fds: deque[int | None] = deque()

    def receive(self) -> list[tuple[dict[str, Any], int | None]]:
        """Read once, and return complete messages with their descriptors; None: no descriptor, or it was dropped.

        Raises:
            ConnectionError: the peer closed, or violates the protocol.
        """
        size, fds, is_lost = ipc.receive_into(self._connection, self._chunk)
        if not size:
            raise ConnectionResetError("the other side closed the connection")
        if fds or is_lost:
            self._fds.extend(fds or [None])
        if not self._buffer and size >= _UNIX_HEADER.size:
            length, has_fd = _UNIX_HEADER.unpack_from(self._chunk)
            if size == _UNIX_HEADER.size + length and not has_fd:  # fast path: exactly one message
                return [(decode(self._chunk[_UNIX_HEADER.size : size]), None)]
        self._buffer += self._chunk[:size]
        return self._whole()

    def close(self) -> None:
        """Close descriptors that belong to no complete message."""
        while self._fds:
            fd = self._fds.popleft()
            if fd is not None:
                os.close(fd)

    def _whole(self) -> list[tuple[dict[str, Any], int | None]]:
        found: list[tuple[dict[str, Any], int | None]] = []
        start = 0
        while len(self._buffer) - start >= _UNIX_HEADER.size:
            length, has_fd = _UNIX_HEADER.unpack_from(self._buffer, start)
            if length > _MAX_UNIX_BYTES or has_fd > 1:
                raise ConnectionAbortedError(f"the other side sent a header of {length} bytes and {has_fd} descriptors")
            end = start + _UNIX_HEADER.size + length
            if end > len(self._buffer):
                break
            message = decode(self._buffer[start + _UNIX_HEADER.size : end])
            start = end
            if has_fd and not self._fds:
                raise ConnectionAbortedError("the other side announced a descriptor, and sent none")
            found.append((message, self._fds.popleft() if has_fd else None))
        del self._buffer[:start]
        return found


def socket_name(address: str) -> str:
    """Abstract socket name of a queue: not in the file system, and gone when the server ends.

    Raises:
        AddressError: the name is too long.
    """
    name = f"rl-tq/{address.removeprefix('shm://')}"
    if len(name.encode()) > 106:
        raise AddressError(f"the name of {address} has {len(name.encode()) - 6} bytes; at most 100 are possible")
    return name


def listen(address: str, name: str) -> socket.socket:
    """Socket that listens for clients of a queue at an abstract name.

    Raises:
        AddressError: the name is taken, or cannot be bound.
    """
    try:
        listener = ipc.bind(name)
    except OSError as error:
        raise AddressError(
            f"{address} cannot be served: {error.strerror}; take another name, or close that queue"
        ) from error
    listener.listen(128)
    return listener
