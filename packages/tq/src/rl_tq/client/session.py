"""A client's connection to the control server of its host: requests out, answers in, whichever thread reads them."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rl_csrc import ipc
from rl_tq.errors import ServerLostError, WaitTimeoutError
from rl_tq.metadata.checks import check_process
from rl_tq.protocol.service import Message, raise_error
from rl_tq.protocol.sockets import Inbox, pack, send_some

if TYPE_CHECKING:
    from collections.abc import Callable


GRACE_S = 5.0
"""The server answers by the deadline of a request; this much later it counts as stuck."""
_TICK_S = 1.0
"""After so long a receive returns with nothing, so that whoever waits looks at the clock."""

Held = TypeVar("Held")


class Session(Generic[Held]):
    """Thread-safe, until it is lost: then every call raises ServerLostError, and so does whoever waits.

    `note(message, fd)` is given what the server says unasked, in the order in which it says it. `hold(answer)` takes
    hold of what an answer names, before anything that the server says later is noted; `drop` lets go of it.
    """

    def __init__(
        self,
        address: str,
        socket_name: str,
        *,
        timeout_s: float,
        note: Callable[[Message, int | None], None],
        hold: Callable[[Message], Held],
        drop: Callable[[Held], None],
    ) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._note, self._hold, self._drop = note, hold, drop
        self._pid = os.getpid()
        self._socket, self._server_pid = _dial(address, socket_name, timeout_s)
        self._inbox = Inbox(self._socket)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._ids = count(1)
        self._pending: dict[int, PendingReply[tuple[Message, Held]]] = {}
        self._why_lost: str | None = None
        self._replies = LeaderFollower(self._read)

    @property
    def is_lost(self) -> bool:
        """Whether it is over."""
        return self._why_lost is not None

    @property
    def is_of_this_process(self) -> bool:
        """False in a child of the process that made it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise if no request can be made: TransferQueueError after a fork, ServerLostError once it is lost."""
        check_process(self._address, self._pid)
        if self._why_lost is not None:
            raise self._lost()

    def greet(self) -> tuple[Message, int | None]:
        """Wait for the server's first message, by which it accepts this client.

        Raises:
            ServerLostError: it does not.
        """
        deadline = time.monotonic() + self._timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if not self._poll.poll(1e3 * left):
                continue
            try:
                for message, fd in self._inbox.receive():
                    if message.get("op") == "hello":
                        return message, fd
                    self._why_lost = str(message.get("message"))
            except (OSError, ValueError) as error:
                self._why_lost = self._why_lost or f"it closed the connection: {error}"
            if self._why_lost is not None:
                self.shut()
                raise self._lost()
        self._socket.close()
        raise ServerLostError(
            f"the server of {self._address} (process {self._server_pid}) did not greet within {self._timeout_s} s"
        )

    def request(self, request: Message, timeout_s: float) -> tuple[Message, Held]:
        """The answer to a request, and what it holds; or raise the error it is answered with."""
        request["id"] = next(self._ids)
        if self._replies.enter():
            try:
                reply = self._ask_and_read(request, timeout_s)
            finally:
                self._replies.leave()
        else:
            reply = self._ask_and_wait(request, timeout_s)
        if "error" in reply[0]:
            self._drop(reply[1])
            raise_error(reply[0])
        return reply

    def _ask_and_read(self, request: Message, timeout_s: float) -> tuple[Message, Held]:
        """As the only thread that reads."""
        number: int = request["id"]
        own: list[tuple[Message, Held]] = []
        deadline = time.monotonic() + timeout_s + GRACE_S
        try:
            self.send(request)
            while not own:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._unanswered(request, timeout_s)
                self._read(left, number, own)
                if self._why_lost is not None and not own:
                    raise self._lost()
            return own[0]
        except BaseException:
            if own:
                self._drop(own[0][1])
            elif self._why_lost is None:
                self.send({"op": "withdraw", "request": number})
            raise

    def _ask_and_wait(self, request: Message, timeout_s: float) -> tuple[Message, Held]:
        """While another thread reads, for this one too."""
        number: int = request["id"]
        slot: PendingReply[tuple[Message, Held]] = PendingReply()
        self._pending[number] = slot
        try:
            self.send(request)
            if not self._replies.wait(slot, timeout_s + GRACE_S):
                raise self._unanswered(request, timeout_s)
        except BaseException:
            self._withdraw(number, slot)
            raise
        return slot.result()

    def send(self, message: Message, segment: ipc.SharedMemory | None = None) -> None:
        """Say something, with the descriptor of a segment if there is one.

        Raises:
            ServerLostError: nobody takes it.
        """
        data = pack(message, has_fd=segment is not None)
        fd = None if segment is None else segment.fd
        with self._send_lock:
            try:
                sent = send_some(self._socket, data, fd)
                while sent < len(data):
                    data = memoryview(data)[sent:]
                    sent = send_some(self._socket, data, None)
            except OSError as error:
                stuck = isinstance(error, BlockingIOError)
                self.lose(f"it took no message for {self._timeout_s} s" if stuck else f"sending to it failed: {error}")
        if self._why_lost is not None:
            raise self._lost()

    def read_idly(self, timeout_s: float) -> bool:
        """Read what comes within that time, if no thread that waits does. Returns whether it was so."""
        return self._replies.read_idly(timeout_s) and not self._replies.is_wanted

    def lose(self, why: str) -> None:
        """End the session: whoever waits is told, and so is whoever calls from now on."""
        with self._lock:
            if self._why_lost is None:
                self._why_lost = why
            pending, self._pending = self._pending, {}
        for slot in list(pending.values()):  # a request that another thread adds now finds the session lost
            slot.fail(self._lost())
        with contextlib.suppress(OSError):  # the other side did it already
            self._socket.shutdown(socket.SHUT_RDWR)

    def shut(self) -> None:
        """Close the socket, once the session is lost and nobody reads."""
        self._inbox.close()
        with self._send_lock:
            self._socket.close()

    def _withdraw(self, number: int, slot: PendingReply[tuple[Message, Held]]) -> None:
        """Nobody waits for this answer any more: have the server forget it, if it is still there to be told."""
        with self._lock:
            was_pending = self._pending.pop(number, None) is not None
        if self._why_lost is not None:
            return
        if was_pending:
            self.send({"op": "withdraw", "request": number})
        elif slot.is_done:
            self._drop(slot.result()[1])

    def _read(self, timeout_s: float, number: int = 0, own: list[tuple[Message, Held]] | None = None) -> None:
        """Read what comes within that time, and hand it out. Only one thread at a time does.

        An answer of that number is its own: it is appended to `own`.
        """
        if self._why_lost is not None:
            return
        try:
            # A thread that waits in a receive is woken when the server reads its request, too; one that polls is not.
            if self._poll.poll(1e3 * min(timeout_s, _TICK_S)):
                for message, fd in self._inbox.receive():
                    if "id" in message:
                        if own is not None and message["id"] == number:
                            own.append((message, self._hold(message)))
                        else:
                            self._answer(message)
                    elif message.get("op") == "refused":
                        self.lose(message["message"])
                    else:
                        self._note(message, fd)
        except OSError as error:
            self.lose(f"it closed or died ({error})")
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it, whatever it is
            self.lose(f"its message could not be read ({error!r})")

    def _answer(self, message: Message) -> None:
        with self._lock:
            slot = self._pending.pop(message["id"], None)
            if slot is not None:
                slot.put((message, self._hold(message)))

    def _unanswered(self, request: Message, timeout_s: float) -> WaitTimeoutError:
        return WaitTimeoutError(
            f"the server of {self._address} (process {self._server_pid}) did not answer {request['op']!r} within "
            f"{timeout_s} s and {GRACE_S} s more"
        )

    def _lost(self) -> ServerLostError:
        return ServerLostError(f"the queue {self._address} (process {self._server_pid}) is lost: {self._why_lost}")


def _dial(address: str, socket_name: str, timeout_s: float) -> tuple[socket.socket, int]:
    """The socket, whose sends have a deadline (what is received was polled for), and the server's process."""
    try:
        connection, server = ipc.connect(socket_name, timeout_s=timeout_s)
    except PermissionError as error:
        raise ServerLostError(f"{address} is not used: {error.strerror}") from error
    except OSError as error:
        raise ServerLostError(
            f"nobody serves {address} on this host ({error.strerror}): start it with rl_tq.serve, and check that "
            "both processes share a network namespace"
        ) from error
    return connection, server.pid


