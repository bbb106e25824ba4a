"""Faults to inject into `inproc://` sessions."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING

from rl_ckpt.backends.inproc import set_channel_factory
from rl_ckpt.protocol.channel import Channel
from rl_ckpt.protocol.messages import Buckets, Encoded, Message

if TYPE_CHECKING:
    import socket
    from collections.abc import Generator, Sequence

    from torch import Tensor


class Fault(StrEnum):
    """Fault of a message."""

    DROP = "drop"
    """Message that never arrives."""
    FLIP = "flip"
    """Bit of it that arrives wrong; of a bucket, a bit of the tensors."""
    KILL = "kill"
    """Its sender dies before sending it: the connection closes."""


class Injector:
    """Lets one fault happen: to the `nth` message of a kind, in any session of one name."""

    def __init__(self, fault: Fault, on: str, nth: int) -> None:
        self.has_struck = False
        self._fault = fault
        self._on = on
        self._left = nth
        self._lock = threading.Lock()

    def strikes(self, message: Message) -> Fault | None:
        """The fault, if it is this message's turn."""
        with self._lock:
            if self.has_struck or type(message).__name__.lower() != self._on:
                return None
            self._left -= 1
            self.has_struck = self._left < 0
            return self._fault if self.has_struck else None


class FaultyChannel(Channel):
    """A channel on which the fault happens when something is sent."""

    def __init__(self, connection: socket.socket, peer: str, slots: Sequence[Tensor], injector: Injector) -> None:
        super().__init__(connection, peer)
        self._connection = connection
        self._slots = slots
        self._injector = injector

    def encode(self, message: Encoded, sync: int) -> bytes:
        """The message, or what the fault leaves of it."""
        data = super().encode(message, sync)
        sent = message.message
        fault = self._injector.strikes(sent)
        if fault is Fault.DROP:
            return b""
        if fault is Fault.KILL:
            self._connection.shutdown(2)
        if fault is Fault.FLIP and isinstance(sent, Buckets):
            bucket = sent.buckets[0]
            self._slots[bucket.slot][bucket.used_bytes // 2] ^= 1
        elif fault is Fault.FLIP:
            return data[:-1] + bytes([data[-1] ^ 1])
        return data


@contextmanager
def inject(address: str, fault: Fault, *, on: str, nth: int = 0) -> Generator[Injector]:
    """Let a fault happen in `inproc://` sessions of this address that connect from now on.

    Args:
        address: URL of the session.
        fault: Fault that happens.
        on: To which message of WIRE.md, in lower case: `buckets`, `free`, `staged`, `commit`, ...
        nth: To which of them, from 0.
    """
    scheme, _, name = address.partition("://")
    if scheme != "inproc":
        raise ValueError(f"faults can be injected into inproc:// only, not into {address!r}")
    injector = Injector(fault, on, nth)
    set_channel_factory(name, lambda connection, peer, slots: FaultyChannel(connection, peer, slots, injector))
    try:
        yield injector
    finally:
        set_channel_factory(name, None)
