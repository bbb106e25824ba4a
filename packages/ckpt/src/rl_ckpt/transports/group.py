"""Broadcast transports over torch.distributed process groups (gloo on CPUs, NCCL on GPUs).

A group runs in its own thread, so that an operation that hangs can be abandoned.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rl_ckpt.errors import BackendError, ProtocolError
from rl_ckpt.protocol.messages import NewGroup
from rl_ckpt.transports.streams import MAX_BUCKET_BYTES, MAX_SLOTS
from rl_ckpt.transports.tcp import TcpReceive, TcpSend, host_and_port
from rl_csrc.ipc import close_in_children

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import Tensor

    from rl_ckpt.protocol.channel import Channel
    from rl_ckpt.protocol.messages import Session
    from rl_ckpt.transports.base import PayloadWaits
    from rl_ckpt.types import SessionConfig

_FATAL = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
"""Variables by which NCCL's process group ends the whole process when a peer dies or an abort hangs."""


def _dist() -> Any:
    """torch.distributed, imported on first use; `Any`, as its stubs lack the stores and gloo's classes."""
    import torch.distributed

    return torch.distributed


def require_gloo(address: str) -> None:
    """Raise `BackendError` if this torch has no gloo."""
    if not (_dist().is_available() and _dist().is_gloo_available()):
        raise BackendError(f"{address} needs a torch that was built with torch.distributed and gloo; use tcp instead")


def require_nccl(address: str) -> None:
    """Raise `BackendError` if there is no NCCL or no GPU."""
    dist = _dist()
    if not (dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()):
        raise BackendError(f"{address} needs NCCL and a GPU, and torch has not both here; use gloo or tcp instead")


def serve_store(host: str, timeout_s: float) -> tuple[Any, int]:
    """Start a `TCPStore` for the rendezvous of groups on a free port; returns the store and the port."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = int(listener.getsockname()[1])
    store = _dist().TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
    return store, port


def dial_store(host: str, port: int, timeout_s: float) -> Any:
    """Connect to the sender's `TCPStore`, waiting `timeout_s` at most."""
    timeout = timedelta(seconds=timeout_s)
    return _dist().TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


