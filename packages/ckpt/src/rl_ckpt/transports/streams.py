"""What transports without shared memory have in common: payload on streams, into memory of the receiver's own."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile
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


ENDING_S = 10.0
"""Longest wait for a thread whose socket was shut down, seconds."""
BUFFER_BYTES = 4 << 20
"""Wish for the kernel's buffer of a UNIX socket; net.core.wmem_max bounds it."""
PATIENCE_S = 0.02
"""Longest stay in one call to the kernel, after which an end looks up: at its deadline, its caller."""
THREAD_PATIENCE_S = 1.0
"""The same of a thread that only writes: `close` wakes it, and each call that ends in the middle costs CPU time."""


def set_patience(connection: socket.socket, patience_s: float = PATIENCE_S) -> None:
    """Let calls on a socket wait inside the kernel, which moves a bucket in one call, and end by `patience_s`."""
    connection.setblocking(True)
    seconds = int(patience_s)
    patience = struct.pack("ll", seconds, int((patience_s - seconds) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)


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

    def after(self, num_bytes: int) -> ByteRun:
        """What is left behind so many bytes."""
        view = None if self.view is None else self.view[num_bytes:]
        return ByteRun(self.num_bytes - num_bytes, self.slot, self.start + num_bytes, view)


MAX_BUFFERS = 512
"""Most buffers of one call; the kernel's limit is 1,024."""


class StreamWriter:
    """Writes the payload of one receiver to its streams, each in a thread that waits in the kernel. Owns the sockets.

    Args:
        write: Of the transport: puts bytes `start` to `end` of a slot on a stream and returns how many went.
        on_idle: Called by a thread that has written all it was given.
        on_error: Called by a thread with the error of its stream, which then takes nothing more.
    """

    def __init__(
        self,
        write: Callable[[socket.socket, int, int, int], int],
        on_idle: Callable[[], None],
        on_error: Callable[[OSError], None],
    ) -> None:
        self._streams: dict[int, _OutStream] = {}
        self._write = write
        self._on_idle = on_idle
        self._on_error = on_error

    @property
    def is_empty(self) -> bool:
        """Whether everything was taken by the kernel, so that tensors may change."""
        return all(stream.is_idle for stream in self._streams.values())

    def attach(self, index: int, opened: int, connection: socket.socket) -> None:
        """Use a connection for stream `index`, in place of an earlier one. `opened` tells generations apart."""
        if connection.family == socket.AF_UNIX:  # TCP finds its own size
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        if index in self._streams:
            self._streams[index].close()
        self._streams[index] = _OutStream(connection, opened, self)

    def is_open(self, num_streams: int, opened: int) -> bool:
        """Whether all streams of a generation are there."""
        return num_streams == 0 or {i: stream.opened for i, stream in self._streams.items()} == dict.fromkeys(
            range(num_streams), opened
        )

    def put(self, payloads: Sequence[tuple[int, Sequence[ByteRun]]], *, is_alone: bool = False) -> None:
        """Queue the payload of buckets, `(sequence, runs)` each, which are dealt to the streams in turn.

        Slots must not change before their bucket is freed, tensors before they are taken. For a receiver that is alone
        this thread writes what the kernel takes without much of a wait: it has nothing better to do, and a thread less
        to wake.
        """
        num_streams = len(self._streams)
        for index, stream in self._streams.items():
            runs = deque(run for sequence, runs in payloads if sequence % num_streams == index for run in runs)
            if is_alone and stream.is_idle:
                self._write_now(stream, runs)
            if runs:
                stream.put(runs)

    def _write_now(self, stream: _OutStream, runs: deque[ByteRun]) -> None:
        stream.set_patience(PATIENCE_S)
        try:
            while runs and self.write_some(stream.connection, runs):
                pass
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            runs.clear()
            self._on_error(error)

    def write_some(self, connection: socket.socket, runs: deque[ByteRun]) -> bool:
        """Write what a socket takes in one call, of a slot or of tensors as many as follow; leave the rest.

        False if the kernel took a part of a run, because its patience was over.
        """
        run = runs[0]
        if run.view is None:
            num_bytes = self._write(connection, run.slot, run.start, run.start + run.num_bytes)
        else:
            views = takewhile(lambda view: view is not None, (run.view for run in islice(runs, MAX_BUFFERS)))
            num_bytes = connection.sendmsg(views)  # pyright: ignore[reportArgumentType]  # there is no None in them
        while num_bytes and num_bytes >= runs[0].num_bytes:
            num_bytes -= runs.popleft().num_bytes
        if num_bytes:
            runs[0] = runs[0].after(num_bytes)
        return not num_bytes

    def write_all(self, stream: _OutStream) -> None:
        """The work of a stream's thread."""
        try:
            while (left := stream.jobs.get()) is not None:
                stream.set_patience(THREAD_PATIENCE_S)
                while left and not stream.is_closed:
                    with suppress(BlockingIOError, InterruptedError):  # its patience is over, and it has nothing else
                        self.write_some(stream.connection, left)
                stream.num_done += 1
                if stream.is_idle:
                    self._on_idle()
        except OSError as error:
            if not stream.is_closed:
                self._on_error(error)

    def close(self) -> None:
        """Close the streams; what was not written is gone."""
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.close()


class _OutStream:
    """One stream of a writer, and the thread that writes to it."""

    def __init__(self, connection: socket.socket, opened: int, writer: StreamWriter) -> None:
        self.connection = connection
        self.opened = opened
        self.jobs: queue.SimpleQueue[deque[ByteRun] | None] = queue.SimpleQueue()
        """Emptied by the thread as it writes, so that it keeps no tensor while it waits for the next."""
        self.num_done = 0
        self.is_closed = False
        self._num_put = 0
        self._patience_s = 0.0
        self._thread = threading.Thread(target=writer.write_all, args=(self,), name="rl-ckpt stream", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether all it was given is written."""
        return self.num_done == self._num_put

    def set_patience(self, patience_s: float) -> None:
        """Let a write wait so long; called by whoever writes next, the thread or, while that is idle, the caller."""
        if patience_s != self._patience_s:
            set_patience(self.connection, patience_s)
            self._patience_s = patience_s

    def put(self, runs: deque[ByteRun]) -> None:
        """Write these after what was put before."""
        self._num_put += 1
        self.jobs.put(runs)

    def close(self) -> None:
        """End the thread, also in the middle of a write, and close the socket."""
        self.is_closed = True
        self.jobs.put(None)
        with suppress(OSError):  # the other end may have left first
            self.connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(ENDING_S)
        if not self._thread.is_alive():  # its descriptor must not become another's while it may write
            self.connection.close()


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
