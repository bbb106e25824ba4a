"""What transports without shared memory have in common: payload on streams, into memory of the receiver's own."""

from __future__ import annotations

import socket
import struct
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch

from rl_ckpt.errors import AddressError, ProtocolError
from rl_ckpt.protocol.messages import Session, Stream, encode
from rl_ckpt.tensors.spec import memory_of
from rl_ckpt.transports.base import ConnectingReceive, ListeningSend
from rl_csrc.ipc import close_in_children

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from rl_ckpt.protocol.channel import Channel
    from rl_ckpt.protocol.messages import Bucket
    from rl_ckpt.transports.base import PayloadWaits, ReceiveTransport
    from rl_ckpt.types import SessionConfig

MAX_BUCKET_BYTES = 1 << 30
"""A receiver allocates a bucket before it knows the sender well."""
MAX_STREAMS = 64
MAX_SLOTS = 64


def stream_count(config: SessionConfig) -> int:
    """The option `streams` of a URL.

    Raises:
        AddressError: it is no number from 1 to 64.
    """
    text = config.option("streams", "1")
    if not (text.isdecimal() and 1 <= int(text) <= MAX_STREAMS):
        raise AddressError(f"streams is {text!r} in {config.address!r}; allowed are 1 to {MAX_STREAMS}")
    return int(text)


