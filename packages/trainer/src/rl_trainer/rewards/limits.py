"""Rate limit of requests and tokens per minute: never more within any period of that length.

Ours rather than aiolimiter's: its leaky bucket lets 39 through in one second of a limit of 20 (measured, 1.3.0),
refuses an amount above the limit, and takes no correction once the server has told how many tokens there were.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque


class Window:
    """What was taken within the last `period_s` seconds, at most `limit` at any time; times are given, none is read.

    Args:
        limit: Units per period.
        period_s: Seconds.
    """

    def __init__(self, limit: float, period_s: float = 60.0) -> None:
        self._limit, self._period_s = limit, period_s
        self._taken: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def delay_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be taken; what is more than the limit may once nothing else is taken."""
        while self._taken and self._taken[0][0] <= now - self._period_s:
            self._sum -= self._taken.popleft()[1]
        left = self._sum - max(self._limit - amount, 0.0)
        for at, taken in self._taken:
            if left <= 0:
                break
            left -= taken
            if left <= 0:
                return at + self._period_s - now
        return 0.0

    def take(self, amount: float, now: float) -> None:
        """Take it, whether or not it may be."""
        self._taken.append((now, amount))
        self._sum += amount


class RateLimit:
    """Requests wait, in their order, until one more with its tokens is within both limits.

    Args:
        requests_per_minute: 0: any number.
        tokens_per_minute: 0: any number.
    """

    def __init__(self, *, requests_per_minute: float = 0.0, tokens_per_minute: float = 0.0) -> None:
        self._requests = Window(requests_per_minute) if requests_per_minute else None
        self._tokens = Window(tokens_per_minute) if tokens_per_minute else None
        self._turn = asyncio.Lock()

    async def wait(self, num_tokens: float) -> None:
        """Wait for one request of about `num_tokens` tokens."""
        pairs = [(w, amount) for w, amount in ((self._requests, 1.0), (self._tokens, num_tokens)) if w is not None]
        async with self._turn:
            for window, amount in pairs:
                await asyncio.sleep(window.delay_s(amount, time.monotonic()))  # what waits behind us takes nothing
            for window, amount in pairs:
                window.take(amount, time.monotonic())

    def correct(self, num_tokens: float) -> None:
        """Take tokens that the estimate lacked, or give back what it had too much."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, time.monotonic())
