"""What several processes of a host ask a far server for travels to it once: who asks first lends it to the others.

The clients of one queue on one host meet at an abstract UNIX socket. One of them, whoever came first, has the desk
there: it says who fetches, has the others wait for that, and passes on what was fetched, in memory without a name. A
copy is good while the server says that nothing of it changed: it is asked at every get, and answers without the values.
When the process with the desk ends, the next get of another opens one. Without neighbours, nobody asks anybody.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import select
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_tq._codec import decode, encode
from rl_tq._neighbour_desk import Desk
from rl_tq._segments import Segment
from rl_tq._wire import Inbox, close_after_fork, pack, peer, send_some

if TYPE_CHECKING:
    import torch

    from rl_tq._service import Message

_MIN_BYTES = 64 << 10
"""Less is fetched again sooner than it is lent."""
_SHUN_S = 60.0
"""How long a client does without a desk that did not answer."""


class Lent(NamedTuple):
    """The answer to a fetch, as another process of this host received it."""

    etag: bytes
    """What the server called it."""
    reply: Message
    payload: torch.Tensor
    """uint8 [n], this process's own: nobody sees writes to it."""


class Neighbours:
    """This client's way to the others of its host. Thread-safe; what fails here only means that values are fetched."""

    def __init__(self, address: str, *, patience_s: float) -> None:
        """`patience_s`: how long to wait for the desk, or for who fetches. After that it is left alone for a while."""
        self._patience_s = patience_s
        self._shunned_until = 0.0
        self._name = f"\0rl-tq-host/{hashlib.sha256(address.encode()).hexdigest()[:40]}"
        self._client = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._end_desk: weakref.finalize[..., Any] | None = None
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
    def has_desk(self) -> bool:
        """Whether the desk of this host is here."""
        return self._end_desk is not None

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
            segment = Segment.create(len(payload) + len(head))
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
        """Leave. If the desk was ours, another opens one when it needs it."""
        with self._lock:
            self._is_closed = True
            for line in list(self._open):
                line.close()
            if self._end_desk is not None:
                self._end_desk()

    def _line(self) -> _Line | None:
        """This thread's connection to the desk, which is opened if there is none."""
        line: _Line | None = getattr(self._lines, "line", None)
        if line is not None and not line.is_lost:
            return line
        with self._lock:
            if self._is_closed or time.monotonic() < self._shunned_until:
                return None
            line = _dial(self._name)
            if line is None:
                if (listener := _listen(self._name)) is not None:
                    self._end_desk = weakref.finalize(self, Desk(listener).close)
                line = _dial(self._name)
            if line is None:
                return None
            _, page = self._ask(line, {"op": "hello", "client": self._client})
            if page is None:
                return None
            self._count = memoryview(mmap.mmap(page.fd, mmap.PAGESIZE, access=mmap.ACCESS_READ)).cast("Q")
            self._open.add(line)
        self._lines.line = line
        return line

    def _ask(self, line: _Line, message: Message) -> tuple[Message | None, Segment | None]:
        asked = time.monotonic()
        answer = line.ask(message, self._patience_s)
        if answer[0] is None and time.monotonic() - asked >= self._patience_s:
            self._shunned_until = time.monotonic() + _SHUN_S
        return answer


class _Line:
    """One thread's connection to a desk: it asks, and waits for the answer."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._inbox = Inbox(connection)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self.is_lost = False

    def ask(self, message: Message, timeout_s: float) -> tuple[Message | None, Segment | None]:
        """The answer, and the memory that it brings; (None, None) if there was none in time or ever will be."""
        self.tell(message)
        deadline = time.monotonic() + timeout_s
        while not self.is_lost and (left := deadline - time.monotonic()) > 0:
            try:
                if self._poll.poll(1e3 * left):
                    for answer, fd in self._inbox.receive():
                        return answer, None if fd is None else Segment(fd)
            except OSError:  # the desk is gone
                self.close()
        self.close()  # an answer that comes later would be taken for that of another question
        return None, None

    def tell(self, message: Message, segment: Segment | None = None) -> None:
        """Say something that is not answered."""
        data = pack(message, has_fd=segment is not None)
        try:
            sent = send_some(self._socket, data, None if segment is None else segment.fd)
            if sent < len(data):
                self._socket.sendall(data[sent:])
        except OSError:  # the desk is gone
            self.close()

    def close(self) -> None:
        """Hang up."""
        self.is_lost = True
        self._inbox.close()
        self._socket.close()

    def __del__(self) -> None:
        self.close()  # its thread ended


def _dial(name: str) -> _Line | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    close_after_fork(connection)
    try:
        connection.connect(name)
        if peer(connection)[1] == os.geteuid():
            return _Line(connection)
    except OSError:  # nobody has a desk
        pass
    connection.close()
    return None


def _listen(name: str) -> socket.socket | None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    close_after_fork(listener)
    try:
        listener.bind(name)
        listener.listen(128)
    except OSError:  # another was faster
        listener.close()
        return None
    listener.setblocking(False)
    return listener


def _write(fd: int, parts: list[memoryview]) -> None:
    for part in parts:
        while part:
            part = part[os.write(fd, part[: 1 << 30]) :]


def key_of(request: Message) -> bytes:
    """What two fetches that ask for the same have in common."""
    names: tuple[Any, ...] = ("partition", "generation", "rows", "sample_ids", "columns")
    return hashlib.blake2b(encode({name: request[name] for name in names}), digest_size=16).digest()
