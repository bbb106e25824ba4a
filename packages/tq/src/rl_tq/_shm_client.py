"""The client of a control server on the same host: requests over a UNIX socket, extents in shared memory.

A put writes one extent into memory that its process made, whose descriptor the server keeps; a get is told where its
rows lie, receives the descriptors that it has not seen, and maps them.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_tq._client import QueueClient
from rl_tq._gather import LocatedColumns, Opened, OpenExtent
from rl_tq._parking import Slot, Turnstile
from rl_tq._places import StampReader, find_runs
from rl_tq._segments import RESERVE_S, Segment
from rl_tq._service import Message, raise_error
from rl_tq._spill import Arenas
from rl_tq._wire import Inbox, close_after_fork, pack, peer, send_some
from rl_tq.errors import ServerLostError, TransferQueueError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rl_tq._extent import Layout
    from rl_tq.types import BatchMeta

GRACE_S = 5.0
"""The server answers by the deadline of a request; this much later it counts as stuck."""
_IDLE_S = 0.02
"""How long the client's own thread leaves the socket to the threads that call."""


class _Readable:
    """A segment as its readers have it."""

    def __init__(self, segment: Segment, *, is_packed: bool) -> None:
        self._segment = segment
        self._is_packed = is_packed
        self._lock = threading.Lock()
        self._memory: torch.Tensor | None = None
        self._extents: dict[int, OpenExtent] = {}
        self._num_pins = 0
        self._num_mapped = 0
        self._unmapped: list[None] = []
        """One item per mapping that ended: appending is all that may be done in the thread that drops a tensor."""

    def pin(self) -> None:
        """An answer that names this segment arrived: it will be opened."""
        with self._lock:
            self._num_pins += 1

    def unpin(self) -> None:
        """It was opened, or whoever asked is gone."""
        with self._lock:
            self._num_pins -= 1

    def open(self, extent: int, offset: int, nbytes: int, *, is_copied: bool) -> OpenExtent:
        """An extent in it.

        Small ones, and those that are copied anyway, share a mapping that stays. A large one is mapped for this call
        alone, so that views of it may be given away: nobody else sees writes to them, and they stay valid after a
        clear.
        """
        with self._lock:
            if not self._is_packed and not is_copied:
                return OpenExtent(memory=self._map(is_shared=False)[:nbytes], is_private=True)
            if self._memory is None:
                self._memory = self._map(is_shared=True)
            if extent not in self._extents:
                self._extents[extent] = OpenExtent(memory=self._memory[offset : offset + nbytes], is_private=False)
            return self._extents[extent]

    def let_go(self) -> None:
        """The server freed it: no other answer will name it."""
        with self._lock:
            self._memory = None
            self._extents = {}

    @property
    def is_looked_at(self) -> bool:
        """Whether a tensor of this process still shares its memory, or is about to."""
        with self._lock:
            if self._num_pins:
                return True
            self._memory, self._extents = None, {}
            return len(self._unmapped) < self._num_mapped

    def _map(self, *, is_shared: bool) -> torch.Tensor:
        self._num_mapped += 1
        unmapped = self._unmapped
        return self._segment.map(is_shared=is_shared, when_gone=lambda: unmapped.append(None))


Reply = tuple[Message, "dict[int, _Readable | None]"]


