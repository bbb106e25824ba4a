"""`shm://name`: between processes of one Linux machine and one user, through a ring of slots in a memfd.

The name lives in the abstract namespace of UNIX sockets, the memory in descriptors that are passed over the socket.
Both vanish with the processes that hold them, so that not even SIGKILL leaves anything behind, on disk or in /dev/shm.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import TYPE_CHECKING

from rl_ckpt.errors import ProtocolError
from rl_ckpt.receiver.receiver import Receiver
from rl_ckpt.sender.sender import Sender
from rl_ckpt.transports.base import ListeningSend, ReceiveTransport, checked_name
from rl_ckpt.transports.unix import UnixListener, channel_of, cut, dial, make_ring, require_linux
from rl_ckpt.types import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from rl_ckpt.base import CheckpointEngine
    from rl_ckpt.protocol.channel import Channel
    from rl_ckpt.protocol.messages import Session
    from rl_ckpt.types import SessionConfig


def open_session(config: SessionConfig) -> CheckpointEngine:
    """Return one end of a session over shared memory.

    Raises:
        AddressError: the name has characters that are not allowed.
        BackendError: this is not Linux.
    """
    require_linux(config)
    checked_name(config)
    if config.role is Role.SEND:
        return Sender(config, ShmSend(config))
    return Receiver(config, ShmReceive(config))


class ShmSend(ListeningSend):
    """Listens under the name and owns the memfd."""

    def __init__(self, config: SessionConfig) -> None:
        self.address = config.address
        self._config = config
        self._memory = -1

    def open(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """Bind, allocate, map, listen: who reaches this end finds it whole."""
        self._listener = UnixListener(self._config)
        self._memory, slots = make_ring(self._config.name, num_slots, bucket_bytes)
        self._listener.listen()
        return slots

    def descriptors(self) -> Sequence[int]:
        """The memfd."""
        return [self._memory]

    def close(self) -> None:
        """Free the name; the memory goes when the last mapping of any process goes."""
        super().close()
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


class ShmReceive(ReceiveTransport):
    """Dials the name and maps the memfd."""

    def __init__(self, config: SessionConfig) -> None:
        self._config = config
        self._memory: mmap.mmap | None = None
        self._bucket_bytes = 0

    def dial(self) -> Channel | None:
        """Connect, if there is a sender; raises `AddressError` if it belongs to another user."""
        connection = dial(self._config)
        return None if connection is None else channel_of(connection)

    def map_slots(self, session: Session, channel: Channel) -> list[Tensor]:
        """Map the memfd that came with the session.

        The mapping is private, so that a consumer that writes to a tensor it was handed spoils no other receiver's.
        """
        if not channel.descriptors:
            raise ProtocolError(f"{channel.peer} shared its ring without a file descriptor")
        descriptor = channel.descriptors.pop()
        num_bytes = session.num_slots * session.bucket_bytes
        try:
            is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not is_sealed or num_bytes == 0 or os.fstat(descriptor).st_size != num_bytes:
                raise ProtocolError(f"{channel.peer} shared a file that is no sealed ring of {num_bytes} bytes")
            memory = mmap.mmap(descriptor, num_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(descriptor)
        self._memory, self._bucket_bytes = memory, session.bucket_bytes
        return cut(memory, session.num_slots, session.bucket_bytes)

    def release(self) -> None:
        """Forget the mapping; it goes when the last tensor over it goes."""
        self._memory = None

    def refresh(self, slot: int) -> bool:
        """Drop this process's own pages of a slot, made where a consumer wrote to a tensor, and see the sender's."""
        if self._memory is None or self._bucket_bytes % mmap.PAGESIZE:
            return False
        self._memory.madvise(mmap.MADV_DONTNEED, slot * self._bucket_bytes, self._bucket_bytes)
        return True
