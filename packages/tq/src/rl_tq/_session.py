"""A client's connection to the control server of its host: requests out, answers in, whichever thread reads them."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from itertools import count
from typing import TYPE_CHECKING, Generic, TypeVar

from rl_tq._checks import check_process
from rl_tq._parking import Slot, Turnstile
from rl_tq._service import Message, raise_error
from rl_tq._wire import Inbox, close_after_fork, limit_sends, pack, peer, send_some
from rl_tq.errors import ServerLostError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_tq._segments import Segment

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
        self._socket = _dial(address, socket_name, timeout_s)
        self._server_pid, _ = peer(self._socket)
        self._inbox = Inbox(self._socket)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._ids = count(1)
        self._pending: dict[int, Slot[tuple[Message, Held]]] = {}
        self._why_lost: str | None = None
        self._turnstile = Turnstile(self._read)

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
        if self._turnstile.enter():
            try:
                reply = self._ask_and_read(request, timeout_s)
            finally:
                self._turnstile.leave()
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
        slot: Slot[tuple[Message, Held]] = Slot()
        self._pending[number] = slot
        try:
            self.send(request)
            if not self._turnstile.wait(slot, timeout_s + GRACE_S):
                raise self._unanswered(request, timeout_s)
        except BaseException:
            self._withdraw(number, slot)
            raise
        return slot.result()

    def send(self, message: Message, segment: Segment | None = None) -> None:
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
        return self._turnstile.read_idly(timeout_s) and not self._turnstile.is_wanted

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

    def _withdraw(self, number: int, slot: Slot[tuple[Message, Held]]) -> None:
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


def _dial(address: str, socket_name: str, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    close_after_fork(connection)
    limit_sends(connection, timeout_s)  # what is received was polled for
    try:
        connection.connect(socket_name)
    except OSError as error:
        connection.close()
        raise ServerLostError(
            f"nobody serves {address} on this host ({error.strerror}): start it with rl_tq.serve, and check that "
            "both processes share a network namespace"
        ) from error
    _, uid = peer(connection)
    if uid != os.geteuid():
        connection.close()
        raise ServerLostError(f"{address} is served by user {uid}, and this process is user {os.geteuid()}'s: not used")
    return connection