@contextmanager
def _surviving() -> Generator[None]:
    """Keep an NCCL process group created inside from ending this process when a peer dies, its default.

    `BroadcastGroup.leave` aborts the group instead. torch reads the variables when a group is made.
    """
    before = {name: os.environ.get(name) for name in _FATAL}
    os.environ.update(dict.fromkeys(_FATAL, "0"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class BroadcastGroup:
    """Process group of a sync. The constructor does not wait: a thread joins, then runs the broadcasts.

    Args:
        store: Returns the store; called in the thread.
        generation: Number of the group in the session.
        rank: Rank of this end; 0 for the sender.
        size: Number of members.
        host: Address of this end, for connections of the others.
        timeout_s: Timeout of one operation, seconds; the thread of a group that was left ends after it.
        device: Device of the contents: the CPU for gloo, a GPU for NCCL.
    """

    def __init__(
        self,
        store: Callable[[], Any],
        generation: int,
        rank: int,
        size: int,
        *,
        host: str,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        self.generation = generation
        self.error: Exception | None = None
        """Error after which it does nothing more."""
        self.num_pending = 0
        """Broadcasts that were started and not taken."""
        self._is_left = False
        self._store = store
        self._place = (rank, size, host, timeout_s)
        self._device = device
        self._group: Any = None
        self._jobs: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        self._waker_in, self._waker_out = map(close_in_children, socket.socketpair())
        self._waker_in.setblocking(False)
        name = f"rl-ckpt {device.type} group {generation} rank {rank}"
        threading.Thread(target=self._work, name=name, daemon=True).start()  # a hung operation must not hang the exit

    def fileno(self) -> int:
        """Descriptor that becomes readable when an operation has ended."""
        return self._waker_out.fileno()

    def broadcast(self, content: Tensor) -> None:
        """Start to send (rank 0) or receive uint8 [num_bytes] on the device, after earlier broadcasts."""
        self.num_pending += 1
        self._jobs.put(content)

    def take(self) -> None:
        """Take the result of one operation; raises its error."""
        self._waker_out.recv(1)
        self.num_pending -= 1
        if self.error is not None:
            raise self.error

    def leave(self) -> None:
        """Leave the group. A running operation ends by its timeout at the latest, and its result is discarded.

        NCCL would occupy its device until then, so its communicator is aborted; in a thread, because the abort may wait
        for peers.
        """
        self._is_left = True
        self._jobs.put(None)
        if self._device.type == "cuda" and self._group is not None:
            threading.Thread(target=self._abort, args=(self._group,), daemon=True).start()
        self._waker_in.close()
        self._waker_out.close()

    @staticmethod
    def _abort(group: Any) -> None:
        with suppress(RuntimeError):  # it did not come back within the timeout of the group, and nobody waits for it
            group.abort()

    def _work(self) -> None:
        try:
            self._group = group = self._join()
            while (content := self._jobs.get()) is not None and not self._is_left:
                group.broadcast(content, 0).wait()
                if self._device.type == "cuda":  # NCCL's wait is that of the stream
                    torch.cuda.current_stream(self._device).synchronize()
                self._ring()
        except Exception as error:  # noqa: BLE001  # kept for `take`: gloo raises RuntimeError for everything
            self.error = error
            self._ring()

    def _join(self) -> Any:
        dist = _dist()
        rank, size, host, timeout_s = self._place
        store = dist.PrefixStore(f"rl-ckpt/{self.generation}", self._store())
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=timeout_s)
            with _surviving():
                return dist.ProcessGroupNCCL(store, rank, size, options)
        options = dist.ProcessGroupGloo._Options()  # its only name, since torch 1.8
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1  # one operation at a time
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        return dist.ProcessGroupGloo(store, rank, size, options)

    def _ring(self) -> None:
        with suppress(OSError):  # left meanwhile, or nobody takes
            self._waker_in.send(b"!")


MARGIN_S = 30.0
"""Seconds by which gloo's timeouts exceed the session's deadlines, whose errors name the peer."""


class GroupSend(TcpSend):
    """Sending side that broadcasts each bucket, as rank 0 of every group."""

    bucket_bytes = 4 << 20
    device = torch.device("cpu")
    """Device of the ring."""
    _store: tuple[Any, int] | None = None
    _group: BroadcastGroup | None = None
    _members: tuple[int, ...] = ()
    _generation = 0

    def allocate(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """Allocate the ring on the device."""
        return [torch.empty(bucket_bytes, dtype=torch.uint8, device=self.device) for _ in range(num_slots)]

    def new_group(self, members: Sequence[tuple[int, int, Channel]]) -> list[NewGroup]:
        """Create a group of these members, unless the present one has them."""
        tickets = tuple(ticket for ticket, _, _ in members)
        is_whole = all(generation == self._generation for _, generation, _ in members)
        if self._group is not None and self._group.error is None and tickets == self._members and is_whole:
            return []
        self.leave_group()
        host, _ = host_and_port(self._config)
        _, port = self._store = self._store or serve_store(host, self._config.timeout_s)
        mine, _ = members[0][2].addresses()  # the URL may say 0.0.0.0
        self._generation += 1
        self._members = tickets
        size = len(tickets) + 1
        timeout_s = self._config.timeout_s

        store = partial(dial_store, mine, port, timeout_s)  # its own connection: an abandoned group may block its store
        self._group = BroadcastGroup(
            store, self._generation, 0, size, host=mine, timeout_s=timeout_s + MARGIN_S, device=self.device
        )
        return [NewGroup(self._generation, rank, size, port) for rank in range(1, size)]

    def publish(self, content: Tensor) -> None:
        """Broadcast a bucket. Failures are reported by the receivers, or by the deadline for their replies."""
        if self._group is not None:
            self._group.broadcast(content)

    def leave_group(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.leave()
            self._group = None

    def close(self) -> None:
        """Leave the group, and free the ports."""
        self.leave_group()
        self._store = None
        super().close()


class GroupReceive(TcpReceive):
    """Receiving side of broadcasts, as another rank. Buckets arrive in its own slots."""

    device = torch.device("cpu")
    """Device of the slots."""
    _group: BroadcastGroup | None = None

    def __init__(self, config: SessionConfig) -> None:
        super().__init__(config)
        self._slots: list[Tensor] = []

    @property
    def generation(self) -> int:
        """Generation of its group."""
        return 0 if self._group is None or self._group.error is not None else self._group.generation

    def map_slots(self, session: Session, channel: Channel) -> list[Tensor]:
        """Allocate slots for broadcast buckets."""
        if session.num_streams or not 0 < session.bucket_bytes <= MAX_BUCKET_BYTES:
            raise ProtocolError(f"{channel.peer} announced {session}, which is not a session of broadcasts")
        num_slots = min(session.num_slots, MAX_SLOTS)
        self._slots = [
            torch.empty(session.bucket_bytes, dtype=torch.uint8, device=self.device) for _ in range(num_slots)
        ]
        return self._slots

    def new_group(self, message: NewGroup, channel: Channel) -> None:
        """Join the sender's new group."""
        self.leave_group()
        mine, theirs = channel.addresses()
        timeout_s = self._config.timeout_s
        self._group = BroadcastGroup(
            partial(dial_store, theirs, message.port, timeout_s),
            message.generation,
            message.rank,
            message.size,
            host=mine,
            timeout_s=timeout_s + MARGIN_S,
            device=self.device,
        )

    def pull(self, slot: int, content: Tensor, waits: PayloadWaits) -> None:
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

    def leave_group(self) -> None:
        """Leave the group, and drop the slots that a running broadcast may still write to."""
        if self._group is not None:
            if self._group.num_pending:
                self._slots[:] = [torch.empty_like(slot) for slot in self._slots]
            self._group.leave()
            self._group = None
