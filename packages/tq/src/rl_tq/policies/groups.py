"""Policy of groups: whole groups, with an index of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rl_tq.types.policy import Policy, UnsortedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

    from rl_tq.types.policy import ReadyRows, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupComplete(Policy):
    """Whole groups: `group_size` rows with the same tag `group_id`, in order of completion.

    A task claims a group once: rows that arrive with its `group_id` later are left out, and error messages say so.
    """

    group_size: int
    """Rows of a group."""
    name: ClassVar[str] = "group_complete"

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"group_size is {self.group_size}: it must be at least 1")

    def check(self, batch_size: int) -> None:
        """See `Policy.check`."""
        if batch_size % self.group_size:
            raise ValueError(
                f"batch_size is {batch_size}, and groups have {self.group_size} rows: claim a multiple of that"
            )

    def make_index(self, given_groups: Callable[[], Iterable[Hashable]]) -> ReadyRows:
        """See `Policy.make_index`."""
        return GroupedRows(self.group_size, given_groups())


class GroupedRows(UnsortedRows):
    """Index of groups with `size` rows each, in order of completion. A group is claimed once.

    Rows of it that arrive later are left out, unless they were claimed before and returned.
    """

    def __init__(self, size: int, closed: Iterable[Hashable]) -> None:
        super().__init__()
        self._size = size
        self._closed = set(closed)
        self._groups: dict[Hashable, dict[int, None]] = {}
        self._complete: dict[Hashable, None] = {}
        self._ungrouped: set[int] = set()
        self._shut_out: set[int] = set()
        """Rows of groups that were claimed without them."""

    def add(self, row: Row, *, is_back: bool = False) -> None:
        """See `ReadyRows.add`."""
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
        """See `ReadyRows.discard`."""
        for number in rows:
            row = self.members.pop(number, None)
            if row is None:
                self._ungrouped.discard(number)
                self._shut_out.discard(number)
                continue
            group_rows = self._groups[row.group]
            del group_rows[number]
            if len(group_rows) < self._size:
                self._complete.pop(row.group, None)
            if not group_rows:
                del self._groups[row.group]

    def take(self, count: int) -> Sequence[int] | None:
        """See `ReadyRows.take`."""
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

    def why_waiting(self) -> str:
        """See `ReadyRows.why_waiting`."""
        clauses = [f"{len(self._complete)} groups of {self._size} are complete"]
        clauses += [
            f"group {group!r} has {len(rows)} of {self._size}"
            for group, rows in list(self._groups.items())[:4]
            if group not in self._complete
        ]
        if self._ungrouped:
            clauses.append(f"{len(self._ungrouped)} rows came without a tag 'group_id'")
        if self._shut_out:
            clauses.append(
                f"{len(self._shut_out)} rows stay out, as their groups were given before: a new group needs a group_id "
                "that this partition never had"
            )
        return ", ".join(clauses)