Answer = TypeVar("Answer")
_NONE: Any = object()
_SLICE_S = 1.0
"""No system call waits longer: a signal that comes just before one is only seen by Python when it ends."""


class PendingReply(Generic[Answer]):
    """One answer that somebody waits for."""

    __slots__ = ("_answer", "_error", "_wake")

    def __init__(self) -> None:
        self._answer: Answer = _NONE
        self._error: BaseException | None = None
        self._wake = threading.Lock()
        self._wake.acquire()

    @property
    def is_done(self) -> bool:
        """Whether the answer or an error is there."""
        return self._answer is not _NONE or self._error is not None

    def put(self, answer: Answer) -> None:
        """Answer it."""
        self._answer = answer
        self.wake_up()

    def fail(self, error: BaseException) -> None:
        """Have whoever waits raise."""
        self._error = error
        self.wake_up()

    def wake_up(self) -> None:
        """Have whoever waits look again."""
        try:
            self._wake.release()
        except RuntimeError:
            return  # nudged before, and not looked yet

    def wait(self, timeout_s: float) -> None:
        """Sleep until nudged."""
        self._wake.acquire(timeout=max(0.0, min(timeout_s, threading.TIMEOUT_MAX)))

    def result(self) -> Answer:
        """What `put` gave, or raise what `fail` did."""
        if self._error is not None:
            raise self._error
        return self._answer


