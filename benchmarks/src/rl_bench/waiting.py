"""Waiters for tests: poll a condition until a deadline that no busy machine misses."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 120.0
POLL_S = 0.01


def until(condition: Callable[[], object], what: str = "a condition", timeout_s: float = PATIENCE_S) -> None:
    """Wait for a condition; `what` names it in the failure."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s: {what}"
        time.sleep(POLL_S)


async def until_async(
    condition: Callable[[], object], what: str = "a condition", timeout_s: float = PATIENCE_S
) -> None:
    """Wait for a condition in a coroutine, as `until`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s: {what}"
        await asyncio.sleep(POLL_S)
