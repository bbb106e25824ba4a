"""`tcp://host:port`: between machines. Peers prove to each other that they know the token; payload is not encrypted.

The sender listens on `host:port`; port 0 takes a free one, and `address` says which after `prepare`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rl_ckpt.transports.base import Transport
from rl_ckpt.transports.streams import StreamReceive, StreamSend
from rl_ckpt.transports.tcp import TcpReceive, TcpSend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_ckpt.types import SessionConfig


class Backend(Transport):
    """TCP streams."""

    options: ClassVar[Mapping[str, str]] = {"streams": "connections for payload, 1 (default) to 64"}

    def sender(self, config: SessionConfig) -> TcpStreamSend:
        """The sending end; raises `AddressError` without a token, or without host and port."""
        return TcpStreamSend(config)

    def receiver(self, config: SessionConfig) -> TcpStreamReceive:
        """A receiving end; raises as `sender` does."""
        return TcpStreamReceive(config)


class TcpStreamSend(StreamSend, TcpSend):
    """Sending end."""


class TcpStreamReceive(StreamReceive, TcpReceive):
    """Receiving end."""
