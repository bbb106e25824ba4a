"""`inproc://NAME`: a queue for the threads of one process. Bookkeeping and extents are those of `shm`."""

from __future__ import annotations

import json
import threading
import time
import uuid
from concurrent.futures import Future
from itertools import count
from typing import TYPE_CHECKING

import torch

from rl_tq._client import QueueClient
from rl_tq._gather import Opened, OpenExtent
from rl_tq._service import Caller, Message, Service, error_reply, raise_error
from rl_tq.errors import AddressError, ServerLostError, TransferQueueError

if TYPE_CHECKING:
    from rl_tq._extent import Layout

_SERVED: dict[str, _Hub] = {}
_SERVED_LOCK = threading.Lock()
_NUMBERS = count(1)


class _Hub:
    """The server's part: the service, the extents and one lock around both."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.extents: dict[int, OpenExtent] = {}
        self.is_open = True
        self._service = Service()
        self._keys = count()
        self._numbers = count(1)
        self._parked: dict[int, Future[Message]] = {}

    def call(self, request: Message, owner: object) -> Future[Message]:
        """The future reply. Errors of the store are replies too."""
        future: Future[Message] = Future()
        with self.lock:
            self.answer(request, future, owner)
        return future

    def answer(self, request: Message, future: Future[Message], owner: object) -> None:
        """Handle a request. Call it with the lock held."""
        if not self.is_open:
            raise ServerLostError(f"the queue inproc://{self.name} was closed")
        key = next(self._keys)
        self._parked[key] = future
        caller = Caller(key=key, owner=owner, label=str(owner))
        try:
            reply = self._service.handle(request, caller, time.monotonic())
        except (TransferQueueError, ValueError) as error:
            reply = error_reply(error)
        if reply is not None:
            self._parked.pop(key).set_result(reply)
        self._deliver()

    def publish(self, request: Message, memory: torch.Tensor, owner: object) -> Future[Message]:
        """The future reply to a put; its extent is kept unless it fails."""
        future: Future[Message] = Future()
        with self.lock:
            extent = next(self._numbers)
            self.extents[extent] = OpenExtent(memory=memory, is_private=False)
            self.answer({**request, "extent": extent}, future, owner)
            if future.done() and "error" in future.result():
                del self.extents[extent]
        return future

    def leave(self, owner: object) -> None:
        """A client is gone."""
        with self.lock:
            if self.is_open:
                self._service.caller_left(owner, f"its consumer ({owner}) left", is_counted=False)
                self._deliver()

    def expire(self) -> None:
        """Settle the parked requests whose time is up."""
        with self.lock:
            self._deliver()

    def next_deadline(self) -> float | None:
        """When `expire` is due."""
        with self.lock:
            return self._service.next_deadline()

    def abandon(self, future: Future[Message], why: str) -> None:
        """Fail a request that is still parked, because nobody waits for its answer any more."""
        with self.lock:
            for key in [key for key, parked in self._parked.items() if parked is future]:
                self._parked.pop(key).set_result(error_reply(ServerLostError(why)))
                self._service.withdraw(key)
            self._deliver()

    def close(self) -> None:
        """Fail whoever waits, and free every extent."""
        with self.lock:
            self.is_open = False
            self.extents.clear()
            lost = error_reply(ServerLostError(f"the queue inproc://{self.name} was closed"))
            for future in self._parked.values():
                future.set_result(lost)
            self._parked.clear()

    def _deliver(self) -> None:
        settled, freed = self._service.drain(time.monotonic())
        for key, reply in settled:
            self._parked.pop(key).set_result(reply)
        for extent in freed:
            del self.extents[extent]


class InprocQueue(QueueClient):
    """A client in the same process as the queue."""

    def __init__(self, hub: _Hub, *, timeout_s: float, is_owner: bool) -> None:
        super().__init__(f"inproc://{hub.name}", timeout_s=timeout_s)
        self._hub = hub
        self._is_owner = is_owner
        self._is_closed = False
        self._waiting: set[Future[Message]] = set()
        self._number = next(_NUMBERS)

    def __str__(self) -> str:
        return f"client {self._number}"

    def _call(self, request: Message, timeout_s: float) -> Message:
        self._check_open()
        # Through JSON and back, as on a wire: nothing is kept by reference, and what a wire refuses is refused here.
        return self._wait_for(self._hub.call(_copied({"timeout_s": timeout_s, **request}), self), timeout_s)

    def _wait_for(self, future: Future[Message], timeout_s: float) -> Message:
        self._waiting.add(future)
        try:
            # Closed meanwhile: then nobody else will fail it.
            self._check_open()
            reply = self._reply(future, timeout_s)
        except BaseException:
            self._hub.abandon(future, "the wait was interrupted")
            raise
        finally:
            self._waiting.discard(future)
        raise_error(reply)
        return _copied(reply)

    def _reply(self, future: Future[Message], timeout_s: float) -> Message:
        """Wait, and have due leases and requests settled meanwhile: no thread of the queue's own does."""
        deadline = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            due = self._hub.next_deadline()
            # A lease that another thread takes meanwhile may be due before what is known now.
            until = min(deadline, now + 0.25, due if due is not None else deadline)
            try:
                return future.result(timeout=max(0.0, until - now))
            except TimeoutError:
                self._hub.expire()
                if future.done() or time.monotonic() >= deadline + 1.0:
                    return future.result(timeout=0)

    def _store_extent(self, layout: Layout, request: Message, timeout_s: float) -> Message:
        self._check_open()
        memory = torch.empty(layout.nbytes, dtype=torch.uint8)
        layout.write(memory)
        return self._wait_for(self._hub.publish(_copied(request), memory, self), timeout_s)

    def _locate(self, request: Message) -> tuple[Message, Opened]:
        self._check_open()
        future: Future[Message] = Future()
        with self._hub.lock:
            self._hub.answer(_copied(request), future, self)
            reply = future.result()
            numbers: list[int] = reply.get("extents", [])
            opened = {number: self._hub.extents[number] for number in numbers}
        raise_error(reply)
        return reply, opened

    def close(self) -> None:
        """See `TransferQueue.close`."""
        self._is_closed = True
        for future in list(self._waiting):
            self._hub.abandon(future, f"this client of {self.address} was closed")
        self._hub.leave(self)
        if self._is_owner:
            self._hub.close()
            with _SERVED_LOCK:
                if _SERVED.get(self._hub.name) is self._hub:
                    del _SERVED[self._hub.name]

    def _check_open(self) -> None:
        if self._is_closed:
            raise ServerLostError(f"this client of {self.address} was closed")


def serve(name: str, *, timeout_s: float) -> InprocQueue:
    """See `rl_tq.serve`."""
    name = name or uuid.uuid4().hex[:12]
    hub = _Hub(name)
    with _SERVED_LOCK:
        if name in _SERVED:
            raise AddressError(f"inproc://{name} is served already: close that queue, or take another name")
        _SERVED[name] = hub
    return InprocQueue(hub, timeout_s=timeout_s, is_owner=True)


def connect(name: str, *, timeout_s: float) -> InprocQueue:
    """See `rl_tq.connect`."""
    with _SERVED_LOCK:
        hub = _SERVED.get(name)
    if hub is None:
        raise ServerLostError(
            f"nobody serves inproc://{name} in this process (an inproc queue cannot be reached from another: use shm)"
        )
    return InprocQueue(hub, timeout_s=timeout_s, is_owner=False)


def _copied(message: Message) -> Message:
    return json.loads(json.dumps(message))
