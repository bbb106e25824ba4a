"""Queue host: metadata and extent memory of one queue, served by any number of fronts (addresses) at once."""

from __future__ import annotations

import gc
import logging
import threading
import time
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from rl_tq.durability import Snapshot, write_snapshot
from rl_tq.errors import AddressError, ServerLostError, TransferQueueError
from rl_tq.metadata.state import dump
from rl_tq.protocol.service import Caller, Message, Service, error_reply, raise_error
from rl_tq.server.compaction import REST_S, CompactionQueue, compacted_extent
from rl_tq.server.memory import SegmentMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

    from rl_tq.columns.extent import ExtentView, Layout
    from rl_tq.durability import Journal
    from rl_tq.metadata.state import Record
    from rl_tq.server.compaction import Plan
    from rl_tq.server.memory import ExtentMemory

_LOG = logging.getLogger(__name__)
_PAUSE_S = 0.05
"""Seconds for which the compactor collects clears before it looks at them."""


class Front(Protocol):
    """Front: one address at which a host is served."""

    address: str

    def close(self) -> None:
        """End every connection. Idempotent."""
        ...


class Owner(Protocol):
    """Client of a host; its leases and credits end with it."""

    label: str
    """Description of the client, for messages."""


class ReplyTo(Protocol):
    """Destination of the reply to a parked request."""

    def put(self, message: Message, /) -> None:
        """Deliver the reply. Called once, with the host's lock held."""
        ...


class Reply:
    """Future of a reply, for one waiter and one callback; ten times cheaper than `concurrent.futures.Future`."""

    __slots__ = ("_callbacks", "_message", "_wake")

    def __init__(self) -> None:
        self._message: Message | None = None
        self._callbacks: list[Callable[[Message], None]] = []
        self._wake: threading.Lock | None = None

    @property
    def is_done(self) -> bool:
        """Whether the reply is there."""
        return self._message is not None

    def put(self, message: Message) -> None:
        """Set the reply. Call it once."""
        # A waiter or callback registers first and checks the reply afterwards, so that one side sees the other.
        self._message = message
        if self._wake is not None:
            self._wake.release()
        self._call_back(message)

    def result(self, timeout_s: float = 0.0) -> Message:
        """Wait for the reply; one thread may.

        Raises:
            TimeoutError: it did not arrive in time.
        """
        if self._message is None:
            if self._wake is None:
                wake = threading.Lock()
                wake.acquire()
                self._wake = wake
            if self._message is None:
                self._wake.acquire(timeout=timeout_s)
        if self._message is None:
            raise TimeoutError
        return self._message

    def when_done(self, callback: Callable[[Message], None]) -> None:
        """Set the callback for the reply; it runs in any thread, at once if the reply is there."""
        self._callbacks.append(callback)
        if self._message is not None:
            self._call_back(self._message)

    def _call_back(self, message: Message) -> None:
        try:
            callback = self._callbacks.pop()  # by one thread, whoever comes first
        except IndexError:
            return
        callback(message)


