"""Policy of single rows, in order of arrival."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rl_tq.types.policy import Policy, ReadyRows

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable


@dataclass(frozen=True, slots=True, kw_only=True)
class Fifo(Policy):
    """Oldest first: the default."""

    name: ClassVar[str] = "fifo"

    def make_index(self, given_groups: Callable[[], Iterable[Hashable]]) -> ReadyRows:
        """See `Policy.make_index`."""
        return ReadyRows()
