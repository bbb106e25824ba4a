"""The control server of a host: one thread that answers every client of one queue over an abstract UNIX socket.

It holds the bookkeeping and one descriptor per segment. It never waits for a client, and parks who waits.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from rl_csrc import ipc
from rl_tq.durability.snapshot import Snapshot, spill_directory_of
from rl_tq.errors import AddressError, TransferQueueError
from rl_tq.memory.arena import source_of
from rl_tq.metadata.checks import LONGEST_S
from rl_tq.metadata.state import dump
from rl_tq.protocol.service import Caller, Message, Service, error_reply
from rl_tq.protocol.sockets import Inbox, listen, pack, send_some
from rl_tq.server.compaction import CompactionQueue
from rl_tq.server.segment_table import Client, SegmentTable

if TYPE_CHECKING:
    import socket
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from rl_csrc.ipc import SharedMemory
    from rl_tq.durability.journal import Journal
    from rl_tq.metadata.state import Record

_Outgoing: TypeAlias = "tuple[bytes | memoryview, ipc.SharedMemory | None]"
_SMALL_BYTES = 1 << 14


@dataclass(slots=True, eq=False, kw_only=True)
class _Connection(Client):
    socket: socket.socket
    inbox: Inbox
    pid: int
    unsent: deque[_Outgoing] = field(default_factory=deque["_Outgoing"])
    parked: set[tuple[_Connection, int]] = field(default_factory=set["tuple[_Connection, int]"])
    has_left: bool = False
    """It said good-bye: it did not die."""
    is_compactor: bool = False
    """It compacts memory, and is nobody's client."""
    is_writing: bool = False
    """Whether epoll is to say when it takes more."""
    fd: int
    label: str
    """The client in words."""


