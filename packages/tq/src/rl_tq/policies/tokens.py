"""Token-budget policy: as many rows as fit a number of tokens."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rl_tq.errors import PolicyError
from rl_tq.policies.rows import check_at_least_one
from rl_tq.types.policy import Policy, ReadyRows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

    from rl_tq.types.policy import Row


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
