"""Client of `shm` and `file` queues: requests over a UNIX socket, extents in shared memory.

A put writes one extent to shared memory of its own process, whose descriptor the server keeps. A get learns the
locations of its rows, receives descriptors of segments that are new to it, and maps them.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_csrc import ipc
from rl_csrc.ipc import SharedMemory
from rl_tq.client.client import QueueClient
from rl_tq.client.mappings import NO_PIN, MappedSegments, Pin
from rl_tq.client.session import Session
from rl_tq.columns.locations import find_runs, unpack_location
from rl_tq.errors import ServerLostError
from rl_tq.memory.arena import Arena
from rl_tq.memory.generations import GenerationReader
from rl_tq.memory.pool import RESERVE_S
from rl_tq.protocol.framing import Inbox, pack, send_some

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_tq.columns.extent import ExtentView, Layout, LocatedColumns, Opened
    from rl_tq.protocol.framing import Place
    from rl_tq.protocol.service import Message
    from rl_tq.types import BatchMeta

_IDLE_S = 0.02
"""Seconds for which the background thread leaves the socket to calling threads."""


class UnixConnection:
    """UNIX-socket `Connection` to the server; messages can carry descriptors of segments."""

    def __init__(self, address: str, socket_name: str, timeout_s: float) -> None:
        """Connect, and wait for the server's greeting.

        Raises:
            ServerLostError: no server listens there, or it refuses this client.
        """
        try:
            self._socket, server = ipc.connect(socket_name, timeout_s=timeout_s)
        except PermissionError as error:
            raise ServerLostError(f"{address} is not used: {error.strerror}") from error
        except OSError as error:
            raise ServerLostError(
                f"no process serves {address} on this host ({error.strerror}): start it with rl_tq.serve, and check "
                "that both processes share a network namespace"
            ) from error
        self.server = f" (process {server.pid})"
        self._inbox = Inbox(self._socket)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self.hello = self._greet(address, timeout_s)
        """The server's first message, and the descriptor that came with it."""

    def _greet(self, address: str, timeout_s: float) -> tuple[Message, int | None]:
        why = f"it did not greet within {timeout_s} s"
        try:
            for message, fd in self.receive(timeout_s):
                if message.get("op") == "hello":
                    return message, fd
                why = str(message.get("message"))
        except (OSError, ValueError) as error:
            why = f"it closed the connection: {error}"
        self.close()
        raise ServerLostError(f"the queue {address}{self.server} is lost: {why}")

    def send(self, message: Message, extra: SharedMemory | None) -> None:
        """See `Connection`; the attachment is a segment, sent as its descriptor."""
        data: bytes | memoryview = pack(message, has_fd=extra is not None)
        sent = send_some(self._socket, data, None if extra is None else extra.fd)
        while sent < len(data):
            data = memoryview(data)[sent:]
            sent = send_some(self._socket, data, None)

    def receive(self, timeout_s: float, place: Place | None = None) -> Sequence[tuple[Message, int | None]]:
        """See `Connection`."""
        del place  # no payloads on this connection
        # poll, because a thread blocked in recv is also woken when the server reads its request.
        return self._inbox.receive() if self._poll.poll(1e3 * timeout_s) else ()

    def shut(self) -> None:
        """See `Connection`."""
        with contextlib.suppress(OSError):  # the other side did it already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See `Connection`."""
        self._inbox.close()
        self._socket.close()


