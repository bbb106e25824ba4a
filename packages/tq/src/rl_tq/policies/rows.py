"""Policies of single rows: by order of arrival, version or priority."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rl_tq.errors import PolicyError
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget(Policy):
    """Oldest first, as many rows as have `max_tokens` tokens (tag `num_tokens`) together: up to `batch_size` of them.

    Given once the next row in line would not fit, or `batch_size` rows are there. A row longer than the budget makes
    the claim raise `PolicyError`: it could never be given.
    """

    max_tokens: int
    """Sum of `num_tokens` at most."""
    name: ClassVar[str] = "token_budget"

    def __post_init__(self) -> None:
        check_at_least_one(max_tokens=self.max_tokens)

    def make_index(self, given_groups: Callable[[], Iterable[Hashable]]) -> ReadyRows:
        """See `Policy.make_index`."""
        return BudgetedRows(self.max_tokens)


class BudgetedRows(ReadyRows):
    """Index in the order of arrival, from which a claim takes as many rows as have `max_tokens` tokens together."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self._max_tokens = max_tokens
        self._held: dict[int, None] = {}
        """Oldest rows, removed from the order lists; together they fit the budget."""
        self._sum = 0.0

    def add(self, row: Row, *, is_back: bool = False) -> None:
        """See `ReadyRows.add`."""
        super().add(row, is_back=is_back)
        if self._held and row.number < next(reversed(self._held)):
            self._put_back()

    def discard(self, rows: Collection[int]) -> None:
        """See `ReadyRows.discard`."""
        self._put_back()
        super().discard(rows)

    def take(self, count: int) -> Sequence[int] | None:
        """See `ReadyRows.take`."""
        if len(self._held) > count:
            self._put_back()
        is_full = False
        while not is_full and len(self._held) < count and len(self._held) < len(self.members):
            number = self._pop()
            row = self.members.get(number)
            if row is None or number in self._held:
                continue
            tokens = row.tags.get("num_tokens")
            if tokens is None or tokens > self._max_tokens:
                heapq.heappush(self._out_of_order, number)
                raise PolicyError(
                    f"row {row.sample_id!r} has num_tokens={tokens}, and a claim takes {self._max_tokens} tokens: it "
                    "would stand in the way for ever; tag every row, give a larger budget, or clear that row"
                )
            if self._sum + tokens > self._max_tokens:
                heapq.heappush(self._out_of_order, number)
                is_full = True
            else:
                self._held[number] = None
                self._sum += tokens
        if not is_full and len(self._held) < count:
            return None
        taken = list(self._held)
        for number in taken:
            del self.members[number]
        self._held, self._sum = {}, 0.0
        return taken

    def why_waiting(self) -> str:
        """See `ReadyRows.why_waiting`."""
        return f"together they have {self._sum:.0f} of {self._max_tokens} tokens" if self._held else ""

    def _put_back(self) -> None:
        for number in self._held:
            heapq.heappush(self._out_of_order, number)
        self._held, self._sum = {}, 0.0
