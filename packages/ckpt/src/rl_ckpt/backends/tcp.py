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


class TcpStreamSend(StreamSend, TcpSend):
    """Sending end."""


class TcpStreamReceive(StreamReceive, TcpReceive):
    """Receiving end."""


class Backend(Transport):
    """TCP streams."""

    options: ClassVar[Mapping[str, str]] = {"streams": "connections for payload, 1 (default) to 64"}
    ends = (TcpStreamSend, TcpStreamReceive)
