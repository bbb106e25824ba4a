"""Policies of single rows: by order of arrival, version or priority."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rl_tq.types.policy import Policy, ReadyRows, UnsortedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

    from rl_tq.types.policy import Row


def check_at_least_one(**values: int) -> None:
    """Raise ValueError for a parameter that is less than 1."""
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fifo(Policy):
    """Oldest first: the default."""

    name: ClassVar[str] = "fifo"

    def make_index(self, given_groups: Callable[[], Iterable[Hashable]]) -> ReadyRows:
        """See `Policy.make_index`."""
        return ReadyRows()


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReady(Policy):
    """All rows that are ready, at least as many as were asked for: for a consumer that chooses among them itself."""

    name: ClassVar[str] = "all_ready"

    def make_index(self, given_groups: Callable[[], Iterable[Hashable]]) -> ReadyRows:
        """See `Policy.make_index`."""
        return _AllRows()


class _AllRows(ReadyRows):
    """Index whose claims take all ready rows."""

    def take(self, count: int) -> Sequence[int] | None:
        """See `ReadyRows.take`."""
        return super().take(max(count, len(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class OldestVersion(Policy):
    """Rows with the lowest tag `weight_version_min` first, then the oldest; rows without it last."""

    name: ClassVar[str] = "oldest_version"

    def make_index(self, given_groups: Callable[[], Iterable[Hashable]]) -> ReadyRows:
        """See `Policy.make_index`."""
        return RankedRows(lambda row: float("inf") if row.version is None else row.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Priority(Policy):
    """Rows with the highest tag `priority` first, then the oldest; rows without it count as 0."""

    name: ClassVar[str] = "priority"

    def make_index(self, given_groups: Callable[[], Iterable[Hashable]]) -> ReadyRows:
        """See `Policy.make_index`."""
        return RankedRows(lambda row: -(row.tags.get("priority") or 0.0))


class RankedRows(UnsortedRows):
    """Index by a key: smallest first, then oldest."""

    def __init__(self, key: Callable[[Row], float]) -> None:
        super().__init__()
        self._key = key
        self._heap: list[tuple[float, int]] = []

    def add(self, row: Row, *, is_back: bool = False) -> None:
        """See `ReadyRows.add`."""
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
            if row is not None and self._key(row) == key:  # else it was removed, or its rank changed
                del self.members[number]
                taken.append(number)
        return taken
