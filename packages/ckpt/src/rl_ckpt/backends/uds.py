"""`uds://name`: between processes of one Linux host and user, over UNIX stream sockets.

For where two containers share no memory, but the network namespace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rl_ckpt.transports.base import Transport
from rl_ckpt.transports.streams import StreamReceive, StreamSend
from rl_ckpt.transports.unix import MemfdSend, UnixReceive

if TYPE_CHECKING:
    from collections.abc import Mapping


class UdsSend(MemfdSend, StreamSend):
    """Sending end with its ring in a memfd, whose pages the kernel lends to the receiver's socket without a copy."""

    is_direct = False

    @property
    def file(self) -> int | None:
        """Descriptor of the memfd."""
        return None if self._memory is None else self._memory.fd


class UdsReceive(StreamReceive, UnixReceive):
    """Receiving end."""


class Backend(Transport):
    """UNIX streams."""

    options: ClassVar[Mapping[str, str]] = {"streams": "connections for payload, 1 (default) to 64"}
    ends = (UdsSend, UdsReceive)
