"""The host of one queue: its bookkeeping and the memory of its extents, for any number of fronts at once."""

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
"""What is cleared within so long is looked at together by the compactor."""


class Front(Protocol):
    """One address at which a host is served."""

    address: str

    def close(self) -> None:
        """End every connection. Idempotent."""
        ...


class Owner(Protocol):
    """A client, whose leases and credits end with it."""

    label: str
    """It in words."""


class ReplyTo(Protocol):
    """Where the reply to a request goes."""

    def put(self, message: Message, /) -> None:
        """It is there. Called once, with the host's lock held."""
        ...


class Reply:
    """Reply that may still come: a `Future` of one waiter and one callback, at a tenth of the cost."""

    __slots__ = ("_callbacks", "_message", "_wake")

    def __init__(self) -> None:
        self._message: Message | None = None
        self._callbacks: list[Callable[[Message], None]] = []
        self._wake: threading.Lock | None = None

    @property
    def is_done(self) -> bool:
        """Whether it came."""
        return self._message is not None

    def put(self, message: Message) -> None:
        """It comes. Call it once."""
        # Whoever waits or adds a callback leaves a mark first, and looks then: one of the two sees the other.
        self._message = message
        if self._wake is not None:
            self._wake.release()
        self._call_back(message)

    def result(self, timeout_s: float = 0.0) -> Message:
        """Wait for it. One thread may.

        Raises:
            TimeoutError: it did not come.
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
        """Have something called with it, in whatever thread; at once if it is there."""
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
    """Service and extents of a queue behind one lock; fronts bring requests, each as one call."""

    def __init__(self, address: str, memory: ExtentMemory, journal: Journal | None = None) -> None:
        self.address = address
        self.memory = memory
        self.journal = journal
        self.lock = threading.Lock()
        self.is_open = True
        self.addresses: list[str] = []
        """Where it is served, or was."""
        self.fronts: list[Front] = []
        self.flush: Callable[[], None] = lambda: None
        """Called at the end of every turn, with the lock held: for a front that sends then."""
        self.service = Service(self._alias, memory.where)
        self._state = self.service.store.state
        self._outbox: list[tuple[ReplyTo, Message]] = []
        """What a journal is to have before anybody is told."""
        self._wasted = CompactionQueue(memory, self._state)
        self._compactor = Compactor(self, self._wasted)
        memory.begin(self.turn, self._compactor.wake)

    def begin(self, snapshot: Path | None = None) -> None:
        """Take up what an earlier server left in the journal's directory, or what a snapshot holds.

        Raises:
            AddressError: there is a queue already, and a snapshot is given.
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
        """The lock, and what follows from whatever is done with it."""
        with self.lock:
            try:
                yield
                self.deliver()
            finally:
                self.finish()

    # With the lock held

    def handle(self, request: Message, key: ReplyTo, owner: Owner) -> Message | None:
        """Answer a request; None: it is parked, and `key.put` will have the reply.

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
        """The same for a put of an extent that is in the memory; it stays there unless it is refused."""
        if self.journal is not None:
            self.log_place(extent)
        try:
            request["extent"] = extent
            return self.handle(request, key, owner)
        except BaseException:
            self.memory.free([extent])
            raise

    def deliver(self) -> None:
        """Settle what is due, reply to whoever waited, and free what no row refers to any more."""
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
        self._commit()  # what is written down must not name a segment that is used again or gone
        for extent in chain(freed, shrunk) if self.memory.has_segments else shrunk:
            self._wasted.note(extent, now)
        self.memory.free(freed)
        if self._wasted:
            self._compactor.wake()

    def finish(self) -> None:
        """End a turn: write down what changed in it, then tell whoever waits."""
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
        """A client is gone."""
        why = f"its consumer ({owner.label}) {'died' if has_died else 'left'}"
        self.service.store.owner_left(owner, why, is_counted=has_died)

    # From any thread

    def call(self, request: Message, owner: Owner) -> Reply:
        """The future reply. Errors are replies too."""
        future = Reply()
        with self.lock:  # as in `turn`, which costs more
            self._answer(future, self.handle, request, future, owner)
            self.deliver()
            self.finish()
        return future

    def publish(self, request: Message, values: Any, owner: Owner) -> Reply:
        """The future reply to a put of these values, uint8 [n], or what else the memory keeps."""
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
        """The reply to a locate, and the extents that it names: whatever is cleared from now on, they are readable."""
        with self.turn():
            try:
                reply = self.handle(request, Reply(), owner)
                assert reply is not None
                return reply, self.memory.open(reply["extents"])
            except Exception as error:  # noqa: BLE001 - whatever failed is the caller's to see
                return error_reply(error), {}

    def snapshot(self, path: Path, owner: Owner) -> Reply:
        """The future reply to a snapshot, which a thread of its own writes to a directory of this host."""
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
        """Serve at one more address. The first is the host's own; if it cannot be, the host is closed."""
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
        """Settle the parked requests whose time is up."""
        with self.turn():
            return

    def abandon(self, future: Reply, why: str) -> None:
        """Fail a request that is still parked, because nobody waits for its answer any more."""
        with self.turn():
            if not future.is_done:
                self.service.store.withdraw(future)
                future.put(error_reply(ServerLostError(why)))

    def leave(self, owner: Owner, *, has_died: bool = False) -> None:
        """A client is gone."""
        with self.turn():
            if self.is_open:
                self.drop(owner, has_died=has_died)

    def close(self) -> None:
        """End every front, fail whoever waits, and free every extent. Idempotent."""
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
            except OSError:  # what was done is not written down: nobody may be told that it was
                self.is_open = False
                self._outbox.clear()
                raise
            finally:
                log.clear()
            self.journal.shorten(self._records)

    def _records(self) -> Iterator[Record]:
        """Records that make all there is."""
        yield from dump(self._state)
        if isinstance(self.memory, SegmentMemory):
            yield from self.memory.records()

    def _alias(self, extent: int) -> int:
        number = self.memory.alias(extent)
        self.log_place(number)
        return number

    def log_place(self, extent: int) -> None:
        """Have the journal say where an extent lies."""
        if (log := self._state.log) is not None and isinstance(self.memory, SegmentMemory):
            log.append(self.memory.record(extent))


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


class Compactor:
    """Compactor: a thread beside a host that copies what is worth it, from the first clear on."""

    def __init__(self, host: QueueHost, queue: CompactionQueue) -> None:
        self._host = host
        self._queue = queue
        self._wake = threading.Event()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """There may be something to do. Call it with the host's lock held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"rl-tq-compactor-{self._host.address}", daemon=True)
            self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """End. Call it without the lock."""
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
                # No memory or descriptor is left, for now.
                _LOG.warning("memory of cleared rows in %s was not compacted: %s", self._host.address, error)
            if self._queue and not self._is_closed.wait(REST_S):
                self._wake.set()

    def step(self) -> bool:
        """Copy once, if that is worth it; returns whether there may be more to do."""
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
        del opened, layout  # what is freed of it is let go of at the end of the next turn
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
