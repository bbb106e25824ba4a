"""What a server takes from a peer: sizes of messages, connections, bytes in flight."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from rl_tq.errors import AddressError

MAX_MESSAGE_BYTES = 64 << 20
"""A request at most. Values do not count: they travel as payload."""
MAX_REPLY_BYTES = 1 << 30
"""A reply at most, which comes from a server that proved to have the token."""


def _quarter_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a server, each per peer. Memory is used as bytes arrive, never as a header announces them."""

    connections: int = 1024
    """Connections of one peer host that have proved the token."""
    unauthenticated: int = 64
    """Connections of one peer host that have not yet: of more, the oldest is closed."""
    payload_bytes: int = field(default_factory=_quarter_of_memory)
    """Values of one put; and, of one connection, of all puts that wait for room and all replies that wait to be
    sent. A quarter of the host's memory."""

    @classmethod
    def from_options(cls, max_connections: str | None, max_put_bytes: str | None) -> Limits:
        """The limits that an address gives.

        Raises:
            AddressError: one is no positive number.
        """
        given: dict[str, int] = {}
        for name, option, value in (
            ("connections", "max_connections", max_connections),
            ("payload_bytes", "max_put_bytes", max_put_bytes),
        ):
            if value is None:
                continue
            if not value.isdecimal() or not int(value):
                raise AddressError(f"{option} is {value!r}: write a positive number, for example {option}=1024")
            given[name] = int(value)
        return cls(**given)
