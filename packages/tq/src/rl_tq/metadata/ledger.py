"""Consumption ledger of a task in a partition: leases, acks, attempts and dead letters; timers."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence

    from rl_tq.types import Policy
    from rl_tq.types.policy import ReadyRows, Row


class Lease(msgspec.Struct, kw_only=True, eq=False):
    """Lease of one claim: its rows that are neither acked nor returned."""

    number: int
    """Lease number that an ack must show (a fencing token): never reused, so that a former holder is refused."""
    partition: str
    task: str
    owner: Any
    """The client that claimed: its leases end with it."""
    label: str
    """Description of the owner, for messages."""
    lease_s: float | None
    """Seconds until it expires; None: it ends with its owner."""
    rows: set[int]
    is_grouped: bool
    """Whether the policy claims whole groups."""


@dataclass(slots=True, kw_only=True, eq=False)
class TaskLedger:
    """Consumption of a partition by one task: every row is free, leased, acked or dead."""

    leased: dict[int, Lease] = field(default_factory=dict)
    acked: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Row to (training step, lease)."""
    dead: dict[int, str] = field(default_factory=dict)
    """Dead letters: row to the last reason why it came back."""
    attempts: dict[int, int] = field(default_factory=dict)
    """Row to how often it came back."""
    returned: set[int] = field(default_factory=set)
    """Free rows that this task had claimed before."""
    acked_groups: Counter[Hashable] = field(default_factory=Counter)
    """Group to how many of its rows were acked."""
    cleared: Counter[int] = field(default_factory=Counter)
    """Training step to how many rows acked at it were cleared since."""
    num_acked: int = 0
    """Acks over the life of the partition."""
    indexes: dict[tuple[frozenset[str], Policy], ReadyRows] = field(default_factory=dict)

    def is_free(self, number: int) -> bool:
        """Whether the task may claim the row."""
        return number not in self.leased and number not in self.acked and number not in self.dead

    def index(self, rows: Mapping[int, Row], columns: Collection[str], policy: Policy) -> ReadyRows:
        """Index of the rows that can be claimed with `columns` by a policy; built on first use, then maintained."""
        key = (frozenset(columns), policy)
        index = self.indexes.get(key)
        if index is None:
            index = self.indexes[key] = policy.make_index(lambda: self._given_groups(rows))
            ready = [row for row in rows.values() if key[0] <= row.columns]
            if not (self.leased or self.acked or self.dead or self.returned):
                index.extend([row.number for row in ready], ready)
                return index
            for row in ready:
                if self.is_free(row.number):
                    index.add(row, is_back=row.number in self.returned)
        return index

    def lease(self, lease: Lease, taken_from: ReadyRows | None) -> None:
        """Mark rows as leased and remove them from the indexes, except `taken_from`, which has done so."""
        self.leased |= dict.fromkeys(lease.rows, lease)
        if self.returned:
            self.returned -= lease.rows
        for index in self.indexes.values():
            if index is not taken_from:
                index.discard(lease.rows)

    def withdraw(self, rows: Collection[int]) -> None:
        """Remove rows from every index."""
        for index in self.indexes.values():
            index.discard(rows)

    def offer(self, rows: Sequence[Row]) -> None:
        """Add rows to the indexes in which they are ready."""
        for (columns, _), index in self.indexes.items():
            for row in rows:
                if columns <= row.columns and self.is_free(row.number):
                    index.add(row, is_back=row.number in self.returned)

    def offer_new(self, numbers: Sequence[int], rows: Sequence[Row], columns: frozenset[str]) -> None:
        """Add new rows, with these numbers and all with these columns, to the indexes."""
        for (wanted, _), index in self.indexes.items():
            if wanted <= columns:
                index.extend(numbers, rows)

    def ack(self, row: Row, step: int) -> None:
        """Mark a leased row as consumed."""
        lease = self.leased.pop(row.number)
        lease.rows.discard(row.number)
        self.acked[row.number] = (step, lease.number)
        self.num_acked += 1
        if (group := row.group) is not None:
            self.acked_groups[group] += 1

    def unack(self, row: Row) -> None:
        """Mark an acked row as free again."""
        del self.acked[row.number]
        self.num_acked -= 1
        if (group := row.group) is not None:
            self.acked_groups[group] -= 1

    def forget(self, number: int) -> None:
        """Forget a cleared row."""
        lease = self.leased.pop(number, None)
        if lease is not None:
            lease.rows.discard(number)
        if (acked := self.acked.pop(number, None)) is not None:
            self.cleared[acked[0]] += 1
        self.dead.pop(number, None)
        self.returned.discard(number)
        self.attempts.pop(number, None)

    def why_dead(self, row: Row, reason: str, max_attempts: int, *, is_grouped: bool) -> str:
        """Reason why a returned row is a dead letter; empty if it is not. `is_grouped`: its whole group was claimed."""
        attempts = self.attempts.get(row.number, 0)
        if attempts >= max_attempts:
            return f"it came back {attempts} times, the last time because {reason}"
        if is_grouped and self.acked_groups[row.group]:
            return f"it came back because {reason}, and others of its group {row.group!r} were acked before"
        return ""

    def _given_groups(self, rows: Mapping[int, Row]) -> set[Hashable]:
        given = {rows[number].group for number in self.leased}
        return given | {group for group, times in self.acked_groups.items() if times > 0}


class Timers:
    """Timers: a heap of deadlines by key. Cancelled ones are removed lazily."""

    def __init__(self) -> None:
        self._deadlines: dict[Any, float] = {}
        self._heap: list[tuple[float, int, Any]] = []
        self._count = 0
        self.earliest: float | None = None
        """Earliest deadline, or None; cached, because it is read several times per request."""

    def set(self, key: Any, deadline: float) -> None:
        """Set the deadline of a key, replacing an earlier one."""
        self._deadlines[key] = deadline
        self._count += 1
        heapq.heappush(self._heap, (deadline, self._count, key))
        self._find_next()

    def cancel(self, key: Any) -> None:
        """Remove the timer of a key, if there is one."""
        self._deadlines.pop(key, None)
        if len(self._heap) > 2 * len(self._deadlines) + 64:
            live = sorted((deadline, i, key) for i, (key, deadline) in enumerate(self._deadlines.items()))
            self._heap, self._count = live, len(live)
        self._find_next()

    def due(self, now: float) -> list[Any]:
        """Remove and return the keys whose deadline has passed, the earliest first."""
        found: list[Any] = []
        while self._heap and self._heap[0][0] <= now:
            deadline, _, key = heapq.heappop(self._heap)
            if self._deadlines.get(key) == deadline:
                del self._deadlines[key]
                found.append(key)
        self._find_next()
        return found

    def _find_next(self) -> None:
        while self._heap and self._deadlines.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        self.earliest = self._heap[0][0] if self._heap else None
