"""The orders in which rows are claimed, one class each: those of `rl_tq.policies` that are not oldest first.

The tags that they read are numbers or None: others are refused where they are put (`_checks`).
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from rl_tq import policies
from rl_tq._balance import balanced_order
from rl_tq._ready import ReadyRows
from rl_tq.errors import PolicyError
from rl_tq.types import RowMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

    from rl_tq._rows import Row
    from rl_tq.types import Policy


class _OneByOne(ReadyRows):
    """What has another order than the line of all rows."""

    def extend(self, numbers: Sequence[int], rows: Sequence[Row]) -> None:
        del numbers
        for row in rows:
            self.add(row)


class _Ranked(_OneByOne):
    """Smallest key first, then oldest."""

    def __init__(self, key: Callable[[Row], float]) -> None:
        super().__init__()
        self._key = key
        self._heap: list[tuple[float, int]] = []

    def add(self, row: Row, *, is_back: bool = False) -> None:
        del is_back
        if row.number not in self.members:
            self.members[row.number] = row
            heapq.heappush(self._heap, (self._key(row), row.number))

    def discard(self, rows: Collection[int]) -> None:
        for row in rows:
            self.members.pop(row, None)
        if len(self._heap) > 2 * len(self.members) + 64:
            self._heap = sorted((self._key(row), row.number) for row in self.members.values())

    def take(self, count: int) -> Sequence[int] | None:
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


class _Grouped(_OneByOne):
    """`size` rows of each group, the group that had them first first. A group is given once.

    Rows of it that come later stay out, unless they were given before and came back.
    """

    def __init__(self, size: int, closed: Iterable[Hashable]) -> None:
        super().__init__()
        self._size = size
        self._closed = set(closed)
        self._groups: dict[Hashable, dict[int, None]] = {}
        self._complete: dict[Hashable, None] = {}
        self._ungrouped: set[int] = set()
        self._shut_out: set[int] = set()
        """Rows of groups that were given without them."""

    def add(self, row: Row, *, is_back: bool = False) -> None:
        group = row.group
        if group is None:
            self._ungrouped.add(row.number)
        if group is None:
            return
        if group in self._closed and not is_back:
            self._shut_out.add(row.number)
            return
        self.members[row.number] = row
        rows = self._groups.setdefault(group, {})
        rows[row.number] = None
        if len(rows) >= self._size:
            self._complete[group] = None

    def discard(self, rows: Collection[int]) -> None:
        for number in rows:
            row = self.members.pop(number, None)
            if row is None:
                self._ungrouped.discard(number)
                self._shut_out.discard(number)
                continue
            mates = self._groups[row.group]
            del mates[number]
            if len(mates) < self._size:
                self._complete.pop(row.group, None)
            if not mates:
                del self._groups[row.group]

    def take(self, count: int) -> Sequence[int] | None:
        if len(self._complete) * self._size < count:
            return None
        taken: list[int] = []
        for group in list(self._complete)[: count // self._size]:
            rows = list(self._groups.pop(group))
            del self._complete[group]
            for number in rows:
                del self.members[number]
            self._closed.add(group)
            self._shut_out.update(rows[self._size :])
            taken += sorted(rows[: self._size])
        return taken

    def lacks(self) -> str:
        told = [f"{len(self._complete)} groups of {self._size} are complete"]
        told += [
            f"group {group!r} has {len(rows)} of {self._size}"
            for group, rows in list(self._groups.items())[:4]
            if group not in self._complete
        ]
        if self._ungrouped:
            told.append(f"{len(self._ungrouped)} rows came without a tag 'group_id'")
        if self._shut_out:
            told.append(
                f"{len(self._shut_out)} rows stay out, as their groups were given before: a new group needs a group_id "
                "that this partition never had"
            )
        return ", ".join(told)


class _Budgeted(ReadyRows):
    """Oldest first, as many as have `max_tokens` tokens together."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self._max_tokens = max_tokens
        self._held: dict[int, None] = {}
        """The oldest rows, taken out of the line; together they fit."""
        self._sum = 0.0

    def add(self, row: Row, *, is_back: bool = False) -> None:
        super().add(row, is_back=is_back)
        if self._held and row.number < next(reversed(self._held)):
            self._put_back()

    def discard(self, rows: Collection[int]) -> None:
        self._put_back()
        super().discard(rows)

    def take(self, count: int) -> Sequence[int] | None:
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
                heapq.heappush(self._late, number)
                raise PolicyError(
                    f"row {row.sample_id!r} has num_tokens={tokens}, and a claim takes {self._max_tokens} tokens: it "
                    "would stand in the way for ever; tag every row, give a larger budget, or clear that row"
                )
            if self._sum + tokens > self._max_tokens:
                heapq.heappush(self._late, number)
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

    def lacks(self) -> str:
        return f"together they have {self._sum:.0f} of {self._max_tokens} tokens" if self._held else ""

    def _put_back(self) -> None:
        for number in self._held:
            heapq.heappush(self._late, number)
        self._held, self._sum = {}, 0.0