class ShmQueue(QueueClient):
    """Client of a queue in shared memory, in any process of the same host and user."""

    def __init__(self, address: str, socket_name: str, *, timeout_s: float, host: Any = None) -> None:
        super().__init__(address, timeout_s=timeout_s)
        self.host = host
        self._readers = MappedSegments()
        self._reusable: deque[int] = deque()
        self._to_seal: deque[int] = deque()
        connection = UnixConnection(address, socket_name, timeout_s)
        self._session: Session[Pin] = Session(address, connection, note=self._note, hold=self._hold, drop=Pin.release)
        hello, generations = connection.hello
        self._generations = None if generations is None else GenerationReader(generations)
        directory = None if hello["directory"] is None else Path(hello["directory"])
        self._arena = Arena(self._announce, self._seal, self._retire, directory)
        self._idler = threading.Thread(target=self._read_idly, name=f"rl-tq-client-{address}", daemon=True)
        self._idler.start()

    def close(self) -> None:
        """See `TransferQueue.close`."""
        if not self._session.is_of_this_process:
            return
        self._session.leave()
        self._idler.join()
        if self.host is not None:
            self.host.close()

    # What QueueClient asks for

    def _call(self, request: Message, timeout_s: float) -> Message:
        self._session.check()
        self._tidy()
        reply, pins = self._session.request(request, timeout_s)
        pins.release()
        return reply

    def _store_extent(self, layout: Layout, request: Message, timeout_s: float) -> Message:
        self._session.check()
        self._tidy()  # reuse segments that the server released with its last reply
        block = self._arena.allocate(layout.nbytes)
        try:
            try:
                layout.write(block.memory)
            except BaseException:
                if block.is_alone:
                    self._seal(block.segment)
                raise
            request["segment"], request["offset"], request["is_last"] = block.segment, block.offset, block.is_alone
            return self._session.request(request, timeout_s)[0]
        finally:
            self._arena.settle(block)

    def _locate(self, request: Message, *, is_copied: bool) -> tuple[Message, Opened]:
        self._session.check()
        self._tidy()
        reply, pins = self._session.request(request, self.timeout_s)
        try:
            opened: dict[int, ExtentView] = {
                extent: pins.open(number, extent, offset, nbytes, is_copied=is_copied)
                for extent, number, offset, nbytes in reply["places"]
            }
        finally:
            pins.release()
        return reply, opened

    def _find_here(
        self, meta: BatchMeta, columns: Sequence[str], *, is_copied: bool
    ) -> tuple[LocatedColumns, Opened] | None:
        self._session.check()
        if (
            self._generations is None
            or (found := find_runs(meta.rows, columns, [unpack_location(each) for each in meta.places])) is None
        ):
            return None
        located, places = found
        pins = self._readers.pin({place.segment for place in places})
        if pins is None:
            return None
        try:
            # Pinned first: an extent whose generation is valid now is not reused until it is opened.
            if not all(self._generations.is_valid(place.slot, place.generation) for place in places):
                return None
            opened: dict[int, ExtentView] = {
                place.extent: pins.open(place.segment, place.extent, place.offset, place.nbytes, is_copied=is_copied)
                for place in places
            }
        finally:
            pins.release()
        return located, opened

    # Memory

    def _announce(self, number: int, segment: SharedMemory, is_packed: bool, file: str | None) -> None:
        self._session.send({"op": "segment", "segment": number, "is_packed": is_packed, "file": file}, segment)
        segment.close()

    def _seal(self, number: int) -> None:
        self._session.send({"op": "seal", "segment": number})

    def _retire(self, number: int) -> None:
        self._session.send({"op": "retire", "segment": number})

    def _tidy(self) -> None:
        """Reuse segments that the server released, and release freed segments that this process no longer uses."""
        while self._reusable:
            with contextlib.suppress(IndexError):  # another thread does the same
                self._arena.reuse(self._reusable.popleft())
        while self._to_seal:
            with contextlib.suppress(IndexError):
                self._arena.leave(self._to_seal.popleft())
        if self._readers.freed and (done := self._readers.take_released()):
            self._session.send({"op": "released", "segments": done})

    # What the server says

    def _note(self, message: Message, fd: int | None) -> None:
        match message["op"]:
            case "segment":
                segment = None if fd is None else SharedMemory(fd)
                self._readers.add(message["segment"], segment, is_packed=message["is_packed"])
            case "freed":
                self._readers.free(message["segments"])
            case "reuse":
                self._reusable.append(message["segment"])
            case "fill no more":
                self._to_seal.append(message["segment"])
            case other:
                raise ValueError(f"unknown message {other!r}")

    def _hold(self, answer: Message, _: int | None) -> Pin:
        """Pin the segments that a reply names: the next message may free one."""
        if "places" not in answer:
            return NO_PIN
        pins = self._readers.pin({place[1] for place in answer["places"]})
        if pins is None:
            raise ValueError("an answer names a segment that was never sent")
        return pins

    def _read_idly(self) -> None:
        trimmed = time.monotonic()
        try:
            while not self._session.is_lost:
                is_quiet = not (self._readers.freed or self._arena.has_spare)
                if not self._session.read_idly(60.0 if is_quiet else _IDLE_S):
                    time.sleep(_IDLE_S)
                with contextlib.suppress(ServerLostError):
                    self._tidy()
                    if time.monotonic() - trimmed > RESERVE_S / 4:
                        trimmed = time.monotonic()
                        self._arena.trim(RESERVE_S)
        finally:
            self._session.lose("its reader ended")
            self._readers.clear()
            self._arena.close()
            self._session.close()
