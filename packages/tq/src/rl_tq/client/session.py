"""Client session: request/reply from any thread over one connection (UNIX, TCP or ZeroMQ)."""

from __future__ import annotations

import os
import threading
import time
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from rl_tq.errors import ServerLostError, WaitTimeoutError
from rl_tq.metadata.checks import check_process
from rl_tq.protocol.service import Message, raise_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from rl_tq.columns.output import Output
    from rl_tq.protocol.framing import Place

GRACE_S = 5.0
"""Grace period: the server replies by a request's deadline, and counts as stuck this much later."""
_SLICE_S = 1.0
"""Longest wait in one system call: Python handles a signal that arrives just before the call only after it."""

Held = TypeVar("Held")


class Connection(Protocol):
    """Connection of a client to a server after the handshake: sends and receives messages."""

    server: str
    """Description of the server, for error messages."""

    def send(self, message: Message, extra: Any) -> None:
        """Send a message with its attachment (a payload or a segment). One thread at a time.

        Raises:
            OSError: the server does not take it.
        """
        ...

    def receive(self, timeout_s: float, place: Place) -> Iterable[Any]:
        """Receive what arrives within that time: pairs of a message and its attachment. One thread at a time.

        `place(message, n)` returns memory for a payload, uint8 [n]; None: new memory is allocated.

        Raises:
            OSError, ValueError: the server closed the connection, died, or violated the protocol.
        """
        ...

    def shut(self) -> None:
        """Shut down: a thread in `receive` returns. Idempotent."""
        ...

    def close(self) -> None:
        """Close the connection, once no thread sends or receives. Idempotent."""
        ...


