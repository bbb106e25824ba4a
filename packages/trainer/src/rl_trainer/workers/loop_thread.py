"""Event loop on its own thread, for workers whose methods are called synchronously."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from rl_trainer.errors import WorkerTimeoutError

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from concurrent.futures import Future

T = TypeVar("T")


class LoopThread:
    """Runs coroutines on one event loop that lives as long as the worker, so that sockets stay open between calls."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_closing:
            with suppress(SystemExit, KeyboardInterrupt):  # of a task of foreign code: its waiter gets it as well
                self._loop.run_forever()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine to its end and return its result.

        Raises:
            WorkerTimeoutError: it took longer; it is cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except BaseException as error:
            if future.done() or not isinstance(error, TimeoutError):
                raise
            what = f"{work.__qualname__} of the {self._thread.name} worker"
            raise WorkerTimeoutError(f"{what} did not end within timeout_s={timeout_s:g} s; it was cancelled") from None
        finally:
            future.cancel()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the background."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task of the loop, from any thread; its waiter is notified once it has ended."""
        self._loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """Stop the loop. Idempotent."""
        if self._loop.is_closed():
            return
        self._is_closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()
