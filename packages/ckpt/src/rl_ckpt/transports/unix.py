"""Meeting on one Linux machine: sockets in the abstract namespace, whose other end the kernel vouches for.

Such a name vanishes with the process that holds it, so that not even SIGKILL leaves anything behind.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import sys
from typing import TYPE_CHECKING

from rl_ckpt.errors import AddressError, BackendError
from rl_ckpt.protocol.channel import Channel, close_in_children
from rl_ckpt.tensors.spec import buffer_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from rl_ckpt.types import SessionConfig

BACKLOG = 128
_CREDENTIALS = struct.Struct("iII")
"""pid, uid, gid of SO_PEERCRED."""


def require_linux(config: SessionConfig) -> None:
    """Raise `BackendError` elsewhere."""
    if sys.platform != "linux":
        raise BackendError(f"{config.address} needs abstract sockets and SO_PEERCRED of Linux; this is {sys.platform}")


def _socket_name(config: SessionConfig) -> str:
    scheme, _, _ = config.address.partition("://")
    return f"\0rl-ckpt-{scheme}-{os.getuid()}-{config.name}"


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """The (pid, uid) of the process at the other end, by the kernel's word."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


class UnixListener:
    """Holds the name of a session."""

    def __init__(self, config: SessionConfig) -> None:
        self._socket = close_in_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            self._socket.bind(_socket_name(config))
        except OSError as error:
            self._socket.close()
            raise AddressError(
                f"{config.address} is taken by another sender; close it or choose another name"
            ) from error
        self._socket.setblocking(False)

    def listen(self) -> None:
        """Answer who dials from now on."""
        self._socket.listen(BACKLOG)

    def fileno(self) -> int:
        """Becomes readable when somebody dials."""
        return self._socket.fileno()

    def accept(self) -> Channel | None:
        """The next process of this user that dialled; one of another user is turned away."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return None
            pid, uid = _credentials(connection)
            if uid == os.getuid():
                return Channel(connection, f"receiver pid {pid}")
            connection.close()

    def close(self) -> None:
        """Give the name back."""
        self._socket.close()


def dial(config: SessionConfig) -> socket.socket | None:
    """Connect to the sender of that name without waiting; None while there is none.

    Raises:
        AddressError: a process of another user holds the name.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(_socket_name(config))
    except (ConnectionRefusedError, BlockingIOError):
        connection.close()
        return None
    pid, uid = _credentials(connection)
    if uid != os.getuid():
        connection.close()
        raise AddressError(f"{config.address} is held by pid {pid} of user {uid}, and this is user {os.getuid()}")
    return connection


def channel_of(connection: socket.socket) -> Channel:
    """The link of a connection that `dial` made."""
    return Channel(connection, f"sender pid {_credentials(connection)[0]}")


def make_ring(name: str, num_slots: int, bucket_bytes: int) -> tuple[int, list[Tensor]]:
    """Its descriptor, owned by the caller and sealed against resizing, and its slots, mapped and shared."""
    descriptor = os.memfd_create(f"rl-ckpt-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_slots * bucket_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor, cut(mmap.mmap(descriptor, num_slots * bucket_bytes, mmap.MAP_SHARED), num_slots, bucket_bytes)


def cut(memory: mmap.mmap, num_slots: int, bucket_bytes: int) -> list[Tensor]:
    """The slots, uint8 [bucket_bytes] each; they keep the mapping alive."""
    return [buffer_tensor(memory, offset=slot * bucket_bytes, num_bytes=bucket_bytes) for slot in range(num_slots)]