class Session(Generic[Held]):
    """Thread-safe request/reply session over one connection. Once it is lost, every call raises ServerLostError.

    `note(message, extra)` handles unsolicited messages, in order. `hold(reply, extra)` acquires what a reply names,
    before later messages are handled; `drop` releases it.
    """

    def __init__(
        self,
        address: str,
        connection: Connection,
        *,
        note: Callable[[Message, Any], None],
        hold: Callable[[Message, Any], Held],
        drop: Callable[[Held], None],
    ) -> None:
        self._address = address
        self._connection = connection
        self._note, self._hold, self._drop = note, hold, drop
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._ids = count(1)
        self._pending: dict[int, PendingReply[tuple[Message, Held]]] = {}
        self._outputs: dict[int, Output] = {}
        self._why_lost: str | None = None
        self._replies = LeaderFollower(self._read)

    @property
    def is_lost(self) -> bool:
        """Whether the session has ended."""
        return self._why_lost is not None

    @property
    def is_of_this_process(self) -> bool:
        """Whether this is the process that made the session, and not a forked child."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise if no request can be made: TransferQueueError after a fork, ServerLostError once it is lost."""
        check_process(self._address, self._pid)
        if self._why_lost is not None:
            raise self._lost()

    def request(
        self, request: Message, timeout_s: float, extra: Any = None, output: Output | None = None
    ) -> tuple[Message, Held]:
        """Send a request; return the reply and what `hold` acquired for it, or raise the error in the reply.

        `extra` is the attachment of the request. `output` may provide memory for the reply's payload.
        """
        number = request["id"] = next(self._ids)
        if output is not None and output.is_given:
            self._outputs[number] = output
        try:
            if self._replies.enter():
                try:
                    reply = self._ask_and_read(request, timeout_s, extra)
                finally:
                    self._replies.leave()
            else:
                reply = self._ask_and_wait(request, timeout_s, extra)
        except BaseException:
            if output is not None and self._outputs.pop(number, None) is None and output.is_taken:
                self.lose("a call was given up while its values were being received into the caller's buffer")
            raise
        if output is not None:
            self._outputs.pop(number, None)
        if "error" in reply[0]:
            self._drop(reply[1])
            raise_error(reply[0])
        return reply

    def _ask_and_read(self, request: Message, timeout_s: float, extra: Any) -> tuple[Message, Held]:
        """Send a request and read until its reply arrives, as the leader."""
        number: int = request["id"]
        own: list[tuple[Message, Held]] = []
        deadline = time.monotonic() + timeout_s + GRACE_S
        try:
            self.send(request, extra)
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
                self.send({"op": "withdraw", "request": number, "id": 0})
            raise

    def _ask_and_wait(self, request: Message, timeout_s: float, extra: Any) -> tuple[Message, Held]:
        """Send a request and wait for its reply, which another thread (the leader) may read."""
        number: int = request["id"]
        slot: PendingReply[tuple[Message, Held]] = PendingReply()
        self._pending[number] = slot
        try:
            self.send(request, extra)
            if not self._replies.wait(slot, timeout_s + GRACE_S):
                raise self._unanswered(request, timeout_s)
        except BaseException:
            self._withdraw(number, slot)
            raise
        return slot.result()

    def send(self, message: Message, extra: Any = None) -> None:
        """Send a message that has no reply, with its attachment.

        Raises:
            ServerLostError: the server does not take it.
        """
        with self._send_lock:
            try:
                if self._why_lost is None:
                    self._connection.send(message, extra)
            except OSError as error:
                stuck = isinstance(error, BlockingIOError)
                self.lose("it took no message in time" if stuck else f"sending to it failed: {error}")
        if self._why_lost is not None:
            raise self._lost()

    def read_idly(self, timeout_s: float) -> bool:
        """Read for up to that time unless a waiting thread reads; returns whether this thread did."""
        return self._replies.read_idly(timeout_s) and not self._replies.is_wanted

    def lose(self, why: str) -> None:
        """End the session: waiting threads and later calls raise ServerLostError with this reason."""
        with self._lock:
            if self._why_lost is None:
                self._why_lost = why
            pending, self._pending = self._pending, {}
        for slot in list(pending.values()):  # a request that another thread adds now finds the session lost
            slot.fail(self._lost())
        self._connection.shut()

    def leave(self) -> None:
        """Send `bye` and end the session. Idempotent."""
        if self._why_lost is None:
            try:
                self.send({"op": "bye", "id": 0})
            except ServerLostError:
                return
        self.lose("this client was closed")

    def close(self) -> None:
        """Close the connection, once the session has ended and no thread reads."""
        with self._replies.turn, self._send_lock:
            self._connection.close()

    def _withdraw(self, number: int, slot: PendingReply[tuple[Message, Held]]) -> None:
        """Withdraw a request whose caller stopped waiting: notify the server, or drop the reply if it has arrived."""
        with self._lock:
            was_pending = self._pending.pop(number, None) is not None
        if self._why_lost is not None:
            return
        if was_pending:
            self.send({"op": "withdraw", "request": number, "id": 0})
        elif slot.is_done:
            self._drop(slot.result()[1])

    def _read(self, timeout_s: float, number: int = 0, own: list[tuple[Message, Held]] | None = None) -> None:
        """Read messages for up to that time and dispatch them. One thread at a time.

        The reply with that number belongs to the reading thread: it is appended to `own`.
        """
        if self._why_lost is not None:
            return
        try:
            for message, extra in self._connection.receive(min(timeout_s, _SLICE_S), self._place):
                reply_to = message.get("id")
                if reply_to is None:
                    if message.get("op") in ("refused", "closed"):
                        self.lose(message["message"])
                    else:
                        self._note(message, extra)
                elif own is not None and reply_to == number:
                    own.append((message, self._hold(message, extra)))
                else:
                    with self._lock:
                        slot = self._pending.pop(reply_to, None)
                        if slot is not None:
                            slot.put((message, self._hold(message, extra)))
        except OSError as error:
            self.lose(f"it closed or died ({error})")
        except Exception as error:  # noqa: BLE001 - waiting threads must get any error
            self.lose(f"its message could not be read ({error!r})")

    def _place(self, reply: Message, nbytes: int) -> torch.Tensor | None:
        output = self._outputs.pop(reply.get("id", 0), None)
        return None if output is None else output.take_over(reply, nbytes)

    def _unanswered(self, request: Message, timeout_s: float) -> WaitTimeoutError:
        return WaitTimeoutError(
            f"the server of {self._address}{self._connection.server} did not answer {request['op']!r} within "
            f"{timeout_s} s and {GRACE_S} s more"
        )

    def _lost(self) -> ServerLostError:
        return ServerLostError(f"the queue {self._address}{self._connection.server} is lost: {self._why_lost}")


