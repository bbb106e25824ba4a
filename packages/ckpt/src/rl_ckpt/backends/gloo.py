"""`gloo://host:port`: payload by broadcasts of torch.distributed, control over TCP as in `tcp://`.

For fabrics that gloo knows and for many receivers: a broadcast goes down a tree of them. The session has a group of its
own, which no call of torch.distributed in the process has anything to do with; it is made anew when others take part
than before, and after every sync that failed.

The peers prove to each other that they know the token. The connections of gloo and its store, which the sender serves
on a second port, are not authenticated: use a network that you trust.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_ckpt.transports.base import Transport
from rl_ckpt.transports.group import GroupReceive, GroupSend, require_gloo

if TYPE_CHECKING:
    from rl_ckpt.types import SessionConfig


class Backend(Transport):
    """Broadcasts of torch.distributed between CPUs. It has no options."""

    def sender(self, config: SessionConfig) -> GroupSend:
        """The sending end; raises `AddressError` as `tcp://` does, and `BackendError` where this torch has no gloo."""
        require_gloo(config.address)
        return GroupSend(config)

    def receiver(self, config: SessionConfig) -> GroupReceive:
        """A receiving end; raises as `sender` does."""
        require_gloo(config.address)
        return GroupReceive(config)