class StreamSend(ListeningSend):
    """Sending end that writes payload to streams; small tensors are packed into slots in ordinary memory.

    Mix it into `UnixSend` or `TcpSend`.
    """

    is_direct = True
    bucket_bytes = 4 << 20
    """Small enough that what was read for its digest is still in the cache when it is sent."""
    num_slots = 32

    def __init__(self, config: SessionConfig) -> None:
        super().__init__(config)
        self.num_streams = stream_count(config)
        self._views: list[memoryview] = []

    def open(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """Take the address and allocate."""
        if bucket_bytes > MAX_BUCKET_BYTES:
            raise AddressError(f"bucket_bytes is {bucket_bytes}; on streams at most {MAX_BUCKET_BYTES} are allowed")
        return super().open(num_slots, bucket_bytes)

    def allocate(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """The ring, in memory of this process."""
        slots = [torch.empty(bucket_bytes, dtype=torch.uint8) for _ in range(num_slots)]
        self._views = [memory_of(slot) for slot in slots]
        return slots

    def write(self, connection: socket.socket, slot: int, start: int, end: int) -> int:
        """Let the kernel copy it."""
        return connection.send(self._views[slot][start:end])

    def close(self) -> None:
        """Give the address back."""
        super().close()
        self._views = []


class StreamReceive(ConnectingReceive):
    """Receiving end that reads streams into slots of its own. Mix it into `UnixReceive` or `TcpReceive`."""

    def __init__(self, config: SessionConfig) -> None:
        super().__init__(config)
        stream_count(config)
        self._slots: list[Tensor] = []

    def map_slots(self, session: Session, channel: Channel) -> list[Tensor]:
        """As many slots of its own as the sender has; memory that is never written to costs nothing."""
        if not (1 <= session.num_streams <= MAX_STREAMS and 0 < session.bucket_bytes <= MAX_BUCKET_BYTES):
            raise ProtocolError(f"{channel.peer} announced {session}, which is not a session with streams")
        num_slots = min(session.num_slots, MAX_SLOTS)
        if [slot.numel() for slot in self._slots] != [session.bucket_bytes] * num_slots:
            self._slots = [torch.empty(session.bucket_bytes, dtype=torch.uint8) for _ in range(num_slots)]
        return self._slots


BUFFER_BYTES = 4 << 20
"""Wish for the kernel's buffer of a UNIX socket; net.core.wmem_max bounds it."""
PATIENCE_S = 0.02
"""Longest stay in one call to the kernel, after which an end looks up: at its other peers, its deadline, its caller."""


def set_patience(connection: socket.socket) -> socket.socket:
    """Let calls on a socket wait inside the kernel, which moves a bucket in one call, and end by `PATIENCE_S`."""
    connection.setblocking(True)
    patience = struct.pack("ll", 0, int(PATIENCE_S * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
    return connection


@dataclass(frozen=True, slots=True)
class ByteRun:
    """Bytes of a slot, or of a tensor of the source."""

    num_bytes: int
    """How many."""
    slot: int = 0
    """Number of the slot."""
    start: int = 0
    """Where they start in the slot."""
    view: memoryview | None = None
    """The tensor's memory, instead."""


class StreamWriter:
    """Writes slots to sockets, as far as these take them. Owns the sockets."""

    def __init__(self) -> None:
        self._streams: dict[int, tuple[int, socket.socket]] = {}
        self._queues: dict[int, deque[tuple[ByteRun, int]]] = {}
        """Of each stream what it has not taken yet, in order, and how much it has taken of the first."""

    @property
    def is_empty(self) -> bool:
        """Whether everything was taken by the kernel, so that tensors may change."""
        return not any(self._queues.values())

    def attach(self, index: int, opened: int, connection: socket.socket) -> None:
        """Use a connection for stream `index`, in place of an earlier one. `opened` tells generations apart."""
        set_patience(connection)
        if connection.family == socket.AF_UNIX:  # TCP finds its own size
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        if index in self._streams:
            self._streams[index][1].close()
        self._streams[index] = (opened, connection)
        self._queues[index] = deque()

    def is_open(self, num_streams: int, opened: int) -> bool:
        """Whether all streams of a generation are there."""
        return num_streams == 0 or {i: o for i, (o, _) in self._streams.items()} == dict.fromkeys(
            range(num_streams), opened
        )

    def put(self, sequence: int, payload: Sequence[ByteRun]) -> None:
        """Queue the payload of a bucket. Slots must not change before it is freed, tensors before they are taken."""
        self._queues[sequence % len(self._queues)].extend((run, 0) for run in payload if run.num_bytes)

    def flush(self, write: Callable[[socket.socket, int, int, int], int], *, is_patient: bool) -> None:
        """Write what the sockets take now or, if patient, a moment later.

        Args:
            write: Of a transport: puts bytes `start` to `end` of a slot on a stream and returns how many went.
            is_patient: Whether to wait a moment.

        Raises:
            OSError: the other end is gone.
        """
        for index, queue in self._queues.items():
            connection = self._streams[index][1]
            connection.setblocking(is_patient)
            while queue:
                run, taken = queue[0]
                try:
                    taken += self.write_run(connection, write, run, taken)
                except (BlockingIOError, InterruptedError):
                    break
                if taken == run.num_bytes:
                    queue.popleft()
                else:
                    queue[0] = (run, taken)
                    if is_patient:
                        break  # it waited already: look up

    @staticmethod
    def write_run(
        connection: socket.socket, write: Callable[[socket.socket, int, int, int], int], run: ByteRun, taken: int
    ) -> int:
        """Write what a socket takes of a run, behind what it has taken; how much that is."""
        if run.view is None:
            return write(connection, run.slot, run.start + taken, run.start + run.num_bytes)
        return connection.send(run.view[taken:])

    def blocked(self) -> list[int]:
        """Descriptors of the streams that have more to write."""
        return [self._streams[index][1].fileno() for index, queue in self._queues.items() if queue]

    def close(self) -> None:
        """Close the streams; what was not written is gone."""
        for _, connection in self._streams.values():
            connection.close()
        self._streams.clear()
        self._queues.clear()


MAX_BUFFERS = 512
"""Most buffers of one scattering read; the kernel's limit is 1,024."""


class BucketReader:
    """The `BucketSource` of a session. Owns its streams.

    Args:
        transport: Dials the streams, and knows the ring.
        session: What the sender said of it.
        slots: uint8 [bucket_bytes] each.
        waits: How to wait for payload.
    """

    def __init__(
        self,
        transport: ReceiveTransport,
        session: Session,
        slots: Sequence[Tensor],
        waits: PayloadWaits,
    ) -> None:
        self.slots = slots
        self.is_sender_memory = transport.is_sender_memory
        self._opened = 0
        self._transport = transport
        self._session = session
        self._waits = waits
        self._streams: list[socket.socket] = []

    @property
    def opened(self) -> int:
        """Number of the sync for which the streams were opened; or generation of the group."""
        return self._opened if self._session.num_streams else self._transport.generation

    def open(self, sync: int, timeout_s: float) -> None:
        """Open the streams if they are not.

        Raises:
            ConnectionError: the sender is gone.
        """
        if len(self._streams) == self._session.num_streams:
            return
        self.close()
        self._opened = sync
        for index in range(self._session.num_streams):
            stream = close_in_children(self._transport.dial_stream())
            self._streams.append(stream)
            stream.settimeout(timeout_s)
            stream.sendall(encode(Stream(self._session.ticket, index, sync), 0))
            set_patience(stream)

    def fetch(self, bucket: Bucket, contents: Callable[[], Sequence[Tensor]]) -> bool:
        """Read a bucket into memory. See `rl_ckpt.receiver.unpacker.BucketSource`."""
        if self._session.num_streams == 0:
            self._transport.pull(bucket.slot, self.slots[bucket.slot][: bucket.used_bytes], self._waits)
            return False
        stream = self._streams[bucket.sequence % len(self._streams)]
        views = deque(memory_of(content) for content in contents())
        while views:
            try:
                num_bytes = stream.recvmsg_into(islice(views, MAX_BUFFERS), 0, socket.MSG_WAITALL)[0]
            except (BlockingIOError, InterruptedError):
                self._waits.readable(stream.fileno())
                continue
            except OSError:  # reset, or the network is gone
                num_bytes = 0
            if num_bytes == 0:
                self._waits.ended()
            while num_bytes:
                view = views.popleft()
                if num_bytes < view.nbytes:
                    views.appendleft(view[num_bytes:])
                    break
                num_bytes -= view.nbytes
            if views:  # a slow sender: look up between two calls
                self._waits.readable(stream.fileno())
        return True

    def refresh(self, slot: int) -> bool:
        """Undo what this process has written to a slot. See `rl_ckpt.receiver.unpacker.BucketSource`."""
        return self._transport.refresh(slot)

    def close(self) -> None:
        """Close the streams. What was not read is gone; the next sync opens new ones."""
        for stream in self._streams:
            stream.close()
        self._streams = []
        self._transport.leave_group()