class ControlServer:
    """Serves one queue from a thread of this process until `close`."""

    def __init__(
        self, address: str, abstract: str, journal: Journal | None = None, snapshot: Path | None = None
    ) -> None:
        self.address = address
        self._journal = journal
        self._table = SegmentTable(self._send, None if journal is None else journal.directory)
        self._service = Service(self._alias, self._table.where)
        self._wasted = CompactionQueue(self._table, self._service.store.state)
        self.has_waste = threading.Event()
        """Set when something was cleared that may be worth compacting."""
        self._connections: dict[int, _Connection] = {}
        self._to_flush: list[_Connection] = []
        try:
            self._recovery = Recovery(address, self._service, self._table, journal)
            if journal is not None:
                self._recovery.resume(journal)
            if snapshot is not None:
                self._recovery.restore(snapshot)
            self._wasted.adopt()
            self._listener = listen(address, abstract)
        except BaseException:
            self._table.close()
            if journal is not None:
                journal.close()
            raise
        self._waker = ipc.Waker()
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._epoll.register(self._waker, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=f"rl-tq-server-{address}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the queue: every client loses it at once, every segment goes when its last reader does. Idempotent."""
        if self._thread.is_alive():
            self._waker.wake()
            self._thread.join()

    # The loop

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            for connection in list(self._connections.values()):
                self._drop(connection)
            self._epoll.close()
            self._listener.close()
            self._waker.close()
            os.close(self._spare_fd)
            self._table.close()
            if self._journal is not None:
                self._journal.close()

    def _turn(self) -> bool:
        deadline = self._service.next_deadline()
        # Bounded: what asks for more, from wherever it comes, must not end everybody's queue.
        left = None if deadline is None else min(max(0.0, deadline - time.monotonic()), LONGEST_S)
        for fd, events in self._epoll.poll(left):
            if connection := self._connections.get(fd):
                self._serve(connection, events)
            elif fd == self._waker.fileno():
                return False
            elif fd == self._listener.fileno():
                self._accept()
        if deadline is not None and deadline <= time.monotonic():
            self._deliver()
        if self._journal is not None:
            self._commit(self._journal)
        for connection in self._to_flush:
            if connection.unsent and connection.fd in self._connections:
                self._flush(connection)
        self._to_flush.clear()
        return True

    def _commit(self, journal: Journal) -> None:
        """Write down what changed in this turn, before anybody is told."""
        if log := self._service.store.state.log:
            journal.append(log)
            log.clear()
            journal.shorten(self._recovery.records)

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
        directory = None if self._journal is None else str(self._journal.directory)
        self._send(connection, {"op": "hello", "directory": directory}, self._table.generations.memory)

    def _turn_away(self) -> None:
        """Close the connection of a client for whom no descriptor is left, so that it learns of it now."""
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
            # It closed, died, or does not speak our language: nothing of it can be answered any more.
            self._drop(connection)

    def _take(self, connection: _Connection, message: Message, fd: int | None) -> None:
        try:
            reply = self._handle(connection, message, fd)
        except TransferQueueError as error:
            reply = error_reply(error)
        except Exception as error:  # noqa: BLE001 - whatever failed is the caller's to see, and the others go on
            reply = error_reply(error)
        # What this made free is told first, so that whoever asked can use it again once he is answered; but never ahead
        # of an answer that names segments, which must still be known when it arrives.
        names_segments = reply is not None and "places" in reply
        if not names_segments:
            self._deliver()
        if reply is not None and "id" in message:
            reply["id"] = message["id"]
            self._send(connection, reply)
        if names_segments:
            self._deliver()

    def _send(self, connection: _Connection, message: Message, segment: ipc.SharedMemory | None = None) -> None:
        """At once if it can be, else once this turn is over: what a journal is to have is written down first."""
        data: bytes | memoryview = pack(message, has_fd=segment is not None)
        if segment is None and self._journal is None and not connection.unsent:
            try:
                sent = send_some(connection.socket, data, None)
            except OSError:  # it is full, or gone: reading from it says so next
                sent = 0
            if sent == len(data):
                return
            data = memoryview(data)[sent:]
        connection.unsent.append((data, segment))
        self._to_flush.append(connection)

    def _flush(self, connection: _Connection) -> None:
        """Send what the client takes now; epoll says when it takes more."""
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
            connection.unsent.clear()  # it is gone: reading from it says so next
        if connection.is_writing != bool(connection.unsent):
            connection.is_writing = not connection.is_writing
            writing = select.EPOLLOUT if connection.is_writing else 0
            self._epoll.modify(connection.fd, select.EPOLLIN | writing)

    def _drop(self, connection: _Connection) -> None:
        """Forget a client: its requests, and its right to put more into its segments. What it published stays."""
        if self._connections.pop(connection.fd, None) is None:
            return
        self._epoll.unregister(connection.fd)
        connection.inbox.close()
        connection.socket.close()
        for key in connection.parked:
            self._service.withdraw(key)
        why = f"its consumer ({connection.label}) " + ("left" if connection.has_left else "died")
        self._service.caller_left(connection, why, is_counted=not connection.has_left)
        self._table.leave(connection)
        self._deliver()

    def _deliver(self) -> None:
        now = time.monotonic()
        if not self._service.has_news(now):
            return
        settled, freed = self._service.drain(now)
        for (connection, number), reply in settled:
            connection.parked.discard((connection, number))
            self._send(connection, {**reply, "id": number})
        if freed or self._service.store.state.shrunk:
            self._free(freed, self._service.store.state.take_shrunk())

    def _free(self, freed: list[int], shrunk: set[int]) -> None:
        for extent in shrunk:
            self._table.generations.change(extent)
        if self._journal is not None:
            self._commit(self._journal)  # what is written down must not name a segment that is used again or gone
        now = time.monotonic()
        for extent in (*freed, *shrunk):
            self._wasted.note(extent, now)
        self._table.free(freed)
        self.has_waste.set()

    # The requests

    def _handle(self, connection: _Connection, message: Message, fd: int | None) -> Message | None:
        match message["op"]:
            case "put" | "move":  # first what comes most often
                return self._put(connection, message)
            case "wait" | "ack":
                return self._ask(connection, message)
            case "segment":
                if fd is not None:
                    self._table.admit(
                        connection, message["segment"], fd, is_packed=message["is_packed"], file=message.get("file")
                    )
            case "seal":
                self._table.seal(connection, message["segment"])
            case "retire":
                self._table.retire(connection, message["segment"])
            case "released":
                self._table.release(connection, message["segments"])
            case "withdraw":
                self._service.withdraw((connection, message["request"]))
            case "bye":
                connection.has_left = True
            case "compactor":
                connection.is_compactor = True
            case "plan":
                return self._plan()
            case "keep":
                for extent in message["old"]:
                    self._wasted.forget(extent)
                return {}
            case "locate" | "snapshot":
                return self._locate(connection, message)
            case "stats":
                return {**(self._ask(connection, message) or {}), **self._memory()}
            case _:
                return self._ask(connection, message)
        return None

    def _ask(self, connection: _Connection, message: Message) -> Message | None:
        key = (connection, message["id"])
        caller = Caller(key=key, owner=connection, label=connection.label)
        reply = self._service.handle(message, caller, time.monotonic())
        if reply is None:
            connection.parked.add(key)
        return reply

    def _put(self, connection: _Connection, message: Message) -> Message | None:
        extent = self._table.enter(
            connection, message["segment"], message["offset"], message["nbytes"], is_last=bool(message["is_last"])
        )
        if (log := self._service.store.state.log) is not None:
            log.append(self._table.record(extent))
        try:
            message["extent"] = extent
            return self._ask(connection, message)
        except Exception:
            self._table.free([extent])
            raise

    def _alias(self, extent: int) -> int:
        number = self._table.alias(extent)
        if (log := self._service.store.state.log) is not None:
            log.append(self._table.record(number))
        return number

    def _plan(self) -> Message:
        plan = self._wasted.plan(time.monotonic())
        nbytes = 0 if plan is None else sum(self._service.store.state.extents[number].nbytes for number in plan.old)
        told = None if plan is None else {**plan._asdict(), "nbytes": nbytes}
        return {"plan": told, "is_more_to_come": bool(self._wasted)}

    def _locate(self, connection: _Connection, message: Message) -> Message | None:
        reply = self._ask(connection, message)
        assert reply is not None
        return {**reply, "places": self._table.announce(connection, reply.pop("extents"))}

    def _memory(self) -> Message:
        clients = sorted(connection.pid for connection in self._connections.values() if not connection.is_compactor)
        return {"server_pid": os.getpid(), "clients": clients, **self._table.counts()}


def _joined(unsent: deque[_Outgoing]) -> _Outgoing:
    """The first of what is to be sent, after joining it with those behind it that are small and have no descriptor."""
    data, segment = unsent[0]
    if segment is None and len(data) < _SMALL_BYTES and len(unsent) > 1 and unsent[1][1] is None:
        parts = [unsent.popleft()[0]]
        while unsent and unsent[0][1] is None and len(unsent[0][0]) < _SMALL_BYTES and len(parts) < 64:
            parts.append(unsent.popleft()[0])
        data = b"".join(parts)
        unsent.appendleft((data, None))
    return data, segment


class Recovery:
    """Of one server's bookkeeping and memory."""

    def __init__(self, address: str, service: Service, table: SegmentTable, journal: Journal | None) -> None:
        self._address = address
        self._service = service
        self._table = table
        self._journal = journal

    def resume(self, journal: Journal) -> None:
        """Take up what an earlier server of this directory left."""
        with _no_collections():
            records = journal.load()
            store = self._service.store
            self._service.resume([record for record in records if record[0] != "note_place"], time.monotonic())
            places = {record[1]: record[2:] for record in records if record[0] == "note_place"}
            live = {extent: places[extent] for extent in store.state.extents}
            spilled_to = {each.spill_directory for each in store.state.options.values() if each.spill_directory}
            self._table.reopen(journal.directory, live, max(places, default=0), spilled_to)
            store.adopt()
            store.state.log = []
            journal.rewrite(self.records())

    def restore(self, path: Path) -> None:
        """Begin with what a snapshot holds, in memory and files of this queue's own.

        Raises:
            AddressError: there is a queue already.
        """
        store = self._service.store
        if store.state.next_row > 1 or store.state.options:
            raise AddressError(
                f"{self._address} holds a queue already: serve it without a snapshot, or take another directory"
            )
        directory = None if self._journal is None else self._journal.directory
        with _no_collections(), Snapshot(path) as snapshot:
            self._service.resume(snapshot.records, time.monotonic())
            places = {number: snapshot.places[number] for number in store.state.extents}
            spills = {places[number][0]: spill_directory_of(store.state, number) for number in places}

            def make(file: str) -> tuple[SharedMemory, str | None]:
                segment, own = source_of(directory, spills[file]).create(snapshot.nbytes(file))
                snapshot.read(file, 0, segment.map(is_shared=True))
                return segment, own

            self._table.restore(places, max(snapshot.places, default=0), make)
            store.adopt()
            if self._journal is not None:
                self._journal.rewrite(self.records())

    def records(self) -> Iterator[Record]:
        """Records that make all there is."""
        yield from dump(self._service.store.state)
        yield from self._table.records()


@contextmanager
def _no_collections() -> Generator[None]:
    """Have Python not look for garbage: among a hundred thousand rows that come to stay, it takes half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
