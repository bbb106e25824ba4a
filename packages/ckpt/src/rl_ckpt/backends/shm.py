"""`shm://name`: between processes of one Linux host and user, through a ring of slots in shared memory.

The name lives in the abstract namespace of UNIX sockets, the memory in descriptors that are passed over the socket.
Both vanish with the processes that hold them, so that not even SIGKILL leaves anything behind, on disk or in /dev/shm.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from rl_ckpt.errors import ProtocolError
from rl_ckpt.transports.base import Transport
from rl_ckpt.transports.unix import MemfdSend, UnixReceive
from rl_csrc.errors import ArgumentError
from rl_csrc.ipc import SharedMemory, discard_writes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from rl_ckpt.protocol.channel import Channel
    from rl_ckpt.protocol.messages import Session
    from rl_ckpt.types import SessionConfig


class ShmSend(MemfdSend):
    """Sending end, which shares the memory by its descriptor."""

    def descriptors(self) -> Sequence[int]:
        """The memory's."""
        return [] if self._memory is None else [self._memory.fd]


class ShmReceive(UnixReceive):
    """Receiving end, which maps the memory privately: what a consumer writes to a tensor, no other receiver sees."""

    def __init__(self, config: SessionConfig) -> None:
        super().__init__(config)
        self._slots: list[Tensor] = []

    def map_slots(self, session: Session, channel: Channel) -> list[Tensor]:
        """Map the memory whose descriptor came with the session."""
        if not channel.descriptors:
            raise ProtocolError(f"{channel.peer} shared its ring without a file descriptor")
        num_bytes = session.num_slots * session.bucket_bytes
        try:
            memory = SharedMemory.attach(channel.descriptors.pop(), nbytes=num_bytes)
        except ArgumentError as error:
            raise ProtocolError(f"{channel.peer} shared no sealed ring of {num_bytes} bytes: {error}") from error
        self._slots = list(memory.map(is_shared=False).split(session.bucket_bytes))
        memory.close()
        return self._slots

    def release(self) -> None:
        """Forget the mapping; it goes when the last tensor over it goes."""
        self._slots = []

    def refresh(self, slot: int) -> bool:
        """Drop this process's own pages of a slot, made where a consumer wrote to a tensor, and see the sender's."""
        if not self._slots or self._slots[slot].numel() % mmap.PAGESIZE:
            return False
        discard_writes(self._slots[slot])
        return True


class Backend(Transport):
    """Shared memory. It has no options."""

    ends = (ShmSend, ShmReceive)