Answer = TypeVar("Answer")
_NONE: Any = object()


class PendingReply(Generic[Answer]):
    """Pending reply: what one thread waits for while another reads."""

    __slots__ = ("_answer", "_error", "_wake")

    def __init__(self) -> None:
        self._answer: Answer = _NONE
        self._error: BaseException | None = None
        self._wake = threading.Lock()
        self._wake.acquire()

    @property
    def is_done(self) -> bool:
        """Whether the reply or an error is there."""
        return self._answer is not _NONE or self._error is not None

    def put(self, answer: Answer) -> None:
        """Set the reply and wake its thread."""
        self._answer = answer
        self.wake_up()

    def fail(self, error: BaseException) -> None:
        """Set an error, which the waiting thread raises."""
        self._error = error
        self.wake_up()

    def wake_up(self) -> None:
        """Wake the waiting thread."""
        try:
            self._wake.release()
        except RuntimeError:
            return  # woken already

    def wait(self, timeout_s: float) -> None:
        """Sleep until woken."""
        self._wake.acquire(timeout=max(0.0, min(timeout_s, threading.TIMEOUT_MAX)))

    def result(self) -> Answer:
        """Reply of `put`; raises the error of `fail`."""
        if self._error is not None:
            raise self._error
        return self._answer


class LeaderFollower:
    """Leader/follower reads: of the threads that wait for replies, one calls `read(timeout_s)` for all of them."""

    def __init__(self, read: Callable[[float], None]) -> None:
        self._read = read
        self.turn = threading.Lock()
        """Lock of the leader, held while it reads."""
        self._lock = threading.Lock()
        self._waiting: dict[PendingReply[Any], None] = {}
        self._num_waits = self._seen = 0

    @property
    def is_wanted(self) -> bool:
        """Whether some thread waits for a reply."""
        return bool(self._waiting)

    def wait(self, slot: PendingReply[Any], timeout_s: float) -> bool:
        """Wait for a pending reply, reading if no other thread does. True: it is done; False: the time is up."""
        deadline = time.monotonic() + timeout_s
        self._num_waits += 1
        if not self._read_until(slot, deadline):  # another thread is the leader
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
        """Try to become the leader before sending a request, so that no `PendingReply` is needed. False: another is."""
        self._num_waits += 1
        return self.turn.acquire(blocking=False)

    def leave(self) -> None:
        """Give up leadership after `enter`, and wake a follower."""
        self.turn.release()
        if self._waiting:
            self._pass_on()

    def _read_until(self, slot: PendingReply[Any], deadline: float) -> bool:
        """Read as the leader until the reply is done or the time is up; False: another thread is the leader."""
        if not self.turn.acquire(blocking=False):
            return False
        try:
            while not slot.is_done and (left := deadline - time.monotonic()) > 0:
                self._read(min(left, _SLICE_S))
        finally:
            self.turn.release()
        return True

    def read_idly(self, timeout_s: float) -> bool:
        """Read once if no thread reads or has waited since the last call; returns whether it did."""
        was_quiet = self._num_waits == self._seen
        self._seen = self._num_waits
        if not was_quiet or self._waiting or not self.turn.acquire(blocking=False):
            return False
        try:
            self._read(timeout_s)
        finally:
            self.turn.release()
        self._pass_on()
        return True

    def _pass_on(self) -> None:
        """Wake one follower, which becomes the leader."""
        if self._waiting:
            with self._lock:
                following = next(iter(self._waiting), None)
            if following is not None:
                following.wake_up()