class ShmQueue(QueueClient):
    """A client in any process of the host."""

    def __init__(self, address: str, socket_name: str, *, timeout_s: float, host: Any = None) -> None:
        super().__init__(address, timeout_s=timeout_s)
        self._host = host
        self._pid = os.getpid()
        self._socket = _dial(address, socket_name, timeout_s)
        self._server_pid, _ = peer(self._socket)
        self._inbox = Inbox(self._socket)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._ids = count(1)
        self._pending: dict[int, Slot[Reply]] = {}
        self._segments: dict[int, _Readable | None] = {}
        self._freed: dict[int, _Readable | None] = {}
        self._reusable: deque[int] = deque()
        self._to_seal: deque[int] = deque()
        self._why_lost: str | None = None
        self._stamps: StampReader | None = None
        self._turnstile = Turnstile(self._read)
        directory = self._greet()
        self._arena = Arenas(self._announce, self._seal, self._retire, directory)
        self._idler = threading.Thread(target=self._read_idly, name=f"rl-tq-client-{address}", daemon=True)
        self._idler.start()

    def close(self) -> None:
        """See `TransferQueue.close`."""
        if os.getpid() != self._pid:
            return
        if self._why_lost is None:
            with contextlib.suppress(ServerLostError):
                self._send({"op": "bye"})
        self._lose("this client was closed")
        self._idler.join()
        if self._host is not None:
            self._host.close()

    # What QueueClient asks for

    def _call(self, request: Message, timeout_s: float) -> Message:
        return self._request(request, timeout_s)[0]

    def _store_extent(self, layout: Layout, request: Message, timeout_s: float) -> Message:
        reply = self._store_in(None, layout, request, timeout_s)
        return self._store_in(reply["spill"], layout, request, timeout_s) if "spill" in reply else reply

    def _store_in(self, spill: str | None, layout: Layout, request: Message, timeout_s: float) -> Message:
        """The same, in memory or in a file of a directory."""
        self._check_process()
        self._tidy()  # what the server gave back with its last answer is there for this put
        block = self._arena.allocate(layout.nbytes, spill)
        try:
            layout.write(block.memory)
        except BaseException:
            if block.is_alone:
                self._seal(block.segment)
            raise
        place = {"segment": block.segment, "offset": block.offset, "is_last": block.is_alone}
        if spill is not None:
            place["is_spilled"] = True
        return self._call({**request, **place}, timeout_s)

    def _locate(self, request: Message, *, is_copied: bool) -> tuple[Message, Opened]:
        reply, segments = self._request(request, self.timeout_s)
        try:
            opened: dict[int, OpenExtent] = {}
            for extent, number, offset, nbytes in reply["places"]:
                segment = segments[number]
                if segment is None:
                    raise TransferQueueError(
                        f"process {os.getpid()} could not receive a segment of {self.address}: it has no file "
                        "descriptor left; raise `ulimit -n`"
                    )
                opened[extent] = segment.open(extent, offset, nbytes, is_copied=is_copied)
        finally:
            _unpin(segments)
        return reply, opened

    def _find_here(
        self, meta: BatchMeta, columns: Sequence[str], *, is_copied: bool
    ) -> tuple[LocatedColumns, Opened] | None:
        self._check_process()
        found = None if self._stamps is None else find_runs(meta.rows, columns, meta.places)
        if found is None or self._stamps is None:
            return None
        located, places = found
        segments: dict[int, _Readable | None] = {}
        with self._lock:
            self._check_alive()
            for number in {place.segment for place in places}:
                if (readable := self._segments.get(number)) is None:
                    _unpin(segments)
                    return None
                readable.pin()
                segments[number] = readable
        try:
            # Pinned first: from here on, what the stamps say is valid stays where it is until it is opened.
            if not self._stamps.are_valid(places):
                return None
            opened: dict[int, OpenExtent] = {}
            for place in places:
                segment = segments[place.segment]
                assert segment is not None
                opened[place.extent] = segment.open(place.extent, place.offset, place.nbytes, is_copied=is_copied)
        finally:
            _unpin(segments)
        return located, opened

    # Requests

    def _request(self, request: Message, timeout_s: float) -> Reply:
        self._check_process()
        number = next(self._ids)
        slot: Slot[Reply] = Slot()
        with self._lock:
            self._check_alive()
            self._pending[number] = slot
        try:
            self._tidy()
            self._send({**request, "id": number})
            if not self._turnstile.wait(slot, timeout_s + GRACE_S):
                raise WaitTimeoutError(
                    f"the server of {self.address} (process {self._server_pid}) did not answer {request['op']!r} "
                    f"within {timeout_s} s and {GRACE_S} s more"
                )
        except BaseException:
            self._withdraw(number, slot)
            raise
        reply = slot.result()
        if "error" in reply[0]:
            _unpin(reply[1])
            raise_error(reply[0])
        return reply

    def _withdraw(self, number: int, slot: Slot[Reply]) -> None:
        """Nobody waits for this answer any more: have the server forget it, if it is still there to be told."""
        with self._lock:
            was_pending = self._pending.pop(number, None) is not None
        if was_pending and self._why_lost is None:
            self._send({"op": "withdraw", "request": number})
        elif not was_pending and slot.is_done and self._why_lost is None:
            _unpin(slot.result()[1])

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
        if self._why_lost is not None:
            raise self._lost()

    def _announce(self, number: int, segment: Segment, is_packed: bool, file: str | None) -> None:
        self._send({"op": "segment", "segment": number, "is_packed": is_packed, "file": file}, segment)
        segment.close()

    def _seal(self, number: int) -> None:
        self._send({"op": "seal", "segment": number})

    def _retire(self, number: int) -> None:
        self._send({"op": "retire", "segment": number})

    def _tidy(self) -> None:
        """Take back what the server says is free, and tell it which freed segments are no longer looked at."""
        with contextlib.suppress(IndexError):  # another thread does the same
            while True:
                self._arena.reuse(self._reusable.popleft())
        with contextlib.suppress(IndexError):
            while True:
                self._arena.leave(self._to_seal.popleft())
        if not self._freed:
            return
        with self._lock:
            done = [n for n, readable in self._freed.items() if readable is None or not readable.is_looked_at]
            for number in done:
                del self._freed[number]
        if done:
            self._send({"op": "released", "segments": done})

    # Reading

    def _greet(self) -> Path | None:
        """Wait for the server's first message: it accepts this client, and says where its memory is to lie."""
        deadline = time.monotonic() + self.timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if not self._poll.poll(1e3 * left):
                continue
            try:
                for message, fd in self._inbox.receive():
                    if message.get("op") == "hello":
                        self._stamps = None if fd is None else StampReader(fd)
                        directory = message["directory"]
                        return None if directory is None else Path(directory)
                    self._why_lost = str(message.get("message"))
            except (OSError, ValueError) as error:
                self._why_lost = self._why_lost or f"it closed the connection: {error}"
            if self._why_lost is not None:
                self._inbox.close()
                self._socket.close()
                raise self._lost()
        self._socket.close()
        raise ServerLostError(
            f"the server of {self.address} (process {self._server_pid}) did not greet within {self.timeout_s} s"
        )

    def _read(self, timeout_s: float) -> None:
        """Read what comes within that time, and hand it out. Only one thread at a time does."""
        if self._why_lost is not None:
            return
        try:
            if self._poll.poll(1e3 * timeout_s):
                for message, fd in self._inbox.receive():
                    self._take(message, fd)
        except OSError as error:
            self._lose(f"it closed or died ({error})")
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it, whatever it is
            self._lose(f"its message could not be read ({error!r})")

    def _read_idly(self) -> None:
        trimmed = time.monotonic()
        try:
            while self._why_lost is None:
                is_quiet = not (self._freed or self._arena.has_spare)
                if not self._turnstile.read_idly(60.0 if is_quiet else _IDLE_S) or self._turnstile.is_wanted:
                    time.sleep(_IDLE_S)
                with contextlib.suppress(ServerLostError):
                    self._tidy()
                    if time.monotonic() - trimmed > RESERVE_S / 4:
                        trimmed = time.monotonic()
                        self._arena.trim(RESERVE_S)
        finally:
            self._lose("its reader ended")
            self._inbox.close()
            self._segments.clear()
            self._freed.clear()
            self._arena.close()
            with self._send_lock:
                self._socket.close()

    def _take(self, message: Message, fd: int | None) -> None:
        match message.get("op"):
            case "segment":
                segment = None if fd is None else _Readable(Segment(fd), is_packed=message["is_packed"])
                self._segments[message["segment"]] = segment
            case "freed":
                with self._lock:
                    for number in message["segments"]:
                        readable = self._freed[number] = self._segments.pop(number)
                        if readable is not None:
                            readable.let_go()
            case "reuse":
                self._reusable.append(message["segment"])
            case "fill no more":
                self._to_seal.append(message["segment"])
            case "refused":
                self._lose(message["message"])
            case _:
                with self._lock:
                    slot = self._pending.pop(message["id"], None)
                if slot is None:
                    return
                # Taken now: the next message may say that a segment was freed.
                segments = {place[1]: self._segments[place[1]] for place in message.get("places", ())}
                for readable in segments.values():
                    if readable is not None:
                        readable.pin()
                slot.put((message, segments))

    def _lose(self, why: str) -> None:
        """End the session: whoever waits is told, and so is whoever calls from now on."""
        with self._lock:
            if self._why_lost is None:
                self._why_lost = why
            pending, self._pending = self._pending, {}
        for slot in pending.values():
            slot.fail(self._lost())
        with contextlib.suppress(OSError):  # the other side did it already
            self._socket.shutdown(socket.SHUT_RDWR)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise TransferQueueError(
                f"this client of {self.address} was made in process {self._pid} and does not survive a fork: call "
                f"rl_tq.connect({self.address!r}) in process {os.getpid()}"
            )

    def _check_alive(self) -> None:
        if self._why_lost is not None:
            raise self._lost()

    def _lost(self) -> ServerLostError:
        return ServerLostError(f"the queue {self.address} (process {self._server_pid}) is lost: {self._why_lost}")


def _unpin(segments: dict[int, _Readable | None]) -> None:
    for readable in segments.values():
        if readable is not None:
            readable.unpin()


def _dial(address: str, socket_name: str, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    close_after_fork(connection)
    # Sending never waits longer than this; receiving waits in poll.
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    try:
        connection.connect(socket_name)
    except OSError as error:
        connection.close()
        raise ServerLostError(
            f"nobody serves {address} on this host ({error.strerror}): start it with rl_tq.serve, and check that "
            "both processes share a network namespace"
        ) from error
    _, uid = peer(connection)
    if uid != os.geteuid():
        connection.close()
        raise ServerLostError(f"{address} is served by user {uid}, and this process is user {os.geteuid()}'s: not used")
    return connection
