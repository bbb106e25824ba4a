"""Payload streams, for transports without shared memory: `StreamWriter` and `BucketReader`."""

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
"""Largest bucket that a receiver allocates on behalf of a sender."""
MAX_STREAMS = 64
MAX_SLOTS = 64


def stream_count(config: SessionConfig) -> int:
    """Number of streams from the option `streams` of a URL.

    Raises:
        AddressError: it is not a number from 1 to 64.
    """
    text = config.option("streams", "1")
    if not (text.isdecimal() and 1 <= int(text) <= MAX_STREAMS):
        raise AddressError(f"streams is {text!r} in {config.address!r}; allowed are 1 to {MAX_STREAMS}")
    return int(text)


class StreamSend(ListeningSend):
    """Sending side that writes payload to streams; small tensors are packed into slots in ordinary memory.

    Mix it into `UnixSend` or `TcpSend`.
    """

    is_direct = True
    bucket_bytes = 4 << 20
    """Small enough that a bucket is still in the CPU cache from its digest when it is sent."""
    num_slots = 32

    def __init__(self, config: SessionConfig) -> None:
        super().__init__(config)
        self.num_streams = stream_count(config)
        self._views: list[memoryview] = []

    def open(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """Check the bucket size, bind the address and allocate."""
        if bucket_bytes > MAX_BUCKET_BYTES:
            raise AddressError(f"bucket_bytes is {bucket_bytes}; on streams at most {MAX_BUCKET_BYTES} are allowed")
        return super().open(num_slots, bucket_bytes)

    def allocate(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """Allocate the ring in private memory."""
        slots = [torch.empty(bucket_bytes, dtype=torch.uint8) for _ in range(num_slots)]
        self._views = [memory_of(slot) for slot in slots]
        return slots

    def write(self, connection: socket.socket, slot: int, start: int, end: int) -> int:
        """Send bytes of a slot; the kernel copies them."""
        return connection.send(self._views[slot][start:end])

    def close(self) -> None:
        """Give the address back."""
        super().close()
        self._views = []


class StreamReceive(ConnectingReceive):
    """Receiving side that reads streams into its own slots. Mix it into `UnixReceive` or `TcpReceive`."""

    def __init__(self, config: SessionConfig) -> None:
        super().__init__(config)
        stream_count(config)
        self._slots: list[Tensor] = []

    def map_slots(self, session: Session, channel: Channel) -> list[Tensor]:
        """Allocate as many slots as the sender has; untouched memory costs nothing."""
        if not (1 <= session.num_streams <= MAX_STREAMS and 0 < session.bucket_bytes <= MAX_BUCKET_BYTES):
            raise ProtocolError(f"{channel.peer} announced {session}, which is not a session with streams")
        num_slots = min(session.num_slots, MAX_SLOTS)
        if [slot.numel() for slot in self._slots] != [session.bucket_bytes] * num_slots:
            self._slots = [torch.empty(session.bucket_bytes, dtype=torch.uint8) for _ in range(num_slots)]
        return self._slots


ENDING_S = 10.0
"""Longest wait for a thread whose socket was shut down, seconds."""
BUFFER_BYTES = 4 << 20
"""Requested kernel buffer of a UNIX socket; limited by net.core.wmem_max."""
PATIENCE_S = 0.02
"""Longest blocking system call, seconds, after which deadlines and cancellation are checked."""
THREAD_PATIENCE_S = 1.0
"""Longest blocking call of a writer thread, seconds: `close` wakes it, and interrupted calls cost CPU time."""


def set_patience(connection: socket.socket, patience_s: float = PATIENCE_S) -> None:
    """Set a socket's timeouts in the kernel: calls block, so that one moves a bucket, for `patience_s` at most."""
    connection.setblocking(True)
    seconds = int(patience_s)
    patience = struct.pack("ll", seconds, int((patience_s - seconds) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)


@dataclass(frozen=True, slots=True)
class ByteRun:
    """Run of bytes of a slot or of a source tensor."""

    num_bytes: int
    """Size in bytes."""
    slot: int = 0
    """Number of the slot."""
    start: int = 0
    """Start in the slot, bytes."""
    view: memoryview | None = None
    """Memory of the tensor; None: the slot."""

    def after(self, num_bytes: int) -> ByteRun:
        """Rest of the run after `num_bytes`."""
        view = None if self.view is None else self.view[num_bytes:]
        return ByteRun(self.num_bytes - num_bytes, self.slot, self.start + num_bytes, view)


MAX_BUFFERS = 512
"""Most buffers of one call; the kernel's limit is 1,024."""


class StreamWriter:
    """Writer of one receiver's payload streams, with a blocking thread per stream. Owns the sockets.

    Args:
        write: `SendTransport.write`.
        on_idle: Called by a stream thread that has written everything.
        on_error: Called by a stream thread with the error that ended its stream.
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
        """Whether the kernel has accepted everything, so that tensors may change."""
        return all(stream.is_idle for stream in self._streams.values())

    def attach(self, index: int, opened: int, connection: socket.socket) -> None:
        """Use a connection for stream `index`, replacing an earlier one. `opened` is its generation."""
        if connection.family == socket.AF_UNIX:  # TCP tunes its buffers itself
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        if index in self._streams:
            self._streams[index].close()
        self._streams[index] = _OutStream(connection, opened, self)

    def is_open(self, num_streams: int, opened: int) -> bool:
        """Whether all streams of a generation are attached."""
        return num_streams == 0 or {i: stream.opened for i, stream in self._streams.items()} == dict.fromkeys(
            range(num_streams), opened
        )

    def put(self, payloads: Sequence[tuple[int, Sequence[ByteRun]]], *, is_alone: bool = False) -> None:
        """Queue the payload of buckets, `(sequence, runs)` each, distributed over the streams round-robin.

        Slots must not change before their bucket is freed, tensors before the kernel has accepted them. For a single
        receiver this thread itself writes what the kernel accepts quickly, which saves waking a thread.
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
        """Write as much as a socket takes in one call, from a slot or consecutive tensors; the rest stays in `runs`.

        False if the kernel took only a part of a run before the timeout.
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
        """Loop of a stream thread."""
        try:
            while (left := stream.jobs.get()) is not None:
                stream.set_patience(THREAD_PATIENCE_S)
                while left and not stream.is_closed:
                    with suppress(BlockingIOError, InterruptedError):  # timeout, and nothing else to do
                        self.write_some(stream.connection, left)
                stream.num_done += 1
                if stream.is_idle:
                    self._on_idle()
        except OSError as error:
            if not stream.is_closed:
                self._on_error(error)

    def close(self) -> None:
        """Close the streams, dropping unwritten payload."""
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.close()


class _OutStream:
    """Stream of a writer, with the thread that writes to it."""

    def __init__(self, connection: socket.socket, opened: int, writer: StreamWriter) -> None:
        self.connection = connection
        self.opened = opened
        self.jobs: queue.SimpleQueue[deque[ByteRun] | None] = queue.SimpleQueue()
        """Jobs, emptied by the thread while it writes, so that it keeps no tensor alive while idle."""
        self.num_done = 0
        self.is_closed = False
        self._num_put = 0
        self._patience_s = 0.0
        self._thread = threading.Thread(target=writer.write_all, args=(self,), name="rl-ckpt stream", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether everything is written."""
        return self.num_done == self._num_put

    def set_patience(self, patience_s: float) -> None:
        """Set the write timeout; called by the next writer: the thread or, while it is idle, the caller."""
        if patience_s != self._patience_s:
            set_patience(self.connection, patience_s)
            self._patience_s = patience_s

    def put(self, runs: deque[ByteRun]) -> None:
        """Queue runs after earlier ones."""
        self._num_put += 1
        self.jobs.put(runs)

    def close(self) -> None:
        """End the thread, even during a write, and close the socket."""
        self.is_closed = True
        self.jobs.put(None)
        with suppress(OSError):  # the peer may have closed first
            self.connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(ENDING_S)
        if not self._thread.is_alive():  # the descriptor must not be reused while the thread may write
            self.connection.close()


class BucketReader:
    """`BucketSource` of a session: reads bucket payloads from streams, or from the ring. Owns the streams.

    Args:
        transport: Opens the streams, and pulls from the ring.
        session: Session parameters of the sender.
        slots: uint8 [bucket_bytes] each.
        waits: Waits for payload.
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
        """Number of the sync for which the streams were opened; or the generation of the process group."""
        return self._opened if self._session.num_streams else self._transport.generation

    def open(self, sync: int, timeout_s: float) -> None:
        """Open the streams if they are closed.

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
            if views:  # a slow sender: check deadlines between calls
                self._waits.readable(stream.fileno())
        return True

    def refresh(self, slot: int) -> bool:
        """Discard private writes to a slot. See `rl_ckpt.receiver.unpacker.BucketSource`."""
        return self._transport.refresh(slot)

    def close(self) -> None:
        """Close the streams, dropping unread payload; the next sync opens new ones."""
        for stream in self._streams:
            stream.close()
        self._streams = []
        self._transport.leave_group()
