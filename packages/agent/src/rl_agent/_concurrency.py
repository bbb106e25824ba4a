"""Bounded concurrency on one event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Iterator

T = TypeVar("T")


async def as_finished(work: Iterator[Coroutine[Any, Any, T]], limit: int) -> AsyncGenerator[T, None]:
    """Run coroutines, at most `limit` at a time, and yield their results in the order in which they finish.

    The next coroutine is taken as soon as one ends, whether or not the results are being read. The first error is
    raised, and leaving for whatever reason cancels the rest and waits for it to end.
    """
    running: set[asyncio.Task[T]] = set()
    finished: asyncio.Queue[asyncio.Task[T]] = asyncio.Queue()
    is_open = True

    def start_next() -> None:
        coroutine = next(work, None) if is_open else None
        if coroutine is not None:
            task = asyncio.create_task(coroutine)
            running.add(task)
            task.add_done_callback(on_done)

    def on_done(task: asyncio.Task[T]) -> None:
        running.discard(task)
        finished.put_nowait(task)
        start_next()

    try:
        for _ in range(limit):
            start_next()
        while running or not finished.empty():
            yield (await finished.get()).result()
    finally:
        is_open = False
        unread = [finished.get_nowait() for _ in range(finished.qsize())]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, *unread, return_exceptions=True)
