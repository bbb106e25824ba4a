"""The rows that one task can claim now, in the order of one policy: an index each, kept up to date as rows come and go.

An index holds each row at most once. What was claimed or cleared stays in the order lists until it surfaces, or until
it is most of them; `members` alone says what is there.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rl_tq._rows import Row


class ReadyRows:
    """Oldest first. The other orders (`_orders`) differ in what `take` gives."""

    def __init__(self) -> None:
        self.members: dict[int, Row] = {}
        self._line: list[int] = []
        self._head = 0
        self._late: list[int] = []
        """A heap: rows that came after younger ones."""
        self.rejected: dict[int, Row] = {}
        """Rows that are to be cleared."""

    def __len__(self) -> int:
        return len(self.members)

    def oldest(self) -> list[int]:
        """All rows, oldest first."""
        return sorted(self.members)

    def add(self, row: Row, *, is_back: bool = False) -> None:
        """Add one row; twice is the same as once. `is_back`: the task was given it before."""
        del is_back
        number = row.number
        if number in self.members:
            return
        self.members[number] = row
        if not self._line or number > self._line[-1]:
            self._line.append(number)
        else:
            heapq.heappush(self._late, number)

    def extend(self, numbers: Sequence[int], rows: Sequence[Row]) -> None:
        """Add rows of these numbers that are younger than all others, the oldest first."""
        self.members.update(zip(numbers, rows, strict=True))
        self._line += numbers

    def discard(self, rows: Collection[int]) -> None:
        """Remove rows, whether they are here or not."""
        if not self.members.keys().isdisjoint(rows):
            for row in rows:
                self.members.pop(row, None)
        if len(self._line) - self._head + len(self._late) > 2 * len(self.members) + 64:
            self._line, self._head, self._late = sorted(self.members), 0, []

    def take(self, count: int) -> Sequence[int] | None:
        """Remove and return rows for a claim of `count`; None: it has to wait.

        Raises:
            PolicyError: a row stands in the way that no claim can ever be given.
        """
        members, head, line = self.members, self._head, self._line
        if len(members) < count:
            return None
        if not self._late and len(line) - head >= count:
            # Most claims: consecutive numbers, of which none left since.
            numbers = range(line[head], line[head] + count)
            if line[head + count - 1] == numbers[-1] and self._remove(numbers):
                self._head = head + count
                self._shorten()
                return numbers
        return [row.number for row in self._pull(count)]

    def lacks(self) -> str:
        """Why a claim waits although rows are ready; empty where there is nothing to add."""
        return ""

    def _remove(self, numbers: range) -> bool:
        """Remove all of these rows, or none of them because one is not here."""
        removed: list[Row] = []
        try:
            removed.extend(map(self.members.pop, numbers))
        except KeyError:
            self.members.update(zip(numbers, removed, strict=False))
            return False
        return True

    def _pull(self, count: int) -> list[Row]:
        pulled: list[Row] = []
        while not self._late and self._head < len(self._line) and (missing := count - len(pulled)):
            numbers = self._line[self._head : self._head + missing]
            self._head += len(numbers)
            pulled += [row for number in numbers if (row := self.members.pop(number, None)) is not None]
            self._shorten()
        while len(pulled) < count:
            row = self.members.pop(self._pop(), None)
            if row is not None:
                pulled.append(row)
        return pulled

    def _pop(self) -> int:
        if self._late and (self._head == len(self._line) or self._late[0] < self._line[self._head]):
            return heapq.heappop(self._late)
        number = self._line[self._head]
        self._head += 1
        self._shorten()
        return number

    def _shorten(self) -> None:
        if self._head > 4096 and 2 * self._head > len(self._line):
            del self._line[: self._head]
            self._head = 0
