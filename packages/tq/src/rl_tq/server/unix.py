"""UNIX-socket front of a host, for processes of its machine: an epoll loop in one thread, never blocked by a client.

Values are not sent here: clients read and write shared-memory segments, whose descriptors are passed.
"""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from rl_csrc import ipc
from rl_tq.client.shm import ShmQueue
from rl_tq.metadata.checks import LONGEST_S
from rl_tq.protocol.framing import Inbox, listen, pack, send_some
from rl_tq.protocol.service import Message, Service, error_reply
from rl_tq.server.host import QueueHost
from rl_tq.server.memory import SegmentMemory
from rl_tq.server.segment_table import Client

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    from rl_tq.durability import Journal

_Outgoing: TypeAlias = "tuple[bytes | memoryview, ipc.SharedMemory | None]"
_SMALL_BYTES = 1 << 14
_PLAIN = Service.operations.keys() - {"put", "locate", "snapshot", "stats"}
"""Operations that only the service handles, without extent memory."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Connection(Client):
    """Connection of one client."""

    socket: socket.socket
    inbox: Inbox
    pid: int
    unsent: deque[_Outgoing] = field(default_factory=deque["_Outgoing"])
    parked: set[Any] = field(default_factory=set[Any])
    """Keys of its parked requests."""
    has_left: bool = False
    """Whether it sent `bye`, and did not die."""
    is_writing: bool = False
    """Whether epoll watches it for writing."""
    fd: int
    label: str
    """Description of the client, for messages."""


class _ReplyTo(msgspec.Struct, frozen=True):
    """Destination of the reply to a parked request."""

    connection: _Connection
    number: int
    front: UnixFront

    def put(self, message: Message) -> None:
        """See `host.ReplyTo`."""
        self.connection.parked.discard(self)
        self.front.send(self.connection, {**message, "id": self.number})


class UnixFront:
    """Front that serves a host from its own thread until `close`."""

    def __init__(self, host: QueueHost, memory: SegmentMemory, abstract: str) -> None:
        """Listen at an abstract name.

        Raises:
            AddressError: the name is taken.
        """
        self.address = host.address
        self._host = host
        self._memory = memory
        self._directory = None if host.journal is None else str(host.journal.directory)
        self._connections: dict[int, _Connection] = {}
        self._to_flush: list[_Connection] = []
        self._listener = listen(host.address, abstract)
        self._waker = ipc.Waker()
        self._is_closing = False
        self._ident = 0
        self._sleeps_until: float | None = None
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._epoll.register(self._waker, select.EPOLLIN)
        memory.send_to_client = self.send
        host.flush = self._flush_all
        self._thread = threading.Thread(target=self._run, name=f"rl-tq-server-{host.address}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close every connection: each client loses the queue at once. Idempotent."""
        if self._thread.is_alive():
            self._is_closing = True
            with suppress(OSError):  # the loop has ended already, and closed the waker
                self._waker.wake()
            self._thread.join()

    # The loop

    def _run(self) -> None:
        self._ident = threading.get_ident()
        try:
            while not self._is_closing:
                self._turn()
        finally:
            with self._host.turn():
                self._is_closing = True
                for connection in list(self._connections.values()):
                    self._drop(connection)
            self._epoll.close()
            self._listener.close()
            self._waker.close()
            os.close(self._spare_fd)

    def _turn(self) -> None:
        host = self._host
        timers = host.service.timers
        deadline = self._sleeps_until = timers.earliest
        if timers.earliest != deadline:
            return  # changed by another thread, which may not know when this one wakes
        # Bounded, so that no timeout of any client can make poll fail.
        left = None if deadline is None else min(max(0.0, deadline - time.monotonic()), LONGEST_S)
        ready = self._epoll.poll(left)
        with host.lock:
            try:
                for fd, events in ready:
                    if connection := self._connections.get(fd):
                        self._serve(connection, events)
                    elif fd == self._listener.fileno():
                        self._accept()
                    elif fd == self._waker.fileno():
                        self._waker.clear()
                if deadline is not None and deadline <= time.monotonic():
                    host.deliver()
            finally:
                host.finish()

    def _flush_all(self) -> None:
        """End of a turn in any thread: send buffered messages, and wake the loop for an earlier deadline."""
        if self._to_flush:
            for connection in self._to_flush:
                if connection.unsent and connection.fd in self._connections:
                    self._flush(connection)
            self._to_flush.clear()
        if threading.get_ident() == self._ident:
            return
        deadline = self._host.service.timers.earliest
        is_earlier = deadline is not None and (self._sleeps_until is None or deadline < self._sleeps_until)
        if is_earlier and not self._is_closing:
            self._sleeps_until = deadline
            self._waker.wake()

    def _accept(self) -> None:
        try:
            accepted = ipc.accept(self._listener)
        except OSError as error:
            if error.errno == errno.EMFILE:
                self._turn_away()
            return  # else the client left already
        if accepted is None:
            return
        client, (pid, uid, _) = accepted
        if uid != os.geteuid():
            refusal = f"it belongs to user {os.geteuid()}, and process {pid} of user {uid} may not use it"
            client.send(pack({"op": "refused", **error_reply(PermissionError(refusal))}))
            client.close()
            return
        connection = self._connections[client.fileno()] = _Connection(
            socket=client, inbox=Inbox(client), pid=pid, fd=client.fileno(), label=f"process {pid}"
        )
        self._epoll.register(client, select.EPOLLIN)
        self.send(connection, {"op": "hello", "directory": self._directory}, self._memory.generations.memory)

    def _turn_away(self) -> None:
        """Accept and close a connection for which no descriptor is left, so that the client gets an error now."""
        os.close(self._spare_fd)
        try:
            self._listener.accept()[0].close()
        finally:
            self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _serve(self, connection: _Connection, events: int) -> None:
        try:
            if events & ~select.EPOLLOUT:
                for message, fd in connection.inbox.receive():
                    self._take(connection, message, fd)
            if connection.is_writing:
                self._flush(connection)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            # The client closed, died, or violated the protocol.
            self._drop(connection)

    def _take(self, connection: _Connection, message: Message, fd: int | None) -> None:
        try:
            if (op := message["op"]) in _PLAIN:
                reply = self._ask(connection, message)
            elif op == "put":
                reply = self._put(connection, message)
            else:
                reply = self._handle(connection, message, fd)
        except Exception as error:  # noqa: BLE001 - any failure is reported to its caller; other clients go on
            reply = error_reply(error)
        # Notices of freed memory go before the reply, so that its receiver can reuse that memory at once; but after a
        # reply that names segments, which the client must still know when it arrives.
        names_segments = reply is not None and "places" in reply
        if not names_segments:
            self._host.deliver()
        if reply is not None and "id" in message:
            reply["id"] = message["id"]
            self.send(connection, reply)
        if names_segments:
            self._host.deliver()

    def send(self, connection: _Connection, message: Message, segment: ipc.SharedMemory | None = None) -> None:
        """Send at once if possible, else at the end of the turn; with a journal always then, after it is written."""
        data: bytes | memoryview = pack(message, has_fd=segment is not None)
        if segment is None and self._directory is None and not connection.unsent:
            try:
                sent = send_some(connection.socket, data, None)
            except OSError:  # full, or closed, which the next read detects
                sent = 0
            if sent == len(data):
                return
            data = memoryview(data)[sent:]
        connection.unsent.append((data, segment))
        self._to_flush.append(connection)

    def _flush(self, connection: _Connection) -> None:
        """Send as much as the socket takes now; epoll reports when it takes more."""
        try:
            while connection.unsent:
                data, segment = _joined(connection.unsent) if len(connection.unsent) > 1 else connection.unsent[0]
                sent = send_some(connection.socket, data, None if segment is None else segment.fd)
                if sent == len(data):
                    connection.unsent.popleft()
                else:
                    connection.unsent[0] = (memoryview(data)[sent:], None)
        except BlockingIOError:
            pass
        except OSError:
            connection.unsent.clear()  # closed, which the next read detects
        if connection.is_writing != bool(connection.unsent):
            connection.is_writing = not connection.is_writing
            writing = select.EPOLLOUT if connection.is_writing else 0
            self._epoll.modify(connection.fd, select.EPOLLIN | writing)

    def _drop(self, connection: _Connection) -> None:
        """Remove a client: its parked requests, leases and segments. Its extents stay."""
        if self._connections.pop(connection.fd, None) is None:
            return
        self._epoll.unregister(connection.fd)
        connection.inbox.close()
        connection.socket.close()
        for key in connection.parked:
            self._host.service.store.withdraw(key)
        self._host.drop(connection, has_died=not connection.has_left)
        self._memory.leave(connection)
        self._host.deliver()

    # The requests: those about memory, and what the service is asked

    def _handle(self, connection: _Connection, message: Message, fd: int | None) -> Message | None:
        match message["op"]:
            case "segment":
                if fd is not None:
                    self._memory.admit(
                        connection, message["segment"], ipc.SharedMemory(fd), is_packed=message["is_packed"],
                        file=message.get("file"),
                    )  # fmt: skip
            case "seal":
                self._memory.seal(connection, message["segment"])
            case "retire":
                self._memory.retire(connection, message["segment"])
            case "released":
                self._memory.release(connection, message["segments"])
            case "withdraw":
                self._host.service.store.withdraw(_ReplyTo(connection, message["request"], self))
            case "bye":
                connection.has_left = True
            case "locate" | "snapshot":
                reply = self._ask(connection, message)
                assert reply is not None
                return {**reply, "places": self._memory.announce(connection, reply.pop("extents"))}
            case "stats":
                clients = sorted(each.pid for each in self._connections.values())
                return {**(self._ask(connection, message) or {}), "server_pid": os.getpid(), "clients": clients}
            case _:
                return self._ask(connection, message)
        return None

    def _ask(self, connection: _Connection, message: Message) -> Message | None:
        key = _ReplyTo(connection, message["id"], self)
        reply = self._host.handle(message, key, connection)
        if reply is None:
            connection.parked.add(key)
        return reply

    def _put(self, connection: _Connection, message: Message) -> Message | None:
        extent = self._memory.add(
            connection, message["segment"], message["offset"], message["nbytes"], is_last=bool(message["is_last"])
        )
        key = _ReplyTo(connection, message["id"], self)
        reply = self._host.put(message, extent, key, connection)
        if reply is None:
            connection.parked.add(key)
        return reply


