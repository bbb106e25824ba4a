"""`uds://name`: between processes of one Linux host and user, over UNIX stream sockets.

For where two containers share no memory, but the network namespace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rl_ckpt.transports.base import Transport
from rl_ckpt.transports.streams import StreamReceive, StreamSend
from rl_ckpt.transports.unix import UnixReceive, UnixSend
from rl_csrc.ipc import SharedMemory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from rl_ckpt.types import SessionConfig


class Backend(Transport):
    """UNIX streams."""

    options: ClassVar[Mapping[str, str]] = {"streams": "connections for payload, 1 (default) to 64"}

    def sender(self, config: SessionConfig) -> UdsSend:
        """The sending end; raises `AddressError` for a bad name, `BackendError` elsewhere than Linux."""
        return UdsSend(config)

    def receiver(self, config: SessionConfig) -> UdsReceive:
        """A receiving end; raises as `sender` does."""
        return UdsReceive(config)


class UdsSend(StreamSend, UnixSend):
    """Sending end with its ring in a memfd, whose pages the kernel lends to the receiver's socket without a copy."""

    is_direct = False
    _memory: SharedMemory | None = None

    def allocate(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """The ring."""
        self._memory = SharedMemory.create(num_slots * bucket_bytes, name=f"rl-ckpt-{self._config.name}")
        return list(self._memory.map().split(bucket_bytes))

    @property
    def file(self) -> int | None:
        """Descriptor of the memfd."""
        return None if self._memory is None else self._memory.fd

    def close(self) -> None:
        """Give name and memory back."""
        super().close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class UdsReceive(StreamReceive, UnixReceive):
    """Receiving end."""
