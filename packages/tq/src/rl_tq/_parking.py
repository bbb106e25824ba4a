"""How the threads of one client share one socket: who waits for an answer reads for everybody.

A thread that waits takes the socket if nobody has it, hands out what comes, and passes the socket on when its own
answer is there: no other thread has to be woken for it. While nobody waits, the client's own thread reads.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Answer = TypeVar("Answer")
_NONE: Any = object()
_SLICE_S = 1.0
"""No system call waits longer: a signal that comes just before one is only seen by Python when it ends."""


class Slot(Generic[Answer]):
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
        self.nudge()

    def fail(self, error: BaseException) -> None:
        """Have whoever waits raise."""
        self._error = error
        self.nudge()

    def nudge(self) -> None:
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


class Turnstile:
    """One reader at a time. `read(timeout_s)` reads what comes within that time and hands it out to slots."""

    def __init__(self, read: Callable[[float], None]) -> None:
        self._read = read
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._waiting: dict[Slot[Any], None] = {}
        self._num_waits = self._seen = 0

    @property
    def is_wanted(self) -> bool:
        """Whether some thread waits for an answer."""
        return bool(self._waiting)

    def wait(self, slot: Slot[Any], timeout_s: float) -> bool:
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

    def _read_until(self, slot: Slot[Any], deadline: float) -> bool:
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
                following.nudge()