def _joined(unsent: deque[_Outgoing]) -> _Outgoing:
    """First unsent message, joined with following ones that are small and have no descriptor."""
    data, segment = unsent[0]
    if segment is None and len(data) < _SMALL_BYTES and len(unsent) > 1 and unsent[1][1] is None:
        parts = [unsent.popleft()[0]]
        while unsent and unsent[0][1] is None and len(unsent[0][0]) < _SMALL_BYTES and len(parts) < 64:
            parts.append(unsent.popleft()[0])
        data = b"".join(parts)
        unsent.appendleft((data, None))
    return data, segment


def serve_segments(
    address: str, abstract: str, journal: Journal | None = None, *, timeout_s: float, snapshot: Path | None = None
) -> ShmQueue:
    """Serve a queue in shared memory at an abstract name; returns a client, whose `close` ends the queue.

    Raises:
        AddressError: the name is taken; or the directory has a queue already, and a snapshot is given.
    """
    memory = SegmentMemory(None if journal is None else journal.directory)
    host = QueueHost(address, memory, journal)
    host.begin(snapshot)
    host.add_front(lambda: UnixFront(host, memory, abstract))
    try:
        return ShmQueue(address, abstract, timeout_s=timeout_s, host=host)
    except BaseException:
        host.close()
        raise
