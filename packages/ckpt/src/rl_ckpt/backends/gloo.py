"""`gloo://host:port`: payload by broadcasts of torch.distributed, control over TCP as in `tcp://`.

For fabrics that gloo knows and for many receivers: a broadcast goes down a tree of them. The session has a group of its
own, which no call of torch.distributed in the process has anything to do with; it is made anew when others take part
than before, and after every sync that failed.

The peers prove to each other that they know the token. The connections of gloo and its store, which the sender serves
on a second port, are not authenticated: use a network that you trust.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_ckpt.transports.group import Group, dial_store, require_gloo, serve_store
from rl_ckpt.protocol.messages import Regroup
from rl_ckpt.receiver.receiver import Receiver
from rl_ckpt.sender.sender import Sender
from rl_ckpt.transports.streams import MAX_BUCKET_BYTES, MAX_SLOTS, StreamReceive
from rl_ckpt.transports.base import checked_options
from rl_ckpt.backends.tcp import Listener, TcpSend, dial, host_and_port, link_of, token_of
from rl_ckpt.errors import ProtocolError
from rl_ckpt.types import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from rl_ckpt.protocol.channel import Link
    from rl_ckpt.protocol.messages import Session
    from rl_ckpt.transports.base import Waits
    from rl_ckpt.base import CheckpointEngine
    from rl_ckpt.types import SessionConfig

MARGIN_S = 30.0
"""How much later than the session's own deadlines, which name the peer, those of gloo are."""


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
        return Sender(config, GlooSend(config, Listener, 0, token))
    return Receiver(config, GlooReceive(config, dial, link_of, token))


class GlooSend(TcpSend):
    """Rank 0 of every group."""

    is_direct = False
    device = torch.device("cpu")
    """Where the ring is."""
    _store: tuple[Any, int] | None = None
    _group: Group | None = None
    _members: tuple[int, ...] = ()
    _generation = 0

    def regroup(self, members: Sequence[tuple[int, int, Link]]) -> list[Regroup]:
        """Make a group of these, unless it is there."""
        tickets = tuple(ticket for ticket, _, _ in members)
        is_whole = all(generation == self._generation for _, generation, _ in members)
        if self._group is not None and self._group.error is None and tickets == self._members and is_whole:
            return []
        self.disband()
        host, _ = host_and_port(self._config)
        _, port = self._store = self._store or serve_store(host, self._config.timeout_s)
        mine, _ = members[0][2].addresses()  # the URL may say 0.0.0.0
        self._generation += 1
        self._members = tickets
        size = len(tickets) + 1
        timeout_s = self._config.timeout_s

        def store() -> Any:  # of its own: a group that was left may wait in its own for long
            return dial_store(mine, port, timeout_s)

        self._group = Group(
            store, self._generation, 0, size, host=mine, timeout_s=timeout_s + MARGIN_S, device=self.device
        )
        return [Regroup(self._generation, rank, size, port) for rank in range(1, size)]

    def publish(self, content: Tensor) -> None:
        """Broadcast it. What goes wrong is seen by the receivers, and by the deadline for their answers."""
        if self._group is not None:
            self._group.broadcast(content)

    def disband(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.leave()
            self._group = None

    def close(self) -> None:
        """Leave the group, and give the ports back."""
        self.disband()
        self._store = None
        super().close()


class GlooReceive(StreamReceive):
    """Any other rank. Buckets land in slots of its own."""

    device = torch.device("cpu")
    """Where they are."""
    _group: Group | None = None

    @property
    def generation(self) -> int:
        """Of the group that it is in."""
        return 0 if self._group is None or self._group.error is not None else self._group.generation

    def map_slots(self, session: Session, link: Link) -> list[Tensor]:
        """Memory for what is broadcast."""
        if session.num_streams or not 0 < session.bucket_bytes <= MAX_BUCKET_BYTES:
            raise ProtocolError(f"{link.peer} announced {session}, which is not a session of broadcasts")
        num_slots = min(session.num_slots, MAX_SLOTS)
        self._slots = [
            torch.empty(session.bucket_bytes, dtype=torch.uint8, device=self.device) for _ in range(num_slots)
        ]
        return self._slots

    def regroup(self, message: Regroup, link: Link) -> None:
        """Join the sender's new group."""
        self.disband()
        mine, theirs = link.addresses()
        timeout_s = self._config.timeout_s

        def store() -> Any:
            return dial_store(theirs, message.port, timeout_s)

        self._group = Group(
            store,
            message.generation,
            message.rank,
            message.size,
            host=mine,
            timeout_s=timeout_s + MARGIN_S,
            device=self.device,
        )

    def pull(self, slot: int, content: Tensor, waits: Waits) -> None:
        """Take part in the broadcast of a bucket."""
        del slot
        if self._group is None:
            raise ProtocolError(f"a bucket came over {self._config.address} before there was a group to broadcast it")
        self._group.broadcast(content)
        waits.readable(self._group.fileno())
        try:
            self._group.take()
        except RuntimeError as error:  # a member is gone; the sender knows which
            try:
                waits.ended()
            except Exception as reason:
                raise reason from error

    def disband(self) -> None:
        """Leave the group, and any memory that a broadcast which is under way may still write to."""
        if self._group is not None:
            if self._group.num_pending:
                self._slots[:] = [torch.empty_like(slot) for slot in self._slots]
            self._group.leave()
            self._group = None
