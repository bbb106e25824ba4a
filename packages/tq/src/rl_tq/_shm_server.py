"""The control server of `shm`: one thread that answers every client of one queue over an abstract UNIX socket.

It holds the bookkeeping and one descriptor per segment. It never maps one, never waits for a client, and parks who
waits.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from rl_tq._segments import Segment
from rl_tq._service import Message, Service, error_reply
from rl_tq._wire import Inbox, close_after_fork, pack, peer, send_some
from rl_tq.errors import AddressError, TransferQueueError

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    inbox: Inbox
    pid: int
    outbox: deque[tuple[memoryview, Segment | None]] = field(default_factory=deque[tuple[memoryview, "Segment | None"]])
    own: dict[int, int] = field(default_factory=dict[int, int])
    """The client's number of a segment that it made, to ours."""
    known: set[int] = field(default_factory=set[int])
    """Segments whose descriptor it was sent."""
    parked: set[tuple[_Connection, int]] = field(default_factory=set["tuple[_Connection, int]"])


@dataclass(slots=True, kw_only=True)
class _Held:
    segment: Segment
    is_packed: bool
    num_extents: int = 0
    is_sealed: bool = False


class ControlServer:
    """Serves one queue from a thread of this process until `close`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._listener = listen(name)
        self._wake_read, self._wake_write = socket.socketpair()
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for each in (self._listener, self._wake_read, self._wake_write):
            close_after_fork(each)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._service = Service()
        self._connections: dict[int, _Connection] = {}
        self._segments: dict[int, _Held] = {}
        self._extents: dict[int, tuple[int, int, int]] = {}
        self._numbers = count(1)
        self._thread = threading.Thread(target=self._run, name=f"rl-tq-server-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the queue: every client loses it at once, every segment goes when its last reader does. Idempotent."""
        if self._thread.is_alive():
            self._wake_write.send(b"x")
            self._thread.join()

    # The loop

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            for connection in list(self._connections.values()):
                self._drop(connection)
            self._selector.close()
            for each in (self._listener, self._wake_read, self._wake_write):
                each.close()
            os.close(self._spare_fd)
            self._segments.clear()

    def _turn(self) -> bool:
        deadline = self._service.next_deadline()
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is self._wake_read:
                return False
            if key.fileobj is self._listener:
                self._accept()
            elif connection := self._connections.get(key.fd):
                self._serve(connection, events)
        self._deliver()
        return True

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError as error:
            if error.errno == errno.EMFILE:
                self._turn_away()
            return  # else the client left already
        client.setblocking(False)
        close_after_fork(client)
        pid, uid = peer(client)
        if uid != os.geteuid():
            refusal = f"it belongs to user {os.geteuid()}, and process {pid} of user {uid} may not use it"
            client.send(pack({"op": "refused", **error_reply(PermissionError(refusal))}))
            client.close()
            return
        self._connections[client.fileno()] = _Connection(client, Inbox(client), pid)
        self._selector.register(client, selectors.EVENT_READ)

    def _turn_away(self) -> None:
        """Close the connection of a client for whom no descriptor is left, so that it learns of it now."""
        os.close(self._spare_fd)
        try:
            self._listener.accept()[0].close()
        finally:
            self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _serve(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                for message, fd in connection.inbox.receive():
                    self._take(connection, message, fd)
                    self._deliver()
            if connection.outbox:
                self._flush(connection)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            # It closed, died, or does not speak our language: nothing of it can be answered any more.
            self._drop(connection)

    def _take(self, connection: _Connection, message: Message, fd: int | None) -> None:
        try:
            reply = self._handle(connection, message, fd)
        except TransferQueueError as error:
            reply = error_reply(error)
        except Exception as error:  # noqa: BLE001 - whatever failed is the caller's to see, and the others go on
            reply = error_reply(error)
        if reply is not None and "id" in message:
            self._send(connection, {**reply, "id": message["id"]})

    def _send(self, connection: _Connection, message: Message, segment: Segment | None = None) -> None:
        connection.outbox.append((memoryview(pack(message, has_fd=segment is not None)), segment))
        if len(connection.outbox) == 1:
            self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        """Send what the client takes now; the selector says when it takes more."""
        try:
            while connection.outbox:
                data, segment = connection.outbox[0]
                sent = send_some(connection.socket, data, None if segment is None else segment.fd)
                if sent == len(data):
                    connection.outbox.popleft()
                else:
                    connection.outbox[0] = (data[sent:], None)
        except BlockingIOError:
            pass
        except OSError:
            connection.outbox.clear()  # it is gone: reading from it says so next
        writing = selectors.EVENT_WRITE if connection.outbox else 0
        self._selector.modify(connection.socket, selectors.EVENT_READ | writing)

    def _drop(self, connection: _Connection) -> None:
        """Forget a client: its requests, and its right to put more into its segments. What it published stays."""
        if self._connections.pop(connection.socket.fileno(), None) is None:
            return
        self._selector.unregister(connection.socket)
        connection.inbox.close()
        connection.socket.close()
        for key in connection.parked:
            self._service.withdraw(key)
        for segment in connection.own.values():
            self._seal(segment)

    def _deliver(self) -> None:
        settled, freed = self._service.drain(time.monotonic())
        for (connection, number), reply in settled:
            connection.parked.discard((connection, number))
            self._send(connection, {**reply, "id": number})
        self._free(freed)

    # The requests

    def _handle(self, connection: _Connection, message: Message, fd: int | None) -> Message | None:
        match message["op"]:
            case "segment":
                if fd is not None:
                    self._admit(connection, message, fd)
            case "seal":
                self._seal(connection.own.pop(message["segment"]))
            case "withdraw":
                self._service.withdraw((connection, message["request"]))
            case "put":
                return self._put(connection, message)
            case "locate":
                return self._locate(connection, message)
            case "wait":
                return self._wait(connection, message)
            case "stats":
                return self._stats(message)
            case _:
                return self._service.handle(message)
        return None

    def _admit(self, connection: _Connection, message: Message, fd: int) -> None:
        number = next(self._numbers)
        self._segments[number] = _Held(segment=Segment(fd), is_packed=message["is_packed"])
        connection.own[message["segment"]] = number

    def _put(self, connection: _Connection, message: Message) -> Message | None:
        number = connection.own.get(message["segment"])
        if number is None:
            raise TransferQueueError(
                f"the server of shm://{self.name} (process {os.getpid()}) could not take the memory of this put: "
                f"it has no file descriptor left beside {len(self._segments)} segments; clear rows, put more rows at "
                "once, or raise `ulimit -n`"
            )
        held = self._segments[number]
        extent = next(self._numbers)
        try:
            if message["offset"] + message["nbytes"] > held.segment.nbytes:
                raise TransferQueueError(f"an extent of {message['nbytes']} bytes does not lie in its segment")
            reply = self._service.handle({**message, "extent": extent})
            self._extents[extent] = (number, message["offset"], message["nbytes"])
            held.num_extents += 1
        finally:
            if message["is_last"]:
                self._seal(connection.own.pop(message["segment"]))
        return reply

    def _locate(self, connection: _Connection, message: Message) -> Message | None:
        reply = self._service.handle(message)
        assert reply is not None
        places = [(extent, *self._extents[extent]) for extent in reply["extents"]]
        for number in {place[1] for place in places} - connection.known:
            held = self._segments[number]
            announced = {"op": "segment", "segment": number, "is_packed": held.is_packed}
            self._send(connection, announced, held.segment)
            connection.known.add(number)
        return {"columns": reply["columns"], "places": places}

    def _wait(self, connection: _Connection, message: Message) -> Message | None:
        key = (connection, message["id"])
        deadline = time.monotonic() + message["timeout_s"]
        reply = self._service.handle({**message, "key": key, "deadline": deadline})
        if reply is None:
            connection.parked.add(key)
        return reply

    def _stats(self, message: Message) -> Message:
        memory: dict[str, Any] = {
            "server_pid": os.getpid(),
            "clients": sorted(connection.pid for connection in self._connections.values()),
            "segments": len(self._segments),
        }
        return {**(self._service.handle(message) or {}), **memory}

    # Segments

    def _seal(self, number: int) -> None:
        if number in self._segments:
            self._segments[number].is_sealed = True
            self._free_if_done([number])

    def _free(self, extents: Iterable[int]) -> None:
        touched: set[int] = set()
        for extent in extents:
            number, _, _ = self._extents.pop(extent)
            self._segments[number].num_extents -= 1
            touched.add(number)
        self._free_if_done(touched)

    def _free_if_done(self, numbers: Iterable[int]) -> None:
        """Let go of segments that hold nothing and will not be put to, and have every client do so too."""
        done = {n for n in numbers if self._segments[n].is_sealed and not self._segments[n].num_extents}
        for number in done:
            del self._segments[number]
        for connection in list(self._connections.values()):
            if gone := connection.known & done:
                connection.known -= gone
                self._send(connection, {"op": "freed", "segments": sorted(gone)})


def socket_name(name: str) -> str:
    """The abstract address of a queue. It is the kernel's: it vanishes with the server, and no file has it.

    Raises:
        AddressError: the name is too long.
    """
    address = f"\0rl-tq/{name}"
    if len(address.encode()) > 107:
        raise AddressError(f"the name of shm://{name} has {len(name.encode())} bytes; at most 100 are possible")
    return address


def listen(name: str) -> socket.socket:
    """A socket that listens for the clients of a queue."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(socket_name(name))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise AddressError(
            f"shm://{name} cannot be served: {error.strerror}; take another name, or close that queue"
        ) from error
    except AddressError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
