"""Messages on a UNIX stream socket: length and whether a file descriptor comes along (8 bytes), then the message.

Tensors never pass here. A message carries one descriptor at most, so that one which the kernel drops (the receiver
has none left) can be told from the next.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from typing import Any

from rl_csrc import ipc
from rl_tq.errors import AddressError
from rl_tq.protocol.codec import decode, encode

_HEADER = struct.Struct("<II")
_MAX_MESSAGE_BYTES = 1 << 30
# As plain integers: the arithmetic of enumerations takes longer than the call.
_SEND_FLAGS = int(socket.MSG_NOSIGNAL)


def pack(message: dict[str, Any], *, has_fd: bool = False) -> bytes:
    """One message as bytes. Send its first byte with the descriptor, if it has one."""
    body = encode(message)
    return _HEADER.pack(len(body), has_fd) + body


def send_some(connection: socket.socket, data: bytes | memoryview, fd: int | None) -> int:
    """Send what fits and return how many bytes that was; the descriptor goes with the first."""
    if fd is None:
        return connection.send(data, _SEND_FLAGS)
    return socket.send_fds(connection, [data], [fd], _SEND_FLAGS)


class Inbox:
    """Turns what a socket delivers into messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._chunk = memoryview(bytearray(1 << 16))
        self._buffer = bytearray()
        self._fds: deque[int | None] = deque()

    def receive(self) -> list[tuple[dict[str, Any], int | None]]:
        """Read once, and return every message that is whole now, with its descriptor; None where it has or got none.

        Raises:
            ConnectionError: the other side closed, or sent what is no message.
        """
        size, fds, is_lost = ipc.receive_into(self._connection, self._chunk)
        if not size:
            raise ConnectionResetError("the other side closed the connection")
        self._fds.extend(fds)
        if is_lost and not fds:
            self._fds.append(None)
        if not self._buffer and size >= _HEADER.size:
            length, has_fd = _HEADER.unpack_from(self._chunk)
            if size == _HEADER.size + length and not has_fd:  # one whole message, as most often
                return [(decode(self._chunk[_HEADER.size : size]), None)]
        self._buffer += self._chunk[:size]
        return self._whole()

    def close(self) -> None:
        """Close the descriptors that no message claimed."""
        while self._fds:
            fd = self._fds.popleft()
            if fd is not None:
                os.close(fd)

    def _whole(self) -> list[tuple[dict[str, Any], int | None]]:
        found: list[tuple[dict[str, Any], int | None]] = []
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            length, has_fd = _HEADER.unpack_from(self._buffer, start)
            if length > _MAX_MESSAGE_BYTES or has_fd > 1:
                raise ConnectionAbortedError(f"the other side sent a header of {length} bytes and {has_fd} descriptors")
            end = start + _HEADER.size + length
            if end > len(self._buffer):
                break
            message = decode(self._buffer[start + _HEADER.size : end])
            start = end
            if has_fd and not self._fds:
                raise ConnectionAbortedError("the other side announced a descriptor, and sent none")
            found.append((message, self._fds.popleft() if has_fd else None))
        del self._buffer[:start]
        return found


def socket_name(address: str) -> str:
    """The abstract name of a queue's socket. It is the kernel's: it vanishes with the server, and no file has it.

    Raises:
        AddressError: the name is too long.
    """
    name = f"rl-tq/{address.removeprefix('shm://')}"
    if len(name.encode()) > 106:
        raise AddressError(f"the name of {address} has {len(name.encode()) - 6} bytes; at most 100 are possible")
    return name


def listen(address: str, name: str) -> socket.socket:
    """A socket that listens at an abstract name for the clients of a queue.

    Raises:
        AddressError: it cannot.
    """
    try:
        listener = ipc.bind(name)
    except OSError as error:
        raise AddressError(
            f"{address} cannot be served: {error.strerror}; take another name, or close that queue"
        ) from error
    listener.listen(128)
    return listener
