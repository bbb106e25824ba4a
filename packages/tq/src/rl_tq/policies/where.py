"""Filter policy: only rows whose tag compares to a value, in the order of another policy."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rl_tq.errors import PolicyError
from rl_tq.policies.rows import Fifo
from rl_tq.types.policy import Policy, UnsortedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

    from rl_tq.types.policy import ReadyRows, Row


def _is_among(value: object, among: Sequence[object]) -> bool:
    return value in among


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "in": _is_among,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Where(Policy):
    """Filter: rows that satisfy `tag op value`, then by policy `then`. Rows without the tag wait until they get it.

    With `is_clearing`, rows that fail the comparison are cleared with their group (unless it is leased) and counted as
    dropped for the reason `rejected`. The room they leave goes to waiting `put` and `admit` calls, so that producers
    generate others instead: dynamic sampling as in DAPO (arXiv:2503.14476, section 3.2) is
    `Where(tag="reward_std", op=">", value=0.0, is_clearing=True, then=GroupComplete(group_size=8))`.
    """

    tag: str
    """Name of the tag."""
    op: str
    """`==`, `!=`, `<`, `<=`, `>`, `>=` or `in`."""
    value: Any
    """A string, number, boolean or null; for `in`, several of them."""
    is_clearing: bool = False
    """Whether rows that fail the comparison are cleared, for all tasks."""
    then: Policy = field(default_factory=Fifo)
    """Policy that orders the rows which pass."""
    name: ClassVar[str] = "where"

    def __post_init__(self) -> None:
        if self.op not in _COMPARISONS:
            raise ValueError(f"op is {self.op!r}: it must be one of {sorted(_COMPARISONS)}")
        if self.op == "in":
            object.__setattr__(self, "value", tuple(self.value))
        elif isinstance(self.value, list | tuple | dict):
            raise ValueError(f"value is {self.value!r}: a tag is compared with one value, with several by op='in' only")

    def check(self, batch_size: int) -> None:
        """See `Policy.check`."""
        self.then.check(batch_size)

    def accepts(self, tags: Mapping[str, Any]) -> bool | None:
        """Whether a row with these tags passes; None: it does not have the tag yet.

        Raises:
            PolicyError: the tag's value cannot be compared so.
        """
        if self.tag not in tags:
            return None
        try:
            return bool(_COMPARISONS[self.op](tags[self.tag], self.value))
        except TypeError as error:
            raise PolicyError(
                f"tag {self.tag!r} is {tags[self.tag]!r}, which cannot be compared by {self.op!r} with {self.value!r}: "
                "tag all rows with values of one kind"
            ) from error

    def make_index(self, given_groups: Callable[[], Iterable[Hashable]]) -> ReadyRows:
        """See `Policy.make_index`."""
        return FilteredRows(self, self.then.make_index(given_groups))


class FilteredRows(UnsortedRows):
    """Index of the rows that a predicate accepts, in the order of another index."""

    def __init__(self, policy: Where, inner: ReadyRows) -> None:
        super().__init__()
        self._policy = policy
        self._inner = inner
        self.members = inner.members
        self._undecided: dict[int, Row] = {}
        self._refused: dict[int, Row] = {}
        self.rejected = {} if not policy.is_clearing else self._refused

    def add(self, row: Row, *, is_back: bool = False) -> None:
        """See `ReadyRows.add`."""
        is_good = self._accepts(row)
        if is_good:
            self._inner.add(row, is_back=is_back)
        else:
            (self._undecided if is_good is None else self._refused)[row.number] = row

    def discard(self, rows: Collection[int]) -> None:
        """See `ReadyRows.discard`."""
        numbers = list(rows)
        self._inner.discard(numbers)
        for number in numbers:
            self._undecided.pop(number, None)
            self._refused.pop(number, None)

    def take(self, count: int) -> Sequence[int] | None:
        """See `ReadyRows.take`."""
        for row in self._undecided.values():
            if row.tags and self._policy.tag in row.tags:
                self._policy.accepts(row.tags)  # raises: it cannot be compared
        return self._inner.take(count)

    def why_waiting(self) -> str:
        """See `ReadyRows.why_waiting`."""
        clauses = [self._inner.why_waiting()] if self._inner.why_waiting() else []
        if self._undecided:
            clauses.append(f"{len(self._undecided)} have no tag {self._policy.tag!r} that can be compared yet")
        if self._refused:
            clauses.append(f"{len(self._refused)} have one that is not {self._policy.op} {self._policy.value!r}")
        return ", ".join(clauses)

    def _accepts(self, row: Row) -> bool | None:
        try:
            return self._policy.accepts(row.tags)
        except PolicyError:  # raised to the consumer by `take`, not to the producer
            return None
