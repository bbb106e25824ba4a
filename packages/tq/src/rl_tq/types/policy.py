"""`Policy`: how a claim chooses among ready rows, with the index of these rows that every policy keeps.

An index holds the rows that one task can claim now, in the order of one policy, and is kept up to date as rows come and
go. It holds each row at most once. What was claimed or cleared stays in the order lists until it surfaces, or until it
is most of them; `members` alone says what is there. The policies themselves are in `rl_tq.policies`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rl_tq.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMeta:
    """Row as a sampler sees it: id and tags."""

    sample_id: str
    """Id of the row."""
    tags: Mapping[str, Any]
    """Its tags."""


class Row(Protocol):
    """Row as an index sees it. The server has checked its tags."""

    @property
    def number(self) -> int:
        """Row number, never reused; a smaller one is older."""
        ...

    @property
    def sample_id(self) -> str:
        """Sample id."""
        ...

    @property
    def tags(self) -> Mapping[str, Any]:
        """Its tags."""
        ...

    @property
    def group(self) -> Hashable:
        """Its tag `group_id`, or None."""
        ...

    @property
    def version(self) -> int | None:
        """Its tag `weight_version_min`, or None."""
        ...

    @property
    def columns(self) -> frozenset[str]:
        """Names of the columns that it has."""
        ...


class ReadyRows:
    """Index of ready rows in order of arrival. Other indexes override `take`."""

    def __init__(self) -> None:
        self.members: dict[int, Row] = {}
        self._fifo: list[int] = []
        self._head = 0
        self._out_of_order: list[int] = []
        """Heap of rows that became ready after younger ones."""

    def __len__(self) -> int:
        return len(self.members)

    def oldest(self) -> list[int]:
        """All rows, oldest first."""
        return sorted(self.members)

    def add(self, row: Row, *, is_back: bool = False) -> None:
        """Add a row; idempotent. `is_back`: the task had claimed it before."""
        number = row.number
        if number in self.members:
            return
        self.members[number] = row
        if not self._fifo or number > self._fifo[-1]:
            self._fifo.append(number)
        else:
            heapq.heappush(self._out_of_order, number)

    def extend(self, numbers: Sequence[int], rows: Sequence[Row]) -> None:
        """Add rows with these numbers, younger than all others, the oldest first."""
        self.members.update(zip(numbers, rows, strict=True))
        self._fifo += numbers

    def discard(self, rows: Collection[int]) -> None:
        """Remove rows, if they are in the index."""
        if not self.members.keys().isdisjoint(rows):
            for row in rows:
                self.members.pop(row, None)
        if len(self._fifo) - self._head + len(self._out_of_order) > 2 * len(self.members) + 64:
            self._fifo, self._head, self._out_of_order = sorted(self.members), 0, []

    def take(self, count: int) -> Sequence[int] | None:
        """Remove and return rows for a claim of `count`; None: it has to wait.

        Raises:
            PolicyError: the policy can never give one of the rows.
        """
        members, head, line = self.members, self._head, self._fifo
        if len(members) < count:
            return None
        if not self._out_of_order and len(line) - head >= count:
            # Fast path of most claims: consecutive numbers, none of them removed since.
            numbers = range(line[head], line[head] + count)
            if line[head + count - 1] == numbers[-1] and self._remove(numbers):
                self._head = head + count
                self._shorten()
                return numbers
        return [row.number for row in self._pull(count)]

    def why_waiting(self) -> str:
        """Reason why a claim waits although rows are ready; empty if there is none to add."""
        return ""

    def _remove(self, numbers: range) -> bool:
        """Remove all of these rows and return True; False, with none removed, if one is missing."""
        removed: list[Row] = []
        try:
            removed.extend(map(self.members.pop, numbers))
        except KeyError:
            self.members.update(zip(numbers, removed, strict=False))
            return False
        return True

    def _pull(self, count: int) -> list[Row]:
        pulled: list[Row] = []
        while not self._out_of_order and self._head < len(self._fifo) and (missing := count - len(pulled)):
            numbers = self._fifo[self._head : self._head + missing]
            self._head += len(numbers)
            pulled += [row for number in numbers if (row := self.members.pop(number, None)) is not None]
            self._shorten()
        while len(pulled) < count:
            row = self.members.pop(self._pop(), None)
            if row is not None:
                pulled.append(row)
        return pulled

    def _pop(self) -> int:
        if self._out_of_order and (self._head == len(self._fifo) or self._out_of_order[0] < self._fifo[self._head]):
            return heapq.heappop(self._out_of_order)
        number = self._fifo[self._head]
        self._head += 1
        self._shorten()
        return number

    def _shorten(self) -> None:
        if self._head > 4096 and 2 * self._head > len(self._fifo):
            del self._fifo[: self._head]
            self._head = 0


class UnsortedRows(ReadyRows):
    """Index in another order than that of arrival: rows are added one by one."""

    def extend(self, numbers: Sequence[int], rows: Sequence[Row]) -> None:
        """See `ReadyRows.extend`."""
        for row in rows:
            self.add(row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Base class of policies: parameters that are sent to the server as JSON, and the index that the server keeps.

    A policy of your own is a subclass, a frozen dataclass of JSON values that overrides `choose`, installed under its
    `name` in the entry point group `rl_tq.policies` where the server runs.
    """

    name: ClassVar[str]

    def check(self, batch_size: int) -> None:
        """Raise ValueError if the policy cannot serve claims of `batch_size` rows."""

    def choose(self, rows: Sequence[RowMeta], batch_size: int) -> Sequence[int] | None:
        """Custom policies: positions in the ready rows (oldest first), or None to wait until they change.

        Runs in the server, under its lock, at every change while a claim waits, so it must be fast. The policies of
        `rl_tq.policies` do not use it: they make an index of their own.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must override choose(rows, batch_size)")

    def make_index(self, given_groups: Callable[[], Iterable[Hashable]]) -> ReadyRows:
        """Empty index of the rows that a task can claim; `given_groups` returns the groups that it claimed before.

        The server keeps one per task, set of columns and policy.
        """
        return ChosenRows(self)

    def to_json(self) -> dict[str, Any]:
        """Policy as JSON values."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            "name": self.name,
            **{key: value.to_json() if isinstance(value, Policy) else value for key, value in values.items()},
        }


class ChosenRows(ReadyRows):
    """Index of all ready rows, from which a custom policy's `choose` selects at every claim."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = policy

    def take(self, count: int) -> Sequence[int] | None:
        """See `ReadyRows.take`."""
        numbers = self.oldest()
        rows = [RowMeta(sample_id=row.sample_id, tags=row.tags) for row in map(self.members.__getitem__, numbers)]
        try:
            choice = self._policy.choose(rows, count)
        except Exception as error:
            raise PolicyError(f"policy {self._policy} failed on {len(rows)} ready rows: {error!r}") from error
        if choice is None:
            return None
        if len(set(choice)) != len(choice) or not choice or not all(0 <= i < len(rows) for i in choice):
            raise PolicyError(
                f"policy {self._policy} chose {list(choice)[:8]}: it must return different positions below "
                f"{len(rows)}, or None to wait"
            )
        taken = [numbers[i] for i in choice]
        self.discard(taken)
        return taken

    def why_waiting(self) -> str:
        """See `ReadyRows.why_waiting`."""
        return "among which the policy did not choose" if self.members else ""
