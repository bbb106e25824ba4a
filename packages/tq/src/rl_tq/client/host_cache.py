"""Host cache: what several clients of one host read from a remote server travels to that host once.

The clients of one queue on a host meet at an abstract UNIX socket. The first of them serves the cache: it says who
fetches, has the others wait for that, and passes the fetched values on in memory without a name. A copy is good while
the server says that nothing of it changed; it is asked at every get and answers without the values. When the process
that serves the cache ends, the next get of another client starts a new one. A single client asks nobody.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import secrets
import select
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_csrc import ipc
from rl_tq.protocol.codec import decode, encode
from rl_tq.protocol.sockets import Inbox, pack, send_some

if TYPE_CHECKING:
    import socket

    import torch

    from rl_tq.protocol.service import Message

_MIN_BYTES = 64 << 10
"""Less is fetched again sooner than it is lent."""
_SHUN_S = 60.0
"""How long a client does without a cache server that did not answer."""


class Lent(NamedTuple):
    """The answer to a fetch, as another process of this host received it."""

    etag: bytes
    """What the server called it."""
    reply: Message
    payload: torch.Tensor
    """uint8 [n], this process's own: nobody sees writes to it."""


class HostCache:
    """This client's way to the others of its host. Thread-safe; what fails here only means that values are fetched."""

    def __init__(self, address: str, *, patience_s: float) -> None:
        """`patience_s`: seconds to wait for the cache server, or for who fetches; then neither is asked for a while."""
        self._patience_s = patience_s
        self._shunned_until = 0.0
        self._name = f"rl-tq-host/{hashlib.sha256(address.encode()).hexdigest()[:40]}"
        self._client = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._end_server: weakref.finalize[..., Any] | None = None
        """Ends ours, once, and at the latest with this object."""
        self._lines = threading.local()
        self._open: weakref.WeakSet[_Line] = weakref.WeakSet()
        self._count: memoryview | None = None
        self._is_closed = False
        self._line()

    @property
    def are_there(self) -> bool:
        """Whether this host has another client of the queue."""
        return self._line() is not None and self._count is not None and self._count[0] > 1

    @property
    def has_server(self) -> bool:
        """Whether the cache server of this host is here."""
        return self._end_server is not None

    def borrow(self, key: bytes) -> Lent | None:
        """What another has under a key, waiting while another fetches it; None: fetch it, then `lend` or `give_up`."""
        line = self._line()
        answer, segment = (None, None) if line is None else self._ask(line, {"op": "want", "key": key})
        if answer is None or segment is None:
            return None
        memory = segment.map(is_shared=False)
        nbytes: int = answer["nbytes"]
        reply = decode(memory[nbytes : nbytes + answer["head"]].numpy().data)
        return Lent(answer["etag"], reply, memory[:nbytes])

    def lend(self, key: bytes, reply: Message, payload: torch.Tensor | None) -> None:
        """Have others have what was fetched."""
        if payload is None or len(payload) < _MIN_BYTES:
            self.give_up(key)
            return
        line = self._line()
        if line is None:
            return
        head = encode(reply)
        try:
            segment = ipc.SharedMemory.create(len(payload) + len(head), name="rl-tq")
            _write(segment.fd, [payload.numpy().data, memoryview(head)])
        except OSError:  # there is no memory for a copy: the others fetch
            self.give_up(key)
            return
        told = {"op": "keep", "key": key, "etag": reply["etag"], "nbytes": len(payload), "head": len(head)}
        line.tell(told, segment)

    def give_up(self, key: bytes) -> None:
        """Have another fetch it."""
        line = self._line()
        if line is not None:
            line.tell({"op": "give up", "key": key})

    def close(self) -> None:
        """Leave. If we served the cache, another opens one when it needs it."""
        with self._lock:
            self._is_closed = True
            for line in list(self._open):
                line.close()
            if self._end_server is not None:
                self._end_server()

    def _line(self) -> _Line | None:
        """This thread's connection to the cache server, which is opened if there is none."""
        line: _Line | None = getattr(self._lines, "line", None)
        if line is not None and not line.is_lost:
            return line
        with self._lock:
            if self._is_closed or time.monotonic() < self._shunned_until:
                return None
            line = _dial(self._name)
            if line is None:
                if (listener := _listen(self._name)) is not None:
                    self._end_server = weakref.finalize(self, ClientConnection(listener).close)
                line = _dial(self._name)
            if line is None:
                return None
            _, page = self._ask(line, {"op": "hello", "client": self._client})
            if page is None:
                return None
            self._count = page.words()
            self._open.add(line)
        self._lines.line = line
        return line

    def _ask(self, line: _Line, message: Message) -> tuple[Message | None, ipc.SharedMemory | None]:
        asked = time.monotonic()
        answer = line.ask(message, self._patience_s)
        if answer[0] is None and time.monotonic() - asked >= self._patience_s:
            self._shunned_until = time.monotonic() + _SHUN_S
        return answer


