"""The rows that one task can claim now, oldest first."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class ReadyRows:
    """A set of row numbers that gives the smallest first. A row that left never comes back: it was claimed or cleared.

    Rows that left stay in the heap until they surface, or until they are most of it.
    """

    def __init__(self, rows: Iterable[int]) -> None:
        self._members = set(rows)
        self._heap = sorted(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, row: int) -> bool:
        return row in self._members

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._members))

    def add(self, row: int) -> None:
        """Add one row; twice is the same as once."""
        if row not in self._members:
            self._members.add(row)
            heapq.heappush(self._heap, row)

    def discard(self, rows: Iterable[int]) -> None:
        """Remove rows, whether they are here or not."""
        self._members.difference_update(rows)
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = sorted(self._members)

    def take(self, count: int) -> list[int]:
        """Remove and return the `count` smallest rows; there must be that many."""
        taken: list[int] = []
        while len(taken) < count:
            row = heapq.heappop(self._heap)
            if row in self._members:
                taken.append(row)
        self._members.difference_update(taken)
        return taken
