"""Policies of order: oldest first, oldest weights first, highest priority first."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rl_tq.policies.base import Policy, ReadyRows, UnsortedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

    from rl_tq.policies.base import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Fifo(Policy):
    """Oldest first: the default."""

    name: ClassVar[str] = "fifo"

    def make_index(self, given_groups: Callable[[], Iterable[Hashable]]) -> ReadyRows:
        """See `Policy.make_index`."""
        del given_groups
        return ReadyRows()


@dataclass(frozen=True, slots=True, kw_only=True)
class OldestVersion(Policy):
    """Rows with the lowest tag `weight_version_min` first, then the oldest; rows without it last."""

    name: ClassVar[str] = "oldest_version"

    def make_index(self, given_groups: Callable[[], Iterable[Hashable]]) -> ReadyRows:
        """See `Policy.make_index`."""
        del given_groups
        return RankedRows(lambda row: float("inf") if row.version is None else row.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Priority(Policy):
    """Rows with the highest tag `priority` first, then the oldest; rows without it count as 0."""

    name: ClassVar[str] = "priority"

    def make_index(self, given_groups: Callable[[], Iterable[Hashable]]) -> ReadyRows:
        """See `Policy.make_index`."""
        del given_groups
        return RankedRows(lambda row: -(row.tags.get("priority") or 0.0))


class RankedRows(UnsortedRows):
    """Index by a key: smallest first, then oldest."""

    def __init__(self, key: Callable[[Row], float]) -> None:
        super().__init__()
        self._key = key
        self._heap: list[tuple[float, int]] = []

    def add(self, row: Row, *, is_back: bool = False) -> None:
        """See `ReadyRows.add`."""
        del is_back
        if row.number not in self.members:
            self.members[row.number] = row
            heapq.heappush(self._heap, (self._key(row), row.number))

    def discard(self, rows: Collection[int]) -> None:
        """See `ReadyRows.discard`."""
        for row in rows:
            self.members.pop(row, None)
        if len(self._heap) > 2 * len(self.members) + 64:
            self._heap = sorted((self._key(row), row.number) for row in self.members.values())

    def take(self, count: int) -> Sequence[int] | None:
        """See `ReadyRows.take`."""
        if len(self.members) < count:
            return None
        taken: list[int] = []
        while len(taken) < count:
            key, number = heapq.heappop(self._heap)
            row = self.members.get(number)
            if row is not None and self._key(row) == key:  # else it left, or has another rank by now
                del self.members[number]
                taken.append(number)
        return taken