class _Balanced(ReadyRows):
    """Oldest first, dealt to parts of nearly equal sums of tokens."""

    def __init__(self, num_parts: int) -> None:
        super().__init__()
        self._num_parts = num_parts

    def take(self, count: int) -> Sequence[int] | None:
        if len(self.members) < count:
            return None
        rows = self._pull(count)
        lengths = [row.tags.get("num_tokens") for row in rows]
        lacking = [row.sample_id for row, length in zip(rows, lengths, strict=True) if length is None]
        if lacking:
            self._take_back(rows)
            raise PolicyError(f"row {lacking[0]!r} has no number as tag 'num_tokens': rows cannot be balanced without")
        try:
            order = balanced_order([length or 0.0 for length in lengths], self._num_parts)
        except (ValueError, RuntimeError) as error:  # their sum has more than 64 bits, or one of them alone
            self._take_back(rows)
            raise PolicyError(f"{len(rows)} rows cannot be balanced: {error}") from error
        return [rows[i].number for i in order]

    def _take_back(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.add(row)


class _Filtered(_OneByOne):
    """What another index gives, among the rows that a predicate accepts."""

    def __init__(self, policy: policies.Where, inner: ReadyRows) -> None:
        super().__init__()
        self._policy = policy
        self._inner = inner
        self.members = inner.members
        self._undecided: dict[int, Row] = {}
        self._refused: dict[int, Row] = {}
        self.rejected = {} if not policy.is_clearing else self._refused

    def add(self, row: Row, *, is_back: bool = False) -> None:
        is_good = self._accepts(row)
        if is_good:
            self._inner.add(row, is_back=is_back)
        else:
            (self._undecided if is_good is None else self._refused)[row.number] = row

    def discard(self, rows: Collection[int]) -> None:
        numbers = list(rows)
        self._inner.discard(numbers)
        for number in numbers:
            self._undecided.pop(number, None)
            self._refused.pop(number, None)

    def take(self, count: int) -> Sequence[int] | None:
        for row in self._undecided.values():
            if row.tags and self._policy.tag in row.tags:
                self._policy.accepts(row.tags)  # raises: it cannot be compared
        return self._inner.take(count)

    def lacks(self) -> str:
        told = [self._inner.lacks()] if self._inner.lacks() else []
        if self._undecided:
            told.append(f"{len(self._undecided)} have no tag {self._policy.tag!r} that can be compared yet")
        if self._refused:
            told.append(f"{len(self._refused)} have one that is not {self._policy.op} {self._policy.value!r}")
        return ", ".join(told)

    def _accepts(self, row: Row) -> bool | None:
        try:
            return self._policy.accepts(row.tags)
        except PolicyError:  # said to whoever claims, and not to whoever puts
            return None


class _Chosen(ReadyRows):
    """What a policy of somebody's own chooses."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = policy

    def take(self, count: int) -> Sequence[int] | None:
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

    def lacks(self) -> str:
        return "among which the policy did not choose" if self.members else ""


def make_index(policy: Policy, closed: Callable[[], Iterable[Hashable]]) -> ReadyRows:
    """An empty index in the order of `policy`; `closed` names the groups that its task was given before."""
    match policy:
        case policies.OldestVersion():
            return _Ranked(lambda row: float("inf") if row.version is None else row.version)
        case policies.Priority():
            return _Ranked(lambda row: -(row.tags.get("priority") or 0.0))
        case policies.GroupComplete(group_size=size) | policies.FirstK(k=size):
            return _Grouped(size, closed())
        case policies.TokenBudget(max_tokens=budget):
            return _Budgeted(budget)
        case policies.LengthBalanced(num_parts=num_parts):
            return _Balanced(num_parts)
        case policies.Where():
            return _Filtered(policy, make_index(policy.then, closed))
        case policies.Fifo():
            return ReadyRows()
        case _:
            return _Chosen(policy)
