"""UNIX-socket connections of a session on one Linux host, in the abstract namespace, with kernel authentication.

An abstract name vanishes with the process that holds it, so that not even SIGKILL leaves anything behind.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from rl_ckpt.errors import AddressError, BackendError
from rl_ckpt.protocol.channel import Channel
from rl_ckpt.transports.base import ConnectingReceive, Listener, ListeningSend, require_name
from rl_csrc import ipc

if TYPE_CHECKING:
    import socket

    from torch import Tensor

    from rl_ckpt.types import SessionConfig


def require_linux(config: SessionConfig) -> None:
    """Raise `BackendError` on other systems than Linux."""
    if sys.platform != "linux":
        raise BackendError(f"{config.address} needs abstract sockets and SO_PEERCRED of Linux; this is {sys.platform}")


def _socket_name(config: SessionConfig) -> str:
    scheme, _, _ = config.address.partition("://")
    return f"rl-ckpt-{scheme}-{os.getuid()}-{config.name}"


class UnixListener(Listener):
    """Listening socket that holds the name of a session."""

    def __init__(self, config: SessionConfig) -> None:
        self.config = config
        try:
            self._socket = ipc.bind(_socket_name(config))
        except OSError as error:
            raise AddressError(
                f"{config.address} is taken by another sender; close it or choose another name"
            ) from error

    def accept(self) -> Channel | None:
        """Accept the next process of this user; connections of other users are closed."""
        while (found := ipc.accept(self._socket)) is not None:
            connection, credentials = found
            if credentials.is_same_user:
                return Channel(connection, f"receiver pid {credentials.pid}")
            connection.close()
        return None


class UnixSend(ListeningSend):
    """Sending side at an abstract name, for processes of this user. A subclass implements `allocate`."""

    listener = UnixListener

    def __init__(self, config: SessionConfig) -> None:
        require_linux(config)
        require_name(config)
        super().__init__(config)


class MemfdSend(UnixSend):
    """Sending side whose ring is in a memfd. A slot takes memory when it is first used."""

    num_slots = 32
    _memory: ipc.SharedMemory | None = None

    def allocate(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """Allocate the ring."""
        self._memory = ipc.SharedMemory.create(num_slots * bucket_bytes, name=f"rl-ckpt-{self._config.name}")
        return list(self._memory.map().split(bucket_bytes))

    def close(self) -> None:
        """Free the name; the memory goes when the last mapping of any process goes."""
        super().close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class UnixReceive(ConnectingReceive):
    """Receiving side of a `UnixSend`. A subclass implements `map_slots`."""

    def __init__(self, config: SessionConfig) -> None:
        require_linux(config)
        require_name(config)
        super().__init__(config)

    def connect(self) -> socket.socket | None:
        """Connect to the sender at that name without waiting; None if there is none yet.

        Raises:
            AddressError: a process of another user holds the name.
        """
        try:
            connection, _ = ipc.connect(_socket_name(self._config))
        except (ConnectionRefusedError, BlockingIOError):
            return None
        except PermissionError as error:
            raise AddressError(f"{self._config.address} is not for this user: {error.strerror}") from error
        return connection

    def channel_of(self, connection: socket.socket) -> Channel:
        """Control channel of a connection; the kernel gives the peer's process id."""
        return Channel(connection, f"sender pid {ipc.peer_credentials(connection).pid}")
