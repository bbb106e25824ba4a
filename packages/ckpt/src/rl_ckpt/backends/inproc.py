"""`inproc://name`: both ends in one process, in any of its threads and event loops. For tests and one-process jobs.

The control protocol is the same as between processes, over socket pairs; the ring is ordinary memory.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

import torch

from rl_ckpt.errors import AddressError, ProtocolError
from rl_ckpt.protocol.channel import Link, close_in_children
from rl_ckpt.receiver.receiver import Receiver
from rl_ckpt.sender.sender import Sender
from rl_ckpt.transports.base import ReceiveTransport, SendTransport, checked_name
from rl_ckpt.types import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from rl_ckpt.base import CheckpointEngine
    from rl_ckpt.protocol.messages import Session
    from rl_ckpt.types import SessionConfig

LinkFactory: TypeAlias = "Callable[[socket.socket, str, Sequence[Tensor]], Link]"
"""Makes a link out of a connected socket, the peer's name and the ring."""

_lock = threading.Lock()
_hubs: dict[str, Hub] = {}
_factories: dict[str, LinkFactory] = {}


def open_session(config: SessionConfig) -> CheckpointEngine:
    """Return one end of a session inside this process."""
    checked_name(config)
    if config.role is Role.SEND:
        return Sender(config, InprocSend(config))
    return Receiver(config, InprocReceive(config))


def set_link_factory(name: str, factory: LinkFactory | None) -> None:
    """Make the links of sessions of this name by `factory`, from now on; None: ordinary ones. For fault injectors."""
    with _lock:
        if factory is None:
            _factories.pop(name, None)
        else:
            _factories[name] = factory


class Hub:
    """Where receivers find the sender of a name."""

    def __init__(self, name: str, slots: list[Tensor]) -> None:
        self.slots = slots
        self._name = name
        self._num_receivers = 0
        self._waiting: deque[Link] = deque()
        self._bell_in, self._bell_out = map(close_in_children, socket.socketpair())
        self._bell_out.setblocking(False)

    def fileno(self) -> int:
        """Becomes readable when a receiver dials."""
        return self._bell_out.fileno()

    def dial(self) -> Link:
        """Connect a receiver and ring the bell. Called under the lock."""
        self._num_receivers += 1
        mine, theirs = socket.socketpair()
        pid = os.getpid()
        self._waiting.append(self._link(theirs, f"receiver {self._num_receivers} in pid {pid}"))
        self._bell_in.send(b"!")
        return self._link(mine, f"sender in pid {pid}")

    def accept(self) -> Link | None:
        """The next receiver. Called under the lock."""
        if not self._waiting:
            return None
        self._bell_out.recv(1)
        return self._waiting.popleft()

    def close(self) -> None:
        """Turn away who was not accepted. Called under the lock."""
        for link in self._waiting:
            link.close()
        self._bell_in.close()
        self._bell_out.close()

    def _link(self, connection: socket.socket, peer: str) -> Link:
        factory = _factories.get(self._name)
        return Link(connection, peer) if factory is None else factory(connection, peer, self.slots)


class InprocSend(SendTransport):
    """Owns the hub of its name."""

    def __init__(self, config: SessionConfig) -> None:
        self.address = config.address
        self._name = config.name
        self._hub: Hub | None = None

    def open(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """Make the hub; raises `AddressError` if there is one."""
        with _lock:
            if self._name in _hubs:
                raise AddressError(f"{self.address} is taken by another sender; close it or choose another name")
            slots = [torch.empty(bucket_bytes, dtype=torch.uint8) for _ in range(num_slots)]
            self._hub = _hubs[self._name] = Hub(self._name, slots)
        return self._hub.slots

    def fileno(self) -> int:
        """The hub's bell."""
        if self._hub is None:
            raise AddressError(f"{self.address} is not open")
        return self._hub.fileno()

    def accept(self) -> Link | None:
        """The next receiver."""
        with _lock:
            return self._hub.accept() if self._hub is not None else None

    def close(self) -> None:
        """Take the hub away."""
        with _lock:
            if self._hub is not None:
                del _hubs[self._name]
                self._hub.close()
                self._hub = None


class InprocReceive(ReceiveTransport):
    """Looks the hub up."""

    def __init__(self, config: SessionConfig) -> None:
        self._name = config.name
        self._slots: list[Tensor] = []

    def dial(self) -> Link | None:
        """Connect, if there is a sender."""
        with _lock:
            hub = _hubs.get(self._name)
            if hub is None:
                return None
            self._slots = hub.slots
            return hub.dial()

    def map_slots(self, session: Session, link: Link) -> list[Tensor]:
        """The sender's own slots."""
        if [slot.numel() for slot in self._slots] != [session.bucket_bytes] * session.num_slots:
            raise ProtocolError(f"{link.peer} announced {session}, which is not the ring of its hub")
        return self._slots
