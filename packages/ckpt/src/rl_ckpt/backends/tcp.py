"""`tcp://host:port`: between machines. Peers prove to each other that they know the token; payload is not encrypted.

The sender listens on `host:port`; port 0 takes a free one, and `address` says which after `prepare`. `?streams=N` opens
N connections for payload, for links that one connection does not fill.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_ckpt.receiver.receiver import Receiver
from rl_ckpt.sender.sender import Sender
from rl_ckpt.transports.base import checked_options
from rl_ckpt.transports.streams import StreamReceive, stream_count
from rl_ckpt.transports.tcp import Listener, TcpSend, channel_of, dial, token_of
from rl_ckpt.types import Role

if TYPE_CHECKING:
    from rl_ckpt.base import CheckpointEngine
    from rl_ckpt.types import SessionConfig


def open_session(config: SessionConfig) -> CheckpointEngine:
    """Return one end of a session over TCP.

    Raises:
        AddressError: the URL has no host and port, an option is not allowed, or there is no token.
    """
    num_streams = stream_count(checked_options(config, "streams"), config, default=1)
    token = token_of(config)
    if config.role is Role.SEND:
        return Sender(config, TcpSend(config, Listener, num_streams, token))
    return Receiver(config, StreamReceive(config, dial, channel_of, token))
