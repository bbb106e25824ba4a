"""Engine thread: runs the engine's steps, and takes commands from an event loop.

The event loop posts commands and whole batches of requests; the thread runs commands between steps and posts back all
events of a step in one call. So neither side waits for the other's work per request and token.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rl_rollout.errors import GenerationError, ServerLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_rollout.backends.embedded.decode_engine import Engine, Event

T = TypeVar("T")

_log = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 30.0
"""Most seconds that the end of this process waits for an engine's running step."""

_running: weakref.WeakSet[EngineThread] = weakref.WeakSet()
"""Engine threads that were started and perhaps not stopped."""


def _stop_all() -> None:
    """Stop all engine threads at exit: one that returns from native code after the interpreter is gone would abort."""
    for thread in list(_running):
        if not thread.stop(EXIT_TIMEOUT_S):
            _log.warning("an engine is still in its step after %g s; the process ends under it", EXIT_TIMEOUT_S)


def _promise() -> Future[Any]:
    """Future that its waiter cannot cancel: a command is run and answered even if its waiter has gone."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


class EngineThread:
    """Thread that owns an engine: no other thread touches the engine while it runs.

    Args:
        build: Creates the engine, in the thread. Its exceptions are raised by the future of `start`.
        deliver: Called in the thread with the events since the last call.
    """

    def __init__(self, build: Callable[[], Engine], deliver: Callable[[list[tuple[str, Event]]], None]) -> None:
        self._build = build
        self._deliver = deliver
        self._commands: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._wakeup = threading.Condition()
        self._is_wanted = torch.zeros(1, dtype=torch.int64)
        """Flag, 1 while a command waits: a native call of several decode steps then ends with its current one."""
        self._is_stopping = False
        self._drained: list[Future[None]] = []
        self._thread = threading.Thread(target=self._run, name="rl-rollout-engine", daemon=True)
        self._ready: Future[Engine] = _promise()

    def start(self) -> Future[Engine]:
        """Start the thread; the future holds the engine, or the error with which building it failed."""
        atexit.unregister(_stop_all)
        atexit.register(_stop_all)  # once, and before what was registered earlier
        _running.add(self)
        self._thread.start()
        return self._ready

    def call(self, command: Callable[[Engine], T]) -> Future[T]:
        """Run `command` between two steps, in the order of the calls."""
        future: Future[T] = _promise()
        with self._wakeup:
            if self._is_stopping:
                future.set_exception(ServerLostError("the embedded server has stopped"))
                return future
            self._commands.append((command, future))
            self._is_wanted.fill_(1)
            self._wakeup.notify()
        return future

    def drained(self) -> Future[None]:
        """Future that is done when no request is in flight, those aside that arrived after a pause."""
        future: Future[None] = _promise()
        self.call(lambda _: self._drained.append(future))
        return future

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """End after the running step. Returns whether the thread ended before the deadline."""
        with self._wakeup:
            self._is_stopping = True
            self._is_wanted.fill_(1)
            self._wakeup.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if not self.is_alive:
            _running.discard(self)
        return not self.is_alive

    def _run(self) -> None:
        try:
            engine = self._build()
        except BaseException as error:  # noqa: BLE001  raised by the future of `start`
            self._ready.set_exception(error)
            return
        self._ready.set_result(engine)
        try:
            while self._obey(engine):
                self._step(engine)
        finally:  # after an unexpected error too, so that nobody waits for a thread that has ended
            with self._wakeup:
                self._is_stopping = True
            engine.fail(ServerLostError("the embedded server was stopped while this request was in flight"))
            self._deliver(engine.take_events())
            for _, future in self._commands:
                future.set_exception(ServerLostError("the embedded server was stopped"))

    def _obey(self, engine: Engine) -> bool:
        """Wait for work, run the commands that were posted; returns whether to go on."""
        with self._wakeup:
            while not (self._commands or self._is_stopping or engine.can_step):
                engine.clock.rest()
                self._wakeup.wait()
            if self._is_stopping:
                return False
            commands = list(self._commands)
            self._commands.clear()
            self._is_wanted.zero_()
        for command, future in commands:
            try:
                result = command(engine)
            except Exception as error:  # noqa: BLE001  raised by the caller's future
                future.set_exception(error)
                continue
            self._report(engine)  # events first: requests that a command ended have ended when it returns
            future.set_result(result)
        return True

    def _report(self, engine: Engine) -> None:
        if events := engine.take_events():
            self._deliver(events)

    def _step(self, engine: Engine) -> None:
        if engine.can_step:
            try:
                engine.step(self._is_wanted)
            except Exception as error:  # noqa: BLE001  logged, and raised by every request in flight
                # Out of memory, or an error in the model: requests in flight fail, and later ones are served.
                _log.exception("a decode step failed; every request in flight gets the error")
                failure = GenerationError(f"a decode step failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                engine.fail(failure)
        self._report(engine)
        if self._drained and engine.is_drained:
            for future in self._drained:
                future.set_result(None)
            self._drained.clear()
