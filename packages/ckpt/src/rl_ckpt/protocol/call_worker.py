"""`Worker`: runs an end's blocking calls one at a time, in the caller's thread or, for asyncio, in its own."""

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
"""Longest wait for a cancelled call to return before the next begins, seconds; a source may block."""


class Worker:
    """Runs blocking functions, never two at once. All calls of `run` share one thread."""

    def __init__(self, owner: str) -> None:
        self.canceller = Canceller()
        self._owner = owner
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._is_closed = False
        self._ending: asyncio.Future[Any] | None = None
        """Cancelled call that has not returned yet."""

    def call(self, work: Callable[[], T]) -> T:
        """Call `work` in this thread.

        Raises:
            UsageError: another call is running; or this end is closed, or belongs to another process.
        """
        self._enter()
        return self._finish(work)

    async def run(self, work: Callable[[], T], *, on_cancel: Callable[[], None] | None = None) -> T:
        """Call `work` in the thread of this end. Cancelling the task cancels its waits, and waits until it returned.

        The message that the task is cancelled with becomes the message of the error that its waits raise.

        Raises:
            UsageError: another call is running; or this end is closed, or belongs to another process.
        """
        if self._ending is not None and self._ending.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([self._ending], timeout=ENDING_S)
        self._enter()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"rl-ckpt {self._owner}")
        # The caller's CUDA stream, so that work stays in order: a new thread starts with the default stream.
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
        """Begin a call; `_finish` ends it, in any thread."""
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
        """Allow waits again after a cancelled call returned; its result is discarded."""
        self._ending = None
        future.exception()
        self.canceller.clear()

    def close(self, release: Callable[[], None], timeout_s: float) -> None:
        """Cancel the running call, then call `release`. Idempotent; a no-op in a forked child.

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
            self._pool.shutdown()  # wait: its thread refers to the last call, which would keep a ring mapped


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
        """Cancel a wait for the next item, which raises `concurrent.futures.CancelledError`."""
        self._is_cancelled = True
        if self._pending is not None:
            self._pending.cancel()

    async def _advance(self) -> T:
        return await anext(self._iterator)
