"""Messages on a UNIX stream socket: length and whether a file descriptor comes along (8 bytes), then JSON.

Tensors never pass here. A message carries one descriptor at most, so that one which the kernel drops (the receiver
has none left) can be told from the next.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADER = struct.Struct("<II")
_MAX_MESSAGE_BYTES = 1 << 30
_SEND_FLAGS = socket.MSG_NOSIGNAL


def pack(message: dict[str, Any], *, has_fd: bool = False) -> bytes:
    """One message as bytes. Send its first byte with the descriptor, if it has one."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _HEADER.pack(len(body), has_fd) + body


def send_some(connection: socket.socket, data: memoryview, fd: int | None) -> int:
    """Send what fits and return how many bytes that was; the descriptor goes with the first."""
    if fd is None:
        return connection.send(data, _SEND_FLAGS)
    return socket.send_fds(connection, [data], [fd], _SEND_FLAGS)


class Inbox:
    """Turns what a socket delivers into messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()
        self._fds: deque[int | None] = deque()

    def receive(self) -> Iterator[tuple[dict[str, Any], int | None]]:
        """Read once, and yield every message that is whole now, with its descriptor; None where it has or got none.

        Raises:
            ConnectionError: the other side closed, or sent what is no message.
        """
        flags = socket.MSG_CMSG_CLOEXEC
        data, fds, answered, _ = socket.recv_fds(self._connection, 1 << 18, 1, flags)
        if not data:
            raise ConnectionResetError("the other side closed the connection")
        self._fds.extend(fds)
        if answered & socket.MSG_CTRUNC and not fds:
            self._fds.append(None)
        self._buffer += data
        return self._whole()

    def close(self) -> None:
        """Close the descriptors that no message claimed."""
        while self._fds:
            fd = self._fds.popleft()
            if fd is not None:
                os.close(fd)

    def _whole(self) -> Iterator[tuple[dict[str, Any], int | None]]:
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            length, has_fd = _HEADER.unpack_from(self._buffer, start)
            if length > _MAX_MESSAGE_BYTES or has_fd > 1:
                raise ConnectionAbortedError(f"the other side sent a header of {length} bytes and {has_fd} descriptors")
            end = start + _HEADER.size + length
            if end > len(self._buffer):
                break
            body = bytes(self._buffer[start + _HEADER.size : end])
            start = end
            message = json.loads(body)
            if not isinstance(message, dict):
                raise ConnectionAbortedError("the other side sent JSON that is no object")
            yield cast("dict[str, Any]", message), self._fds.popleft() if has_fd else None
        del self._buffer[:start]


def peer(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other side, as the kernel knows them."""
    pid, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


_OPEN: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_HOOKED: list[bool] = []


def close_after_fork(connection: socket.socket) -> None:
    """Have children of this process close their copy of a socket: one that lives on would hide this process's death."""
    _OPEN.add(connection)
    if not _HOOKED:
        _HOOKED.append(True)
        os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for connection in list(_OPEN):
        connection.close()
