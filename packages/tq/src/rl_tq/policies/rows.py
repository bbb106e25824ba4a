"""Policies of single rows, in order of arrival."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rl_tq.types.policy import Policy, ReadyRows

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence


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
