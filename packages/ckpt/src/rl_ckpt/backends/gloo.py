"""`gloo://host:port`: payload by broadcasts of torch.distributed, control over TCP as in `tcp://`.

For fabrics that gloo knows and for many receivers: a broadcast goes down a tree of them. The session has a group of its
own, which no call of torch.distributed in the process has anything to do with; it is made anew when others take part
than before, and after every sync that failed.

The peers prove to each other that they know the token. The connections of gloo and its store, which the sender serves
on a second port, are not authenticated: use a network that you trust.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_ckpt.receiver.receiver import Receiver
from rl_ckpt.sender.sender import Sender
from rl_ckpt.transports.base import checked_options
from rl_ckpt.transports.group import GroupReceive, GroupSend, require_gloo
from rl_ckpt.transports.tcp import Listener, channel_of, dial, token_of
from rl_ckpt.types import Role

if TYPE_CHECKING:
    from rl_ckpt.base import CheckpointEngine
    from rl_ckpt.types import SessionConfig


def open_session(config: SessionConfig) -> CheckpointEngine:
    """Return one end of a session over gloo.

    Raises:
        AddressError: the URL has no host and port, there is an option, or there is no token.
        BackendError: this torch has no gloo.
    """
    checked_options(config)
    require_gloo(config.address)
    token = token_of(config)
    if config.role is Role.SEND:
        return Sender(config, GroupSend(config, Listener, 0, token))
    return Receiver(config, GroupReceive(config, dial, channel_of, token))
