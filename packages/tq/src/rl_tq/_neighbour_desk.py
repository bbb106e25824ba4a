"""Where the clients of a host meet: who fetches what, who waits for it, and copies of what was fetched.

A thread in the process of one of them. It holds descriptors of memory, never the values themselves.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rl_tq._segments import Segment
from rl_tq._wire import Inbox, close_after_fork, pack, peer, send_some

if TYPE_CHECKING:
    from rl_tq._service import Message

_MAX_BYTES = 1 << 30
"""What a desk holds at most, of all that was lent."""
_MAX_AGE_S = 10.0
"""How long it holds what some neighbour did not ask for."""
_TICK_S = 1.0


@dataclass(slots=True, eq=False)
class _Visitor:
    """One connection of a client."""

    socket: socket.socket
    inbox: Inbox
    client: str = ""


@dataclass(slots=True)
class _Copy:
    """What was lent under one key."""

    segment: Segment
    told: Message
    since: float
    takers: set[str]
    """Clients that have it."""


@dataclass(slots=True)
class _Errand:
    """One who fetches, and who waits for it."""

    fetcher: _Visitor
    waiting: list[_Visitor] = field(default_factory=list["_Visitor"])


class Desk:
    """Serves one listening socket from a thread of this process until `close`."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._visitors: dict[int, _Visitor] = {}
        self._copies: dict[bytes, _Copy] = {}
        self._errands: dict[bytes, _Errand] = {}
        self._page = Segment.create(mmap.PAGESIZE)
        self._count = memoryview(mmap.mmap(self._page.fd, mmap.PAGESIZE)).cast("Q")
        self._wake_read, self._wake_write = socket.socketpair()
        self._epoll = select.epoll()
        for each in (listener, self._wake_read):
            self._epoll.register(each, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="rl-tq-desk", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it: everybody is hung up on."""
        self._wake_write.send(b"x")
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._turn():
                self._forget()
        finally:
            self._epoll.close()
            for each in (
                self._listener,
                self._wake_read,
                self._wake_write,
                *(v.socket for v in self._visitors.values()),
            ):
                each.close()

    def _turn(self) -> bool:
        for fd, _ in self._epoll.poll(_TICK_S if self._copies else None):
            if fd == self._wake_read.fileno():
                return False
            if fd == self._listener.fileno():
                self._accept()
            elif visitor := self._visitors.get(fd):
                try:
                    for message, brought in visitor.inbox.receive():
                        self._take(visitor, message, None if brought is None else Segment(brought))
                except (OSError, ValueError, KeyError):  # it hung up, or does not speak our language
                    self._leave(visitor)
        return True

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it left again, or no descriptor is left
            return
        if peer(connection)[1] != os.geteuid():
            connection.close()
            return
        connection.setblocking(False)
        close_after_fork(connection)
        self._visitors[connection.fileno()] = _Visitor(connection, Inbox(connection))
        self._epoll.register(connection, select.EPOLLIN)

    def _take(self, visitor: _Visitor, message: Message, brought: Segment | None) -> None:
        match message["op"]:
            case "hello":
                visitor.client = message["client"]
                self._recount()
                self._send(visitor, {"op": "hello"}, self._page)
            case "want":
                self._want(visitor, message["key"])
            case "keep" if brought is not None:
                told = {name: message[name] for name in ("etag", "nbytes", "head")}
                copy = _Copy(brought, told, time.monotonic(), {visitor.client})
                self._copies[message["key"]] = copy
                errand = self._errands.pop(message["key"], None)
                for waiting in errand.waiting if errand else ():
                    self._pass_on(waiting, copy)
            case "give up":
                self._reassign(message["key"], visitor)
            case other:
                raise ValueError(f"unknown message {other!r}")

    def _want(self, visitor: _Visitor, key: bytes) -> None:
        if (copy := self._copies.get(key)) is not None:
            self._pass_on(visitor, copy)
        elif (errand := self._errands.get(key)) is not None:
            errand.waiting.append(visitor)
        else:
            self._errands[key] = _Errand(visitor)
            self._send(visitor, {"op": "fetch"})

    def _reassign(self, key: bytes, fetcher: _Visitor) -> None:
        """Who was to fetch does not: the next one does."""
        errand = self._errands.get(key)
        if errand is None or errand.fetcher is not fetcher:
            return
        del self._errands[key]
        for waiting in errand.waiting:
            self._want(waiting, key)

    def _pass_on(self, visitor: _Visitor, copy: _Copy) -> None:
        copy.takers.add(visitor.client)
        self._send(visitor, copy.told, copy.segment)

    def _send(self, visitor: _Visitor, message: Message, segment: Segment | None = None) -> None:
        data = pack(message, has_fd=segment is not None)
        with contextlib.suppress(OSError):  # who takes no answer of a few bytes has hung up: reading says so next
            send_some(visitor.socket, data, None if segment is None else segment.fd)

    def _leave(self, visitor: _Visitor) -> None:
        del self._visitors[visitor.socket.fileno()]
        self._epoll.unregister(visitor.socket)
        visitor.inbox.close()
        visitor.socket.close()
        self._recount()
        for key, errand in list(self._errands.items()):
            if visitor in errand.waiting:
                errand.waiting.remove(visitor)
            self._reassign(key, visitor)

    def _recount(self) -> None:
        self._count[0] = len(self._clients())

    def _clients(self) -> set[str]:
        return {visitor.client for visitor in self._visitors.values() if visitor.client}

    def _forget(self) -> None:
        """Let go of copies that everybody has, of old ones, and of the oldest beyond the limit."""
        clients = self._clients()
        oldest = time.monotonic() - _MAX_AGE_S
        total = sum(copy.segment.nbytes for copy in self._copies.values())
        for key, copy in list(self._copies.items()):
            if clients <= copy.takers or copy.since < oldest or total > _MAX_BYTES:
                total -= copy.segment.nbytes
                del self._copies[key]
