"""Payload streams, for transports without shared memory: `StreamWriter` and `BucketReader`."""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from rl_ckpt.errors import AddressError, ProtocolError
from rl_ckpt.protocol.messages import Session, Stream, encode
from rl_ckpt.tensors.digest import LEAF_BYTES
from rl_ckpt.transports.base import ConnectingReceive, ListeningSend, ReceiveTransport
from rl_csrc.buffers.pipeline import Pipeline
from rl_csrc.buffers.pipeline import StreamWriter as NativeWriter
from rl_csrc.ipc import Waker, close_in_children

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from rl_ckpt.protocol.channel import Channel
    from rl_ckpt.protocol.messages import Bucket
    from rl_ckpt.transports.base import PayloadWaits
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

    def open(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """Check the bucket size, bind the address and allocate."""
        if bucket_bytes > MAX_BUCKET_BYTES:
            raise AddressError(f"bucket_bytes is {bucket_bytes}; on streams at most {MAX_BUCKET_BYTES} are allowed")
        return super().open(num_slots, bucket_bytes)

    def allocate(self, num_slots: int, bucket_bytes: int) -> list[Tensor]:
        """Allocate the ring in private memory."""
        return [torch.empty(bucket_bytes, dtype=torch.uint8) for _ in range(num_slots)]


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


BUFFER_BYTES = 4 << 20
"""Requested kernel buffer of a UNIX socket; limited by net.core.wmem_max."""

PATIENCE_S = 1
"""Longest system call that reads, seconds, after which it counts what came: a deadline looks at that."""

ByteRun: TypeAlias = "tuple[Tensor | bytes | int, int, int]"
"""Run of bytes: the memory or the descriptor of a file that it is in, its start there, and its size, bytes."""


UnpackedPiece: TypeAlias = "tuple[Tensor | None, int, int, int]"
"""Piece of a bucket: its content (None: it stays in the slot), its start there and in the slot, and its size, bytes."""


class _OutStream(NamedTuple):
    connection: socket.socket
    opened: int
    native: NativeWriter


class StreamWriter:
    """Writer of one receiver's payload streams, with a native thread for each. Owns the sockets.

    Args:
        waker: Woken when a stream fails, or is empty while that is awaited.
        pipeline: Digests what is written; it keeps close to the streams.
    """

    def __init__(self, waker: Waker, pipeline: Pipeline | None = None) -> None:
        self._streams: dict[int, _OutStream] = {}
        self._waker = waker
        self._pipeline = pipeline

    def wake_when_empty(self) -> bool:
        """Whether the kernel has accepted everything, so that tensors may change; else the waker fires when it has."""
        return all(stream.native.wake_when_idle() for stream in self._streams.values())

    def error(self) -> OSError | None:
        """Error that ended a stream."""
        numbers = [stream.native.error() for stream in self._streams.values()]
        return next((OSError(number, os.strerror(number)) for number in numbers if number), None)

    def attach(self, index: int, opened: int, connection: socket.socket) -> None:
        """Use a connection for stream `index`, replacing an earlier one. `opened` is its generation."""
        connection.setblocking(True)
        if connection.family == socket.AF_UNIX:  # TCP tunes its buffers itself
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        if index in self._streams:
            _close_stream(self._streams[index])
        self._streams[index] = _OutStream(
            connection, opened, NativeWriter(connection.fileno(), self._waker.writer_fileno(), self._pipeline)
        )

    def is_open(self, num_streams: int, opened: int) -> bool:
        """Whether all streams of a generation are attached."""
        return num_streams == 0 or {i: stream.opened for i, stream in self._streams.items()} == dict.fromkeys(
            range(num_streams), opened
        )

    def put(self, payloads: Sequence[tuple[int, Sequence[ByteRun]]]) -> None:
        """Queue the payload of buckets, `(sequence, runs)` each, distributed over the streams round-robin.

        Slots must not change before their bucket is freed, tensors before the kernel has accepted them.
        """
        num_streams = len(self._streams)
        for index, stream in self._streams.items():
            stream.native.put([run for sequence, runs in payloads if sequence % num_streams == index for run in runs])

    def close(self) -> None:
        """Close the streams, dropping unwritten payload."""
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            _close_stream(stream)


def _close_stream(stream: _OutStream) -> None:
    if stream.native.close():  # else the descriptor must not be reused while the thread may write
        stream.connection.close()


class BucketReader:
    """`BucketSource` of a session: buckets are read from streams, or come in the ring. Owns the streams.

    `slots` are uint8 [bucket_bytes] each. Where they are on the CPU, a native pipeline reads, verifies and unpacks
    them; elsewhere the caller does.
    """

    def __init__(
        self, transport: ReceiveTransport, session: Session, slots: Sequence[Tensor], waits: PayloadWaits
    ) -> None:
        self.slots = slots
        self.is_sender_memory = transport.is_sender_memory
        self._opened = 0
        self._transport = transport
        self._session = session
        self._waits = waits
        self._streams: list[socket.socket] = []
        self._waker = Waker()
        self._pipeline = Pipeline([], LEAF_BYTES, self._waker.writer_fileno()) if slots[0].is_cpu else None
        self._has_pull = session.num_streams == 0 and type(transport).pull is not ReceiveTransport.pull
        self._num_put = self._num_taken = self._busy_ns = 0
        self._stops: deque[int] = deque()
        """Numbers of buckets to wait for together, those of one announcement."""

    @property
    def opened(self) -> int:
        """Number of the sync for which the streams were opened; or the generation of the process group."""
        return self._opened if self._session.num_streams else self._transport.generation

    @property
    def reads_ahead(self) -> bool:
        """Whether buckets can be begun before those in front of them are finished."""
        return self._pipeline is not None and not self._has_pull

    @property
    def busy_s(self) -> float:
        """Seconds that the native thread has spent on verifying and unpacking in this sync."""
        return 0.0 if self._pipeline is None else (self._pipeline.busy_ns() - self._busy_ns) / 1e9

    def open(self, sync: int, timeout_s: float) -> None:
        """Begin a sync; open the streams if they are closed.

        Raises:
            ConnectionError: the sender is gone.
        """
        self._reset()
        self._busy_ns = 0 if self._pipeline is None else self._pipeline.busy_ns()
        if len(self._streams) == self._session.num_streams:
            return
        self.close()
        self._opened = sync
        for index in range(self._session.num_streams):
            stream = close_in_children(self._transport.dial_stream())
            self._streams.append(stream)
            stream.settimeout(timeout_s)
            stream.sendall(encode(Stream(self._session.ticket, index, sync), 0))
            stream.setblocking(True)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", PATIENCE_S, 0))

    def begin(self, bucket: Bucket, pieces: Sequence[UnpackedPiece], *, is_stop: bool) -> bool:
        """Begin a bucket. See `rl_ckpt.receiver.unpacker.BucketSource`."""
        if self._pipeline is None:
            return False
        if self._has_pull:
            self.fetch(bucket)
        stream = self._streams[bucket.sequence % len(self._streams)].fileno() if self._streams else -1
        self._num_put = self._pipeline.unpack(self.slots[bucket.slot], stream, bucket.used_bytes, list(pieces))
        if is_stop:
            self._stops.append(self._num_put)
        if self._streams or self._num_put > self._num_taken + 1:
            self._pipeline.start()
        return True

    def finish(self, meanwhile: Callable[[], None]) -> list[list[int]]:
        """Leaf digests of the oldest bucket that was begun. See `rl_ckpt.receiver.unpacker.BucketSource`."""
        pipeline = self._pipeline
        assert pipeline is not None, "nothing was begun"
        if self._streams or self._num_put > self._num_taken + 1:
            stop = self._stops[0] if self._stops else self._num_put
            if pipeline.num_done() <= self._num_taken:

                def is_done() -> bool:
                    meanwhile()
                    return pipeline.wake_at(self._num_taken, stop)

                self._waits.until_moved(self._waker, is_done, pipeline.num_bytes)
        else:
            pipeline.help(self._num_put)
        ((error, leaves),) = pipeline.take(1)
        self._num_taken += 1
        while self._stops and self._stops[0] <= self._num_taken:
            self._stops.popleft()
        if error:
            self._waits.ended()
        return leaves

    def fetch(self, bucket: Bucket) -> None:
        """Have the transport bring a bucket into its slot."""
        self._transport.pull(bucket.slot, self.slots[bucket.slot][: bucket.used_bytes], self._waits)

    def refresh(self, slot: int) -> bool:
        """Discard private writes to a slot. See `rl_ckpt.receiver.unpacker.BucketSource`."""
        return self._transport.refresh(slot)

    def close(self) -> None:
        """Close the streams, dropping unread payload; the next sync opens new ones."""
        self._reset()
        for stream in self._streams:
            stream.close()
        self._streams = []
        self._transport.leave_group()

    def release(self) -> None:
        """Close for good."""
        self.close()
        if self._pipeline is not None:
            self._pipeline.close()
        self._waker.close()

    def _reset(self) -> None:
        """Drop what was begun; a read that is under way shuts its stream down."""
        if self._pipeline is not None:
            self._pipeline.cancel()
        self._num_put = self._num_taken = 0
        self._stops.clear()
