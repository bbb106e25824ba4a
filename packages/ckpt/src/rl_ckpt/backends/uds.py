"""`uds://name`: between processes of one Linux machine and one user, over UNIX stream sockets.

For where two containers share no memory, but the network namespace. `?streams=N` opens N connections for payload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_ckpt._receiver import Receiver
from rl_ckpt._sender import Sender
from rl_ckpt._stream import StreamReceive, StreamSend, stream_count
from rl_ckpt._transport import checked_name
from rl_ckpt._unix import UnixListener, dial, link_of, require_linux
from rl_ckpt.types import Role

if TYPE_CHECKING:
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
        return Sender(config, StreamSend(config, UnixListener, num_streams, None))
    return Receiver(config, StreamReceive(config, dial, link_of, None))
