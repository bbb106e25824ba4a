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
from rl_ckpt.protocol.channel import Channel
from rl_ckpt.transports.base import ReceiveTransport, SendTransport, Transport, require_name
from rl_csrc.ipc import close_in_children

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from rl_ckpt.protocol.messages import Session
    from rl_ckpt.types import SessionConfig

ChannelFactory: TypeAlias = "Callable[[socket.socket, str, Sequence[Tensor]], Channel]"
"""Makes a channel out of a connected socket, the peer's name and the ring."""

_lock = threading.Lock()
_rendezvous: dict[str, Rendezvous] = {}
_factories: dict[str, ChannelFactory] = {}


def set_channel_factory(name: str, factory: ChannelFactory | None) -> None:
    """Make channels of sessions of this name by `factory`, from now on; None: ordinary ones. For fault injectors."""
    with _lock:
        if factory is None:
            _factories.pop(name, None)
        else:
            _factories[name] = factory


class Rendezvous:
    """Rendezvous: receivers find the sender of a name here."""

    def __init__(self, name: str, slots: list[Tensor]) -> None:
        self.slots = slots
        self._name = name
        self._num_receivers = 0
        self._waiting: deque[Channel] = deque()
        self._waker_in, self._waker_out = map(close_in_children, socket.socketpair())
        self._waker_out.setblocking(False)

    def fileno(self) -> int:
        """Becomes readable when a receiver dials."""
        return self._waker_out.fileno()

    def dial(self) -> Channel:
        """Connect a receiver and wake the sender. Called under the lock."""
        self._num_receivers += 1
        mine, theirs = socket.socketpair()
        pid = os.getpid()
        self._waiting.append(self._channel(theirs, f"receiver {self._num_receivers} in pid {pid}"))
        self._waker_in.send(b"!")
        return self._channel(mine, f"sender in pid {pid}")

    def accept(self) -> Channel | None:
        """The next receiver. Called under the lock."""
        if not self._waiting:
            return None
        self._waker_out.recv(1)
        return self._waiting.popleft()

    def close(self) -> None:
        """Turn away who was not accepted. Called under the lock."""
        for channel in self._waiting:
            channel.close()
        self._waker_in.close()
        self._waker_out.close()

    def _channel(self, connection: socket.socket, peer: str) -> Channel:
        factory = _factories.get(self._name)
        return Channel(connection, peer) if factory is None else factory(connection, peer, self.slots)


class InprocSend(SendTransport):
    """Owns the rendezvous of its name."""

    def __init__(self, config: SessionConfig) -> None:
        require_name(config)
        self.address = config.address
        self._name = config.name
        self._rendezvous: Rendezvous | None = None

    def open(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """Make the rendezvous; raises `AddressError` if there is one."""
        with _lock:
            if self._name in _rendezvous:
                raise AddressError(f"{self.address} is taken by another sender; close it or choose another name")
            slots = [torch.empty(bucket_bytes, dtype=torch.uint8) for _ in range(num_slots)]
            self._rendezvous = _rendezvous[self._name] = Rendezvous(self._name, slots)
        return self._rendezvous.slots

    def fileno(self) -> int:
        """The rendezvous's waker."""
        if self._rendezvous is None:
            raise AddressError(f"{self.address} is not open")
        return self._rendezvous.fileno()

    def accept(self) -> Channel | None:
        """The next receiver."""
        with _lock:
            return self._rendezvous.accept() if self._rendezvous is not None else None

    def close(self) -> None:
        """Take the rendezvous away."""
        with _lock:
            if self._rendezvous is not None:
                del _rendezvous[self._name]
                self._rendezvous.close()
                self._rendezvous = None


class InprocReceive(ReceiveTransport):
    """Looks the rendezvous up."""

    def __init__(self, config: SessionConfig) -> None:
        require_name(config)
        self._name = config.name
        self._slots: list[Tensor] = []

    def dial(self) -> Channel | None:
        """Connect, if there is a sender."""
        with _lock:
            rendezvous = _rendezvous.get(self._name)
            if rendezvous is None:
                return None
            self._slots = rendezvous.slots
            return rendezvous.dial()

    def map_slots(self, session: Session, channel: Channel) -> list[Tensor]:
        """The sender's own slots."""
        if [slot.numel() for slot in self._slots] != [session.bucket_bytes] * session.num_slots:
            raise ProtocolError(f"{channel.peer} announced {session}, which is not the ring of its session")
        return self._slots


class Backend(Transport):
    """Memory of this process. It has no options."""

    ends = (InprocSend, InprocReceive)
