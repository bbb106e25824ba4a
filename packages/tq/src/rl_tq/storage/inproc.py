"""`inproc://NAME`: queue for the threads of one process."""

from __future__ import annotations

import os
import threading
import time
import uuid
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from rl_tq.client.client import QueueClient
from rl_tq.errors import AddressError, ServerLostError
from rl_tq.metadata.checks import check_process
from rl_tq.protocol.codec import decode, encode
from rl_tq.protocol.service import Message, raise_error
from rl_tq.server.host import QueueHost, Reply
from rl_tq.server.memory import HeapMemory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rl_tq.columns.extent import Layout, Opened

_SERVED: dict[tuple[int, str], QueueHost] = {}
"""Hosts by process id and address; the process id excludes copies in forked children."""
_SERVED_LOCK = threading.Lock()
_NUMBERS = count(1)


class InprocQueue(QueueClient):
    """Client in the serving process."""

    def __init__(self, host: QueueHost, *, timeout_s: float, is_owner: bool, address: str = "") -> None:
        super().__init__(address or host.address, timeout_s=timeout_s)
        self.host = host
        self._is_owner = is_owner
        self._is_closed = False
        self._pid = os.getpid()
        self._waiting: set[Reply] = set()
        self.label = f"client {next(_NUMBERS)}"

    def _call(self, request: Message, timeout_s: float) -> Message:
        self._check_open()
        # Encoded and decoded as on a wire, so that nothing is kept by reference and the same values are refused.
        return self._wait_for(self.host.call(_copied({"timeout_s": timeout_s, **request}), self), timeout_s)

    def _wait_for(self, future: Reply, timeout_s: float) -> Message:
        reply = future.result() if future.is_done else self._wait_parked(future, timeout_s)
        raise_error(reply)
        return _copied(reply)

    def _wait_parked(self, future: Reply, timeout_s: float) -> Message:
        self._waiting.add(future)
        try:
            # If the client was closed meanwhile, nothing else would fail the request.
            self._check_open()
            return self._reply(future, timeout_s)
        except BaseException:
            self.host.abandon(future, "the wait was interrupted")
            raise
        finally:
            self._waiting.discard(future)

    def _reply(self, future: Reply, timeout_s: float) -> Message:
        """Wait for a reply, and expire due leases and requests meanwhile: there is no server thread that does."""
        deadline = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            due = self.host.service.timers.earliest
            # Bounded, because another thread may take a lease with an earlier deadline.
            until = min(deadline, now + 0.25, due if due is not None else deadline)
            try:
                return future.result(max(0.0, until - now))
            except TimeoutError:
                self.host.expire()
                if future.is_done or time.monotonic() >= deadline + 1.0:
                    return future.result()

    def _store_extent(self, layout: Layout, request: Message, timeout_s: float) -> Message:
        self._check_open()
        memory = torch.empty(layout.nbytes, dtype=torch.uint8)
        layout.write(memory)
        return self._wait_for(self.host.publish(_copied(request), memory, self), timeout_s)

    def _locate(self, request: Message, *, is_copied: bool) -> tuple[Message, Opened]:
        self._check_open()
        reply, opened = self.host.locate(_copied(request), self)
        raise_error(reply)
        return reply, opened

    def close(self) -> None:
        """See `TransferQueue.close`."""
        if os.getpid() != self._pid:
            return
        self._is_closed = True
        for future in list(self._waiting):
            self.host.abandon(future, f"this client of {self.address} was closed")
        self.host.leave(self)
        if self._is_owner:
            self.host.close()

    def _check_open(self) -> None:
        check_process(self.address, self._pid)
        if self._is_closed:
            raise ServerLostError(f"this client of {self.address} was closed")


class _Front:
    """Front: registers a host under a name in this process."""

    def __init__(self, host: QueueHost, address: str) -> None:
        self.address = address
        self._key = os.getpid(), address
        with _SERVED_LOCK:
            if self._key in _SERVED:
                raise AddressError(f"{address} is served already: close that queue, or take another name")
            _SERVED[self._key] = host

    def close(self) -> None:
        """See `Front`."""
        with _SERVED_LOCK:
            _SERVED.pop(self._key, None)


def serve(name: str, *, timeout_s: float, snapshot: Path | None = None) -> InprocQueue:
    """See `rl_tq.serve`."""
    return serve_heap("inproc", attach, name, timeout_s=timeout_s, snapshot=snapshot)


def serve_heap(
    scheme: str, attach: Callable[..., None], name: str, *, timeout_s: float, snapshot: Path | None, **given: Any
) -> InprocQueue:
    """Serve a queue with extents in private memory, at an address of the storage that `attach` belongs to."""
    host = QueueHost(f"{scheme}://", HeapMemory())
    host.begin(snapshot)
    attach(host, name, timeout_s=timeout_s, **given)
    return InprocQueue(host, timeout_s=timeout_s, is_owner=True)


def attach(host: QueueHost, name: str, *, timeout_s: float) -> None:
    """Serve a host under a name as well. See `rl_tq.serve(also=...)`."""
    host.add_front(lambda: _Front(host, f"inproc://{name or uuid.uuid4().hex[:12]}"))


def connect(name: str, *, timeout_s: float) -> InprocQueue:
    """See `rl_tq.connect`."""
    address = f"inproc://{name}"
    with _SERVED_LOCK:
        host = _SERVED.get((os.getpid(), address))
    if host is None:
        raise ServerLostError(
            f"no process serves {address} in this process (an inproc queue cannot be reached from another: use shm)"
        )
    return InprocQueue(host, timeout_s=timeout_s, is_owner=False, address=address)


def _copied(message: Message) -> Message:
    return decode(encode(message))
