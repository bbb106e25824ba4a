"""`uds://name`: between processes of one Linux machine and one user, over UNIX stream sockets.

For where two containers share no memory, but the network namespace. `?streams=N` opens N connections for payload.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rl_ckpt.receiver.receiver import Receiver
from rl_ckpt.sender.sender import Sender
from rl_ckpt.transports.base import checked_name
from rl_ckpt.transports.streams import StreamReceive, StreamSend, stream_count
from rl_ckpt.transports.unix import UnixListener, channel_of, dial, make_ring, require_linux
from rl_ckpt.types import Role

if TYPE_CHECKING:
    import socket

    from torch import Tensor

    from rl_ckpt.base import CheckpointEngine
    from rl_ckpt.types import SessionConfig


def open_session(config: SessionConfig) -> CheckpointEngine:
    """Return one end of a session over UNIX sockets.

    Raises:
        AddressError: the name or an option is not allowed.
        BackendError: this is not Linux.
    """
    require_linux(config)
    num_streams = stream_count(checked_name(config, "streams"), config, default=1)
    if config.role is Role.SEND:
        return Sender(config, UdsSend(config, UnixListener, num_streams, None))
    return Receiver(config, StreamReceive(config, dial, channel_of, None))


class UdsSend(StreamSend):
    """Owns a ring in a memfd, whose pages the kernel lends to the receiver's socket instead of copying them."""

    is_direct = False
    _memory = -1
    _bucket_bytes = 0

    def allocate(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """The ring."""
        self._bucket_bytes = bucket_bytes
        self._memory, slots = make_ring(self._config.name, num_slots, bucket_bytes)
        return slots

    def write(self, connection: socket.socket, slot: int, start: int, end: int) -> int:
        """Lend the pages."""
        return os.sendfile(connection.fileno(), self._memory, slot * self._bucket_bytes + start, end - start)

    def close(self) -> None:
        """Give name and memory back."""
        super().close()
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1
