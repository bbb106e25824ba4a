"""Requests that wait: who stands in which partition's line, and until when."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_tq._ledger import Timers
    from rl_tq._requests import Request


class Waiting:
    """Parked requests by partition, in the order in which they came; each has a timer for its deadline."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._lines: dict[str, dict[Any, Request]] = {}
        self._where: dict[Any, str] = {}

    def __contains__(self, key: Any) -> bool:
        return key in self._where

    def line(self, partition: str) -> dict[Any, Request]:
        """Those of one partition; kept up to date while it is not empty."""
        return self._lines.get(partition, {})

    def find(self, key: Any) -> Request:
        """The request of a key."""
        return self._lines[self._where[key]][key]

    def park(self, request: Request) -> None:
        """Have a request wait."""
        self._lines.setdefault(request.partition, {})[request.key] = request
        self._where[request.key] = request.partition
        self._timers.set(("wait", request.key), request.deadline)

    def leave(self, key: Any) -> Request:
        """Have a request wait no more."""
        partition = self._where.pop(key)
        self._timers.cancel(("wait", key))
        line = self._lines[partition]
        request = line.pop(key)
        if not line:
            del self._lines[partition]
        return request

    def counts(self) -> Counter[str]:
        """How many wait, by partition."""
        return Counter({name: len(line) for name, line in self._lines.items()})
