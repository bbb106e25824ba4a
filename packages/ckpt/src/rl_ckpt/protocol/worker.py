"""Runs the blocking half of an end, one call at a time: in the caller's thread, or for asyncio in one of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rl_ckpt.errors import PeerTimeoutError, UsageError
from rl_ckpt.protocol.channel import Canceller

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable

T = TypeVar("T")

ENDING_S = 10.0
"""Longest wait for a cancelled call to return before the next one begins; a source of weights may block."""


class Worker:
    """Calls blocking functions, never two at once. `run` keeps the order of threads: all its calls share one."""

    def __init__(self, owner: str) -> None:
        self.canceller = Canceller()
        self._owner = owner
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._is_closed = False
        self._ending: asyncio.Future[Any] | None = None
        """The call that was cancelled last, until it has returned: who cancels twice does not wait for that."""

    def call(self, work: Callable[[], T]) -> T:
        """Call `work` in this thread.

        Raises:
            UsageError: another call is under way, or this end is closed, or another process's.
        """
        self._enter()
        return self._finish(work)

    async def run(self, work: Callable[[], T], *, on_cancel: Callable[[], None] | None = None) -> T:
        """Call `work` in the thread of this end. Cancelling the task ends its waits and waits until it has returned.

        What the task is cancelled with, if it is a sentence, is what its waits raise.

        Raises:
            UsageError: another call is under way, or this end is closed, or another process's.
        """
        if self._ending is not None and self._ending.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([self._ending], timeout=ENDING_S)
        self._enter()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"rl-ckpt {self._owner}")
        # the caller's stream, in whatever order it has given work to its device: a thread begins with another
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

        def on_thread() -> T:
            with torch.cuda.stream(stream):
                return self._finish(work)

        future = asyncio.get_running_loop().run_in_executor(self._pool, on_thread)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError as error:
            self.canceller.cancel(str(error) or f"the call on {self._owner} was cancelled")
            self._ending = future
            future.add_done_callback(self._forget)
            if on_cancel is not None:
                on_cancel()
            await asyncio.wait([future])
            raise

    def _enter(self) -> None:
        """Begin a call; `_finish` ends it, in whatever thread."""
        if os.getpid() != self._pid:
            raise UsageError(
                f"{self._owner} was opened in process {self._pid} and does not survive a fork; open another with "
                f"rl_ckpt.connect in process {os.getpid()}"
            )
        if not self._lock.acquire(blocking=False):
            self._require_open()
            raise UsageError(f"{self._owner} is busy with another call; wait for it, or cancel it first")
        try:
            self._require_open()
        except UsageError:
            self._lock.release()
            raise

    def _finish(self, work: Callable[[], T]) -> T:
        try:
            with torch.no_grad():
                return work()
        finally:
            self._lock.release()

    def _require_open(self) -> None:
        if self._is_closed:
            raise UsageError(f"{self._owner} is closed; open another with rl_ckpt.connect")

    def _forget(self, future: asyncio.Future[T]) -> None:
        """Let the next call wait again. What the cancelled one would have said is of no use to anybody."""
        self._ending = None
        future.exception()
        self.canceller.clear()

    def close(self, release: Callable[[], None], timeout_s: float) -> None:
        """End the call under way, then call `release`. Idempotent, and nothing in a forked child.

        Raises:
            PeerTimeoutError: the call did not end within `timeout_s`, for example because the source of weights blocks.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        self.canceller.cancel(f"{self._owner} was closed")
        if not self._lock.acquire(timeout=timeout_s):
            raise PeerTimeoutError(
                f"{self._owner} could not be closed: its last call did not end within {timeout_s:g} s"
            )
        try:
            self._is_closed = True
            release()
            self.canceller.close()
        finally:
            self._lock.release()
        if self._pool is not None:
            self._pool.shutdown(wait=False)


class AsyncSource(Iterator[T]):
    """Iterates an async iterable of an event loop from another thread."""

    def __init__(self, source: AsyncIterable[T], loop: asyncio.AbstractEventLoop) -> None:
        self._iterator: AsyncIterator[T] = aiter(source)
        self._loop = loop
        self._pending: Future[T] | None = None
        self._is_cancelled = False

    def __iter__(self) -> AsyncSource[T]:
        return self

    def __next__(self) -> T:
        self._pending = asyncio.run_coroutine_threadsafe(self._advance(), self._loop)
        if self._is_cancelled:
            self._pending.cancel()
        try:
            return self._pending.result()
        except StopAsyncIteration:
            raise StopIteration from None

    def cancel(self) -> None:
        """End a wait for the next item: it raises `concurrent.futures.CancelledError`."""
        self._is_cancelled = True
        if self._pending is not None:
            self._pending.cancel()

    async def _advance(self) -> T:
        return await anext(self._iterator)
