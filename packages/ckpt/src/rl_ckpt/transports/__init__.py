"""Public seam of a backend: a `Transport` moves payload, and rl-ckpt does the rest of the protocol over it.

Start from `UnixSend` and `UnixReceive` (processes of one host) or `TcpSend` and `TcpReceive` (machines): they have the
control connection, and lack only memory for buckets. See docs/packages/ckpt/transports.md.
"""

from rl_ckpt.protocol.channel import Channel
from rl_ckpt.protocol.messages import Session
from rl_ckpt.transports.base import PayloadWaits, ReceiveTransport, SendTransport, Transport
from rl_ckpt.transports.tcp import TcpReceive, TcpSend
from rl_ckpt.transports.unix import UnixReceive, UnixSend

__all__ = [
    "Channel",
    "PayloadWaits",
    "ReceiveTransport",
    "SendTransport",
    "Session",
    "TcpReceive",
    "TcpSend",
    "Transport",
    "UnixReceive",
    "UnixSend",
]
