"""`shm://NAME`: a queue for the processes of one host and user: tensors in shared memory, references on a socket.

The process that serves holds the bookkeeping. A put writes one extent into memory that its process made, whose
descriptor the server keeps; a get is told where its rows lie, receives the descriptors that it has not seen, and maps
them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import uuid
from concurrent.futures import Future
from itertools import count
from typing import TYPE_CHECKING

from rl_tq._client import QueueClient
from rl_tq._extent import Layout, Views, read_extent
from rl_tq._gather import Opened, OpenExtent
from rl_tq._segments import Arena, Segment
from rl_tq._service import Message, raise_error
from rl_tq._shm_server import ControlServer, socket_name
from rl_tq._wire import Inbox, close_after_fork, pack, peer, send_some
from rl_tq.errors import ServerLostError, TransferQueueError, WaitTimeoutError

if TYPE_CHECKING:
    import torch

_GRACE_S = 5.0
"""The server answers by the deadline of a request; this much later it counts as stuck."""


class _Readable:
    """A segment as its readers have it."""

    def __init__(self, segment: Segment, *, is_packed: bool) -> None:
        self._segment = segment
        self._is_packed = is_packed
        self._lock = threading.Lock()
        self._memory: torch.Tensor | None = None
        self._views: dict[int, Views] = {}

    def open(self, offset: int, nbytes: int) -> OpenExtent:
        """An extent in it.

        Small ones share a mapping, so what is given of them is copied. A large one is mapped for this call alone, so
        that views of it may be given away: nobody else sees writes to them, and they stay valid after a clear.
        """
        if not self._is_packed:
            return OpenExtent(views=read_extent(self._segment.map(is_shared=False)[:nbytes]), is_private=True)
        with self._lock:
            if self._memory is None:
                self._memory = self._segment.map(is_shared=True)
            if offset not in self._views:
                self._views[offset] = read_extent(self._memory[offset : offset + nbytes])
            return OpenExtent(views=self._views[offset], is_private=False)


class ShmQueue(QueueClient):
    """A client in any process of the host. One thread of its own reads what the server sends."""

    def __init__(self, name: str, *, timeout_s: float, server: ControlServer | None = None) -> None:
        super().__init__(f"shm://{name}", timeout_s=timeout_s)
        self._server = server
        self._pid = os.getpid()
        self._socket = _dial(name, timeout_s)
        self._server_pid, _ = peer(self._socket)
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._ids = count(1)
        self._pending: dict[int, Future[tuple[Message, dict[int, _Readable | None]]]] = {}
        self._segments: dict[int, _Readable | None] = {}
        self._why_lost: str | None = None
        self._arena = Arena(self._announce, self._seal)
        self._reader = threading.Thread(target=self._read, name=f"rl-tq-client-{name}", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """See `TransferQueue.close`."""
        if os.getpid() != self._pid:
            return
        self._lose("this client was closed")
        self._reader.join()
        if self._server is not None:
            self._server.close()

    # What QueueClient asks for

    def _call(self, request: Message, timeout_s: float) -> Message:
        return self._request(request, timeout_s)[0]

    def _store_extent(self, layout: Layout, request: Message) -> Message:
        block = self._arena.allocate(layout.nbytes)
        try:
            layout.write(block.memory)
        except BaseException:
            if block.is_alone:
                self._seal(block.segment)
            raise
        place = {"segment": block.segment, "offset": block.offset, "is_last": block.is_alone}
        return self._call({**request, **place}, self.timeout_s)

    def _locate(self, request: Message) -> tuple[Message, Opened]:
        reply, segments = self._request(request, self.timeout_s)
        opened: dict[int, OpenExtent] = {}
        for extent, number, offset, nbytes in reply["places"]:
            segment = segments[number]
            if segment is None:
                raise TransferQueueError(
                    f"process {os.getpid()} could not receive a segment of {self.address}: it has no file descriptor "
                    "left; raise `ulimit -n`"
                )
            opened[extent] = segment.open(offset, nbytes)
        return reply, opened

    # Requests

    def _request(self, request: Message, timeout_s: float) -> tuple[Message, dict[int, _Readable | None]]:
        if os.getpid() != self._pid:
            raise TransferQueueError(
                f"this client of {self.address} was made in process {self._pid} and does not survive a fork: call "
                f"rl_tq.connect({self.address!r}) in process {os.getpid()}"
            )
        number = next(self._ids)
        future: Future[tuple[Message, dict[int, _Readable | None]]] = Future()
        with self._lock:
            self._check_alive()
            self._pending[number] = future
        try:
            self._send({**request, "id": number})
            reply = future.result(timeout=timeout_s + _GRACE_S)
        except TimeoutError as error:
            self._withdraw(number)
            raise WaitTimeoutError(
                f"the server of {self.address} (process {self._server_pid}) did not answer {request['op']!r} within "
                f"{timeout_s} s and {_GRACE_S} s more"
            ) from error
        except BaseException:
            self._withdraw(number)
            raise
        raise_error(reply[0])
        return reply

    def _withdraw(self, number: int) -> None:
        """Nobody waits for this answer any more: have the server forget it, if it is still there to be told."""
        with self._lock:
            was_pending = self._pending.pop(number, None) is not None
        if was_pending and self._why_lost is None:
            self._send({"op": "withdraw", "request": number})

    def _send(self, message: Message, segment: Segment | None = None) -> None:
        data = memoryview(pack(message, has_fd=segment is not None))
        fd = None if segment is None else segment.fd
        with self._send_lock:
            try:
                while data:
                    data = data[send_some(self._socket, data, fd) :]
                    fd = None
            except OSError as error:
                stuck = isinstance(error, BlockingIOError)
                self._lose(f"it took no message for {self.timeout_s} s" if stuck else f"sending to it failed: {error}")
        with self._lock:
            self._check_alive()

    def _announce(self, number: int, segment: Segment, is_packed: bool) -> None:
        self._send({"op": "segment", "segment": number, "is_packed": is_packed}, segment)

    def _seal(self, number: int) -> None:
        self._send({"op": "seal", "segment": number})

    # The reader's thread

    def _read(self) -> None:
        inbox = Inbox(self._socket)
        try:
            while True:
                for message, fd in inbox.receive():
                    self._take(message, fd)
        except OSError as error:
            self._lose(f"it closed or died ({error})")
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it, whatever it is
            self._lose(f"its message could not be read ({error!r})")
        finally:
            inbox.close()
            self._segments.clear()
            self._arena.close()
            self._socket.close()

    def _take(self, message: Message, fd: int | None) -> None:
        match message.get("op"):
            case "segment":
                segment = None if fd is None else _Readable(Segment(fd), is_packed=message["is_packed"])
                self._segments[message["segment"]] = segment
            case "freed":
                for number in message["segments"]:
                    del self._segments[number]
            case "refused":
                self._lose(message["message"])
            case _:
                with self._lock:
                    future = self._pending.pop(message["id"], None)
                if future is not None:
                    # Taken now: the next message may say that a segment was freed.
                    numbers = {place[1] for place in message.get("places", ())}
                    future.set_result((message, {number: self._segments[number] for number in numbers}))

    def _lose(self, why: str) -> None:
        """End the session: whoever waits is told, and so is whoever calls from now on."""
        with self._lock:
            if self._why_lost is None:
                self._why_lost = why
            pending, self._pending = self._pending, {}
        for future in pending.values():
            future.set_exception(self._lost())
        with contextlib.suppress(OSError):  # the other side did it already
            self._socket.shutdown(socket.SHUT_RDWR)

    def _check_alive(self) -> None:
        if self._why_lost is not None:
            raise self._lost()

    def _lost(self) -> ServerLostError:
        return ServerLostError(f"the queue {self.address} (process {self._server_pid}) is lost: {self._why_lost}")


def serve(name: str, *, timeout_s: float) -> ShmQueue:
    """See `rl_tq.serve`."""
    name = name or uuid.uuid4().hex[:12]
    server = ControlServer(name)
    try:
        return ShmQueue(name, timeout_s=timeout_s, server=server)
    except BaseException:
        server.close()
        raise


def connect(name: str, *, timeout_s: float) -> ShmQueue:
    """See `rl_tq.connect`."""
    return ShmQueue(name, timeout_s=timeout_s)


def _dial(name: str, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    close_after_fork(connection)
    # Sending never waits longer than this; receiving is the reader's, who waits for ever and is woken by a shutdown.
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    try:
        connection.connect(socket_name(name))
    except OSError as error:
        connection.close()
        raise ServerLostError(
            f"nobody serves shm://{name} on this host ({error.strerror}): start it with rl_tq.serve, and check that "
            "both processes share a network namespace"
        ) from error
    _, uid = peer(connection)
    if uid != os.geteuid():
        connection.close()
        raise ServerLostError(
            f"shm://{name} is served by user {uid}, and this process is user {os.geteuid()}'s: not used"
        )
    return connection