class QueueHost:
    """Host of a queue: service and extents behind one lock; fronts pass requests to it."""

    def __init__(self, address: str, memory: ExtentMemory, journal: Journal | None = None) -> None:
        self.address = address
        self.memory = memory
        self.journal = journal
        self.lock = threading.Lock()
        self.is_open = True
        self.addresses: list[str] = []
        """Addresses at which it is, or was, served."""
        self.fronts: list[Front] = []
        self.flush: Callable[[], None] = lambda: None
        """Callback at the end of every turn, with the lock held, for a front that sends buffered messages then."""
        self.service = Service(self._alias, memory.where)
        self._state = self.service.store.state
        self._outbox: list[tuple[ReplyTo, Message]] = []
        """Replies held back until the journal has their changes."""
        self._wasted = CompactionQueue(memory, self._state)
        self._compactor = Compactor(self, self._wasted)
        memory.begin(self.turn, self._compactor.wake)

    def begin(self, snapshot: Path | None = None) -> None:
        """Recover the state from the journal of an earlier server, or from a snapshot.

        Raises:
            AddressError: the directory has a queue already, and a snapshot is given.
        """
        store, memory = self.service.store, self.memory
        try:
            with self.lock, _no_collections():
                if self.journal is not None:
                    assert isinstance(memory, SegmentMemory)
                    places: dict[int, list[Any]] = {}
                    changes: list[Record] = []
                    for record in self.journal.load():
                        if record[0] == "note_place":
                            places[record[1]] = record[2:]
                        else:
                            changes.append(record)
                    self.service.resume(changes, time.monotonic())
                    memory.reopen(self._state, places)
                    store.adopt()
                    self._state.log = []
                    self.journal.rewrite(self._records())
                if snapshot is not None:
                    if self._state.next_row > 1 or self._state.options:
                        raise AddressError(
                            f"{self.address} holds a queue already: serve it without a snapshot, or take another "
                            "directory"
                        )
                    with Snapshot(snapshot) as opened:
                        self.service.resume(opened.records, time.monotonic())
                        memory.restore(self._state, opened)
                        store.adopt()
                    if self.journal is not None:
                        self.journal.rewrite(self._records())
                self._wasted.adopt()
        except BaseException:
            self.close()
            raise

    @contextmanager
    def turn(self) -> Generator[None]:
        """Context manager of one turn: takes the lock, then delivers results and writes the journal."""
        with self.lock:
            try:
                yield
                self.deliver()
            finally:
                self.finish()

    # With the lock held

    def handle(self, request: Message, key: ReplyTo, owner: Owner) -> Message | None:
        """Answer a request; None: it is parked, and the reply goes to `key.put`.

        Raises:
            TransferQueueError, ValueError: the store refused it.
        """
        if not self.is_open:
            raise ServerLostError(f"the queue {self.address} was closed")
        reply = self.service.handle(request, Caller(key=key, owner=owner, label=owner.label), time.monotonic())
        if reply is not None and request["op"] == "stats":
            reply |= self.memory.counts()
        return reply

    def put(self, request: Message, extent: int, key: ReplyTo, owner: Owner) -> Message | None:
        """Answer a put whose extent is in memory already; the extent is freed if the put is refused."""
        if self.journal is not None:
            self.log_place(extent)
        try:
            request["extent"] = extent
            return self.handle(request, key, owner)
        except BaseException:
            self.memory.free([extent])
            raise

    def deliver(self) -> None:
        """Settle due requests, send their replies, and free extents without rows."""
        now = time.monotonic()
        if not self.is_open or not self.service.has_news(now):
            return
        settled, freed = self.service.drain(now)
        for key, reply in settled:
            self._reply(key, reply)
        if not freed and not self._state.shrunk:
            return
        shrunk = self._state.take_shrunk()
        for extent in shrunk:
            self.memory.change(extent)
        self._commit()  # before freeing: the journal must not name a segment that is reused or gone
        for extent in chain(freed, shrunk) if self.memory.has_segments else shrunk:
            self._wasted.note(extent, now)
        self.memory.free(freed)
        if self._wasted:
            self._compactor.wake()

    def finish(self) -> None:
        """End a turn: write its changes to the journal, then send the replies."""
        if self.journal is not None:
            self._commit()
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            for key, reply in outbox:
                key.put(reply)
        if self.memory.freed:
            self.memory.tidy()
        self.flush()

    def drop(self, owner: Owner, *, has_died: bool) -> None:
        """End the leases and credits of a client that left; the lock is held."""
        why = f"its consumer ({owner.label}) {'died' if has_died else 'left'}"
        self.service.store.owner_left(owner, why, is_counted=has_died)

    # From any thread

    def call(self, request: Message, owner: Owner) -> Reply:
        """Handle a request; returns the future of its reply. Errors are replies too."""
        future = Reply()
        with self.lock:  # as in `turn`, which costs more
            self._answer(future, self.handle, request, future, owner)
            self.deliver()
            self.finish()
        return future

    def publish(self, request: Message, values: Any, owner: Owner) -> Reply:
        """Put an extent (uint8 [n], or what else the memory stores); returns the future of the reply."""
        future = Reply()
        try:
            taken = self.memory.take(values)
        except (OSError, MemoryError, TransferQueueError) as error:
            future.put(error_reply(error))
            return future
        try:
            with self.lock:
                extent = self.memory.enter(taken)
                self._answer(future, self.put, {**request}, extent, future, owner)
                self.deliver()
                self.finish()
        finally:
            self.memory.settle(taken)
        return future

    def locate(self, request: Message, owner: Owner) -> tuple[Message, dict[int, ExtentView]]:
        """Reply to a locate, and its opened extents, which stay readable whatever is cleared later."""
        with self.turn():
            try:
                reply = self.handle(request, Reply(), owner)
                assert reply is not None
                return reply, self.memory.open(reply["extents"])
            except Exception as error:  # noqa: BLE001 - whatever failed is the caller's to see
                return error_reply(error), {}

    def snapshot(self, path: Path, owner: Owner) -> Reply:
        """Write a snapshot to a directory of this host, in a thread; returns the future of the reply."""
        future = Reply()

        def write() -> None:
            try:
                reply, opened = self.locate({"op": "snapshot"}, owner)
                raise_error(reply)
                write_snapshot(path, reply["records"], {n: extent.memory for n, extent in opened.items()})
                future.put({})
            except Exception as error:  # noqa: BLE001 - whatever failed is the caller's to see
                future.put(error_reply(error))

        threading.Thread(target=write, name=f"rl-tq-snapshot-{self.address}", daemon=True).start()
        return future

    def add_front(self, make: Callable[[], Front]) -> None:
        """Add a front. The first gives the host its address; if it fails, the host is closed."""
        try:
            front = make()
        except BaseException:
            if not self.fronts:
                self.close()
            raise
        if not self.fronts:
            self.address = front.address
        self.addresses.append(front.address)
        self.fronts.append(front)

    def expire(self) -> None:
        """Settle parked requests and leases whose deadline has passed."""
        with self.turn():
            return

    def abandon(self, future: Reply, why: str) -> None:
        """Fail a parked request whose caller no longer waits."""
        with self.turn():
            if not future.is_done:
                self.service.store.withdraw(future)
                future.put(error_reply(ServerLostError(why)))

    def leave(self, owner: Owner, *, has_died: bool = False) -> None:
        """End the leases and credits of a client that left."""
        with self.turn():
            if self.is_open:
                self.drop(owner, has_died=has_died)

    def close(self) -> None:
        """Close every front, fail parked requests, and free every extent. Idempotent."""
        while self.fronts:
            self.fronts.pop().close()
        self._compactor.close()
        with self.lock:
            self.is_open = False
            lost = error_reply(ServerLostError(f"the queue {self.address} was closed"))
            for key in self.service.store.parked():
                self.service.store.withdraw(key)
                key.put(lost)
        self.memory.close()
        if self.journal is not None:
            self.journal.close()

    def _answer(self, future: Reply, ask: Callable[..., Message | None], *arguments: Any) -> None:
        try:
            reply = ask(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever failed is the caller's to see, and the others go on
            reply = error_reply(error)
        if reply is not None:
            self._reply(future, reply)

    def _reply(self, key: ReplyTo, reply: Message) -> None:
        if self.journal is None:
            key.put(reply)
        else:
            self._outbox.append((key, reply))

    def _commit(self) -> None:
        if self.journal is not None and (log := self._state.log):
            try:
                self.journal.append(log)
            except OSError:  # the changes are not durable, so no reply may confirm them
                self.is_open = False
                self._outbox.clear()
                raise
            finally:
                log.clear()
            self.journal.shorten(self._records)

    def _records(self) -> Iterator[Record]:
        """Records of the whole state, with the places of extents."""
        yield from dump(self._state)
        if isinstance(self.memory, SegmentMemory):
            yield from self.memory.records()

    def _alias(self, extent: int) -> int:
        number = self.memory.alias(extent)
        self.log_place(number)
        return number

    def log_place(self, extent: int) -> None:
        """Record the place of an extent for the journal."""
        if (log := self._state.log) is not None and isinstance(self.memory, SegmentMemory):
            log.append(self.memory.record(extent))


@contextmanager
def _no_collections() -> Generator[None]:
    """Disable cyclic garbage collection: while a hundred thousand rows are created, it takes half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Compactor:
    """Compactor: background thread of a host, started by the first clear."""

    def __init__(self, host: QueueHost, queue: CompactionQueue) -> None:
        self._host = host
        self._queue = queue
        self._wake = threading.Event()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Wake the thread. Call it with the host's lock held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"rl-tq-compactor-{self._host.address}", daemon=True)
            self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """End the thread. Call it without the lock."""
        self._is_closed.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            if not self._wake.wait(self._host.memory.catch_up()) or self._is_closed.wait(_PAUSE_S):
                continue
            self._wake.clear()
            try:
                while not self._is_closed.is_set() and self.step():
                    pass
            except (OSError, ValueError, MemoryError, RuntimeError, TransferQueueError) as error:
                # Out of memory or descriptors, for now.
                _LOG.warning("memory of cleared rows in %s was not compacted: %s", self._host.address, error)
            if self._queue and not self._is_closed.wait(REST_S):
                self._wake.set()

    def step(self) -> bool:
        """Do one compaction, if one pays; returns whether there may be more to do."""
        host = self._host
        with host.turn():
            plan = self._queue.plan(time.monotonic())
            if plan is None:
                return False
            located = host.service.store.locate(partition=plan.partition, columns=plan.columns, rows=plan.rows)
            opened = host.memory.open(located.extents)
        columns = {name: (schema, located.runs[which]) for name, (schema, which) in located.columns.items()}
        layout = compacted_extent(columns, opened, len(plan.rows))
        if layout.nbytes < plan.nbytes:
            self._move(plan, layout)
        else:
            with host.turn():
                for extent in plan.old:
                    self._queue.forget(extent)
        del opened, layout  # so that freed memory is released at the end of the next turn
        with host.turn():
            return True

    def _move(self, plan: Plan, layout: Layout) -> None:
        host = self._host
        taken = host.memory.write(layout)
        try:
            with host.turn():
                if host.is_open:
                    extent = host.memory.enter(taken)
                    host.log_place(extent)
                    host.service.store.move(extent=extent, nbytes=layout.nbytes, old=plan.old, rows=plan.rows)
        finally:
            host.memory.settle(taken)
