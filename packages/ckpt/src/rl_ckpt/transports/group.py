"""One group of torch.distributed at a time, worked by a thread of its own: an operation that hangs is left behind.

Of gloo on the CPU, or of NCCL on a device.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from contextlib import contextmanager, suppress
from datetime import timedelta
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
"""What lets NCCL's process group end the whole process: when a peer dies, and when an abort does not come back."""


def _dist() -> Any:
    """torch.distributed, whose type stubs lack the stores and what gloo is made of. Imported when it is needed."""
    import torch.distributed

    return torch.distributed


def require_gloo(address: str) -> None:
    """Raise `BackendError` where this torch has none."""
    if not (_dist().is_available() and _dist().is_gloo_available()):
        raise BackendError(f"{address} needs a torch that was built with torch.distributed and gloo; use tcp instead")


def require_nccl(address: str) -> None:
    """Raise `BackendError` where there is none, or no GPU to use it with."""
    dist = _dist()
    if not (dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()):
        raise BackendError(f"{address} needs NCCL and a GPU, and torch has not both here; use gloo or tcp instead")


def serve_store(host: str, timeout_s: float) -> tuple[Any, int]:
    """A `TCPStore`, where the members of groups find each other, on a free port of this host; and the port."""
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
    """The same from another process; waits until it answers, `timeout_s` at most."""
    timeout = timedelta(seconds=timeout_s)
    return _dist().TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


@contextmanager
def _surviving() -> Generator[None]:
    """Let a process group of NCCL that is made inside not end this process when a peer dies, as it does by default.

    It is aborted instead, by `BroadcastGroup.leave`. torch reads the variables when a group is made.
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
    """The members of a sync. The constructor waits for nothing: the thread joins, then does what `broadcast` asks for.

    Args:
        store: Makes the store, in the thread.
        generation: Number of the group in the session.
        rank: Of this end; the sender's is 0.
        size: How many there are.
        host: Address of this end, that the others connect to.
        timeout_s: Longest time of one operation, seconds; after it the thread of a group that was left ends.
        device: Where the contents are: the CPU for gloo, a GPU for NCCL.
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
        """Why it does nothing any more."""
        self.num_pending = 0
        """Broadcasts that were asked for and not taken."""
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
        """Becomes readable when an operation has ended, well or not."""
        return self._waker_out.fileno()

    def broadcast(self, content: Tensor) -> None:
        """Begin to send (rank 0) or to receive uint8 [num_bytes] on the device, after what was asked for before."""
        self.num_pending += 1
        self._jobs.put(content)

    def take(self) -> None:
        """Note that one operation has ended; raises what it raised."""
        self._waker_out.recv(1)
        self.num_pending -= 1
        if self.error is not None:
            raise self.error

    def leave(self) -> None:
        """Do nothing more. What is under way ends by itself, at the latest by its timeout, and is heard by nobody.

        NCCL would hold its device until then, so its communicator is aborted; in a thread, because an abort may itself
        wait for peers.
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
"""How much later than the session's own deadlines, which name the peer, those of gloo are."""


class GroupSend(TcpSend):
    """Sending end that broadcasts each bucket: rank 0 of every group."""

    bucket_bytes = 4 << 20
    device = torch.device("cpu")
    """Where the ring is."""
    _store: tuple[Any, int] | None = None
    _group: BroadcastGroup | None = None
    _members: tuple[int, ...] = ()
    _generation = 0

    def allocate(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """The ring, on the device."""
        return [torch.empty(bucket_bytes, dtype=torch.uint8, device=self.device) for _ in range(num_slots)]

    def new_group(self, members: Sequence[tuple[int, int, Channel]]) -> list[NewGroup]:
        """Make a group of these, unless it is there."""
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

        def store() -> Any:  # of its own: a group that was left may wait in its own for long
            return dial_store(mine, port, timeout_s)

        self._group = BroadcastGroup(
            store, self._generation, 0, size, host=mine, timeout_s=timeout_s + MARGIN_S, device=self.device
        )
        return [NewGroup(self._generation, rank, size, port) for rank in range(1, size)]

    def publish(self, content: Tensor) -> None:
        """Broadcast it. What goes wrong is seen by the receivers, and by the deadline for their answers."""
        if self._group is not None:
            self._group.broadcast(content)

    def leave_group(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.leave()
            self._group = None

    def close(self) -> None:
        """Leave the group, and give the ports back."""
        self.leave_group()
        self._store = None
        super().close()


class GroupReceive(TcpReceive):
    """Receiving end of broadcasts: any other rank. Buckets arrive in slots of its own."""

    device = torch.device("cpu")
    """Where they are."""
    _group: BroadcastGroup | None = None

    def __init__(self, config: SessionConfig) -> None:
        super().__init__(config)
        self._slots: list[Tensor] = []

    @property
    def generation(self) -> int:
        """Of the group that it is in."""
        return 0 if self._group is None or self._group.error is not None else self._group.generation

    def map_slots(self, session: Session, channel: Channel) -> list[Tensor]:
        """Memory for what is broadcast."""
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

        def store() -> Any:
            return dial_store(theirs, message.port, timeout_s)

        self._group = BroadcastGroup(
            store,
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
        """Leave the group, and any memory that a broadcast which is under way may still write to."""
        if self._group is not None:
            if self._group.num_pending:
                self._slots[:] = [torch.empty_like(slot) for slot in self._slots]
            self._group.leave()
            self._group = None