class _Line:
    """One thread's connection to a cache server: it asks, and waits for the answer."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._inbox = Inbox(connection)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self.is_lost = False

    def ask(self, message: Message, timeout_s: float) -> tuple[Message | None, ipc.SharedMemory | None]:
        """The answer, and the memory that it brings; (None, None) if there was none in time or ever will be."""
        self.tell(message)
        deadline = time.monotonic() + timeout_s
        while not self.is_lost and (left := deadline - time.monotonic()) > 0:
            try:
                if self._poll.poll(1e3 * left):
                    for answer, fd in self._inbox.receive():
                        return answer, None if fd is None else ipc.SharedMemory(fd)
            except OSError:  # the cache server is gone
                self.close()
        self.close()  # an answer that comes later would be taken for that of another question
        return None, None

    def tell(self, message: Message, segment: ipc.SharedMemory | None = None) -> None:
        """Say something that is not answered."""
        data = pack(message, has_fd=segment is not None)
        try:
            sent = send_some(self._socket, data, None if segment is None else segment.fd)
            if sent < len(data):
                self._socket.sendall(data[sent:])
        except OSError:  # the cache server is gone
            self.close()

    def close(self) -> None:
        """Hang up."""
        self.is_lost = True
        self._inbox.close()
        self._socket.close()

    def __del__(self) -> None:
        self.close()  # its thread ended


def _dial(name: str) -> _Line | None:
    try:
        connection, _ = ipc.connect(name)
    except OSError:  # nobody serves it, or another user
        return None
    connection.setblocking(True)
    return _Line(connection)


def _listen(name: str) -> socket.socket | None:
    try:
        listener = ipc.bind(name)
    except OSError:  # another was faster
        return None
    listener.listen(128)
    return listener


def _write(fd: int, parts: list[memoryview]) -> None:
    for part in parts:
        while part:
            part = part[os.write(fd, part[: 1 << 30]) :]


def key_of(request: Message) -> bytes:
    """What two fetches that ask for the same have in common."""
    names: tuple[Any, ...] = ("partition", "generation", "rows", "sample_ids", "columns")
    return hashlib.blake2b(encode({name: request[name] for name in names}), digest_size=16).digest()


_MAX_BYTES = 1 << 30
"""What a cache server holds at most, of all that was lent."""
_MAX_AGE_S = 10.0
"""How long it holds what some client did not ask for."""
_TICK_S = 1.0


@dataclass(slots=True, eq=False)
class _CacheClient:
    """One connection of a client."""

    socket: socket.socket
    inbox: Inbox
    client: str = ""


@dataclass(slots=True)
class _Copy:
    """What was lent under one key."""

    segment: ipc.SharedMemory
    told: Message
    since: float
    takers: set[str]
    """Clients that have it."""


@dataclass(slots=True)
class _PendingFetch:
    """One who fetches, and who waits for it."""

    fetcher: _CacheClient
    waiting: list[_CacheClient] = field(default_factory=list["_CacheClient"])


class ClientConnection:
    """Serves one listening socket from a thread of this process until `close`."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._clients: dict[int, _CacheClient] = {}
        self._copies: dict[bytes, _Copy] = {}
        self._errands: dict[bytes, _PendingFetch] = {}
        self._page = ipc.SharedMemory.create(mmap.PAGESIZE)
        self._count = self._page.words(is_writable=True)
        self._waker = ipc.Waker()
        self._epoll = select.epoll()
        for each in (listener, self._waker):
            self._epoll.register(each, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="rl-tq-host-cache", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it: everybody is hung up on."""
        self._waker.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._turn():
                self._forget()
        finally:
            self._epoll.close()
            for each in (
                self._listener,
                self._waker,
                *(v.socket for v in self._clients.values()),
            ):
                each.close()

    def _turn(self) -> bool:
        for fd, _ in self._epoll.poll(_TICK_S if self._copies else None):
            if fd == self._waker.fileno():
                return False
            if fd == self._listener.fileno():
                self._accept()
            elif client := self._clients.get(fd):
                try:
                    for message, brought in client.inbox.receive():
                        self._take(client, message, None if brought is None else ipc.SharedMemory(brought))
                except (OSError, ValueError, KeyError):  # it hung up, or does not speak our language
                    self._leave(client)
        return True

    def _accept(self) -> None:
        try:
            accepted = ipc.accept(self._listener)
        except OSError:  # no descriptor is left
            return
        if accepted is None:
            return
        connection, credentials = accepted
        if not credentials.is_same_user:
            connection.close()
            return
        self._clients[connection.fileno()] = _CacheClient(connection, Inbox(connection))
        self._epoll.register(connection, select.EPOLLIN)

    def _take(self, client: _CacheClient, message: Message, brought: ipc.SharedMemory | None) -> None:
        match message["op"]:
            case "hello":
                client.client = message["client"]
                self._recount()
                self._send(client, {"op": "hello"}, self._page)
            case "want":
                self._want(client, message["key"])
            case "keep" if brought is not None:
                told = {name: message[name] for name in ("etag", "nbytes", "head")}
                copy = _Copy(brought, told, time.monotonic(), {client.client})
                self._copies[message["key"]] = copy
                errand = self._errands.pop(message["key"], None)
                for waiting in errand.waiting if errand else ():
                    self._pass_on(waiting, copy)
            case "give up":
                self._reassign(message["key"], client)
            case other:
                raise ValueError(f"unknown message {other!r}")

    def _want(self, client: _CacheClient, key: bytes) -> None:
        if (copy := self._copies.get(key)) is not None:
            self._pass_on(client, copy)
        elif (errand := self._errands.get(key)) is not None:
            errand.waiting.append(client)
        else:
            self._errands[key] = _PendingFetch(client)
            self._send(client, {"op": "fetch"})

    def _reassign(self, key: bytes, fetcher: _CacheClient) -> None:
        """Who was to fetch does not: the next one does."""
        errand = self._errands.get(key)
        if errand is None or errand.fetcher is not fetcher:
            return
        del self._errands[key]
        for waiting in errand.waiting:
            self._want(waiting, key)

    def _pass_on(self, client: _CacheClient, copy: _Copy) -> None:
        copy.takers.add(client.client)
        self._send(client, copy.told, copy.segment)

    def _send(self, client: _CacheClient, message: Message, segment: ipc.SharedMemory | None = None) -> None:
        data = pack(message, has_fd=segment is not None)
        with contextlib.suppress(OSError):  # who takes no answer of a few bytes has hung up: reading says so next
            send_some(client.socket, data, None if segment is None else segment.fd)

    def _leave(self, client: _CacheClient) -> None:
        del self._clients[client.socket.fileno()]
        self._epoll.unregister(client.socket)
        client.inbox.close()
        client.socket.close()
        self._recount()
        for key, errand in list(self._errands.items()):
            if client in errand.waiting:
                errand.waiting.remove(client)
            self._reassign(key, client)

    def _recount(self) -> None:
        self._count[0] = len(self._names())

    def _names(self) -> set[str]:
        return {client.client for client in self._clients.values() if client.client}

    def _forget(self) -> None:
        """Let go of copies that everybody has, of old ones, and of the oldest beyond the limit."""
        clients = self._names()
        oldest = time.monotonic() - _MAX_AGE_S
        total = sum(copy.segment.nbytes for copy in self._copies.values())
        for key, copy in list(self._copies.items()):
            if clients <= copy.takers or copy.since < oldest or total > _MAX_BYTES:
                total -= copy.segment.nbytes
                del self._copies[key]
