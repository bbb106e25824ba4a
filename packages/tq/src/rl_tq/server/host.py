"""The server's part of a queue whose extents lie in the memory of the serving process: one lock around all of it."""

from __future__ import annotations

import threading
import time
from itertools import count
from typing import TYPE_CHECKING, Any

from rl_tq.columns.extent import ExtentView
from rl_tq.durability.snapshot import Snapshot, spill_directory_of, write_snapshot
from rl_tq.errors import QueueFullError, ServerLostError
from rl_tq.memory.arena import write_spilled
from rl_tq.protocol.service import Caller, Message, Service, error_reply, raise_error
from rl_tq.server.compaction import HeapCompactor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch


class Reply:
    """A message that may still come: a `Future` of one waiter and one callback, which costs a tenth of one."""

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
        # Whoever waits or adds a callback leaves his mark first, and looks then: one of the two sees the other.
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
    """The service, the extents and one lock around both."""

    def __init__(self, address: str, snapshot: Path | None = None, *, is_compacted: bool = True) -> None:
        """`is_compacted`: its extents are memory of this process, and are written anew when most rows are cleared."""
        self.address = address
        self.lock = threading.Lock()
        self.extents: dict[int, ExtentView] = {}
        self.is_open = True
        self._service = Service(self._alias)
        self.aliased: set[int] = set()
        """Extents whose memory has another number, too."""
        self._compactor = HeapCompactor(self, self._service.store) if is_compacted else None
        self._keys = count()
        self._numbers = count(1)
        self._parked: dict[int, Reply] = {}
        if snapshot is not None:
            self.restore(snapshot, lambda memory, spill: memory if spill is None else write_spilled(memory, spill))

    def restore(self, path: Path, place: Callable[[torch.Tensor, str | None], Any]) -> None:
        """Begin with what a snapshot holds; `place(memory, spill directory)` gives what is kept of each extent."""
        state = self._service.store.state
        with self.lock, Snapshot(path) as snapshot:
            self._service.resume(snapshot.records, time.monotonic())
            known: dict[tuple[str, int], ExtentView] = {}
            for number in state.extents:
                where = snapshot.where(number)
                if where not in known:
                    memory = place(snapshot.extent(number), spill_directory_of(state, number))
                    known[where] = ExtentView(memory=memory, is_private=False)
                self.extents[number] = known[where]
            self._numbers = count(max(snapshot.places, default=0) + 1)
            self._service.store.adopt()

    def _alias(self, extent: int) -> int:
        number = next(self._numbers)
        self.extents[number] = self.extents[extent]
        self.aliased.add(extent)
        return number

    def replace(self, extent: int, rows: Sequence[int], memory: torch.Tensor) -> None:
        """Have rows of an extent lie in a copy of them."""
        with self.lock:
            if self.is_open:
                number = next(self._numbers)
                self.extents[number] = ExtentView(memory=memory, is_private=False)
                self._service.store.move(extent=number, nbytes=len(memory), old=[extent], rows=rows)
                self._deliver()

    def call(self, request: Message, owner: object) -> Reply:
        """The future reply. Errors of the store are replies too."""
        future = Reply()
        with self.lock:
            self.answer(request, future, owner)
        return future

    def answer(self, request: Message, future: Reply, owner: object) -> None:
        """Handle a request. Call it with the lock held."""
        if not self.is_open:
            raise ServerLostError(f"the queue {self.address} was closed")
        key = next(self._keys)
        caller = Caller(key=key, owner=owner, label=str(owner))
        try:
            reply = self._service.handle(request, caller, time.monotonic())
        except Exception as error:  # noqa: BLE001 - whatever failed is the caller's to see, and the others go on
            reply = error_reply(error)
        if reply is None:
            self._parked[key] = future
        else:
            future.put(reply)
        self._deliver()

    def publish(self, request: Message, memory: torch.Tensor, owner: object) -> Reply:
        """The future reply to a put; its extent is kept unless it fails."""
        future = self._publish(request, memory, owner)
        if future.is_done and (directory := future.result().get("spill")):
            try:
                spilled = write_spilled(memory, directory)
            except QueueFullError as error:
                failed = Reply()
                failed.put(error_reply(error))
                return failed
            return self._publish({**request, "is_spilled": True}, spilled, owner)
        return future

    def _publish(self, request: Message, memory: torch.Tensor, owner: object) -> Reply:
        future = Reply()
        with self.lock:
            extent = next(self._numbers)
            self.extents[extent] = ExtentView(memory=memory, is_private=False)
            self.answer({**request, "extent": extent}, future, owner)
            if future.is_done and "error" in future.result():
                self.extents.pop(extent, None)  # unless it was parked, its time was up at once, and it was freed
        return future

    def leave(self, owner: object, *, has_died: bool = False) -> None:
        """A client is gone."""
        with self.lock:
            if self.is_open:
                why = f"its consumer ({owner}) {'died' if has_died else 'left'}"
                self._service.caller_left(owner, why, is_counted=has_died)
                self._deliver()

    def locate(self, request: Message, owner: object) -> tuple[Message, dict[int, ExtentView]]:
        """The reply to a locate, and the extents that it names: whatever is cleared from now on, they are readable."""
        future = Reply()
        with self.lock:
            self.answer(request, future, owner)
            reply = future.result()
            return reply, {number: self.extents[number] for number in reply.get("extents", [])}

    def snapshot(self, path: Path, owner: object) -> Reply:
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

    def expire(self) -> None:
        """Settle the parked requests whose time is up."""
        with self.lock:
            self._deliver()

    def next_deadline(self) -> float | None:
        """When `expire` is due."""
        with self.lock:
            return self._service.next_deadline()

    def abandon(self, future: Reply, why: str) -> None:
        """Fail a request that is still parked, because nobody waits for its answer any more."""
        with self.lock:
            for key in [key for key, parked in self._parked.items() if parked is future]:
                self._parked.pop(key).put(error_reply(ServerLostError(why)))
                self._service.withdraw(key)
            self._deliver()

    def close(self) -> None:
        """Fail whoever waits, and free every extent."""
        with self.lock:
            self.is_open = False
            self.extents.clear()
            lost = error_reply(ServerLostError(f"the queue {self.address} was closed"))
            for future in self._parked.values():
                future.put(lost)
            self._parked.clear()
        if self._compactor is not None:
            self._compactor.close()

    def _deliver(self) -> None:
        now = time.monotonic()
        if not self._service.has_news(now):
            return
        settled, freed = self._service.drain(now)
        for key, reply in settled:
            self._parked.pop(key).put(reply)
        for extent in freed:
            del self.extents[extent]
            self.aliased.discard(extent)
        if (shrunk := self._service.store.state.take_shrunk()) and self._compactor is not None:
            self._compactor.note(shrunk, now)