class LeaderFollower:
    """One reader at a time. `read(timeout_s)` reads what comes within that time and hands it out to slots."""

    def __init__(self, read: Callable[[float], None]) -> None:
        self._read = read
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._waiting: dict[PendingReply[Any], None] = {}
        self._num_waits = self._seen = 0

    @property
    def is_wanted(self) -> bool:
        """Whether some thread waits for an answer."""
        return bool(self._waiting)

    def wait(self, slot: PendingReply[Any], timeout_s: float) -> bool:
        """Return once the slot is done (True) or the time is up (False)."""
        deadline = time.monotonic() + timeout_s
        self._num_waits += 1
        if not self._read_until(slot, deadline):  # somebody else reads
            with self._lock:
                self._waiting[slot] = None
            try:
                while not slot.is_done and (left := deadline - time.monotonic()) > 0:
                    if not self._read_until(slot, deadline):
                        slot.wait(min(left, _SLICE_S))
            finally:
                with self._lock:
                    del self._waiting[slot]
        self._pass_on()
        return slot.is_done

    def enter(self) -> bool:
        """Take the socket, to ask and read at once: no slot is needed. False: another thread has it."""
        self._num_waits += 1
        return self._turn.acquire(blocking=False)

    def leave(self) -> None:
        """Pass the socket on, after `enter`."""
        self._turn.release()
        self._pass_on()

    def _read_until(self, slot: PendingReply[Any], deadline: float) -> bool:
        """Read until a slot is done or the time is up; False: another thread has the socket."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            while not slot.is_done and (left := deadline - time.monotonic()) > 0:
                self._read(min(left, _SLICE_S))
        finally:
            self._turn.release()
        return True

    def read_idly(self, timeout_s: float) -> bool:
        """Read once, if no thread has the socket, and none had since the last call. Returns whether it was so."""
        was_quiet = self._num_waits == self._seen
        self._seen = self._num_waits
        if not was_quiet or self._waiting or not self._turn.acquire(blocking=False):
            return False
        try:
            self._read(timeout_s)
        finally:
            self._turn.release()
        self._pass_on()
        return True

    def _pass_on(self) -> None:
        """Wake one of those who wait, to read next."""
        if self._waiting:
            with self._lock:
                following = next(iter(self._waiting), None)
            if following is not None:
                following.wake_up()
