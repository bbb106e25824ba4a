"""How far the tokens that are learned from may lie behind the weights that learn. Pure: knows counts and versions.

A group's version is that of the weights which the servers held when it was released; its oldest token is never older.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedStaleness:
    """At most `max_staleness` versions behind, by pacing: nothing generated is thrown away.

    Releasing at most `(max_staleness + 1) * batch_size` groups ahead is the rule of AReaL (2505.24298, section 5.1).
    Alone it bounds the average; that no straggler is overtaken for too long is what `select` sees to.
    """

    max_staleness: int
    """In weight versions."""
    batch_size: int
    """Groups per step."""

    def admit(self, num_outstanding: int) -> int:
        """How many more groups may be released, with so many released and not learned from."""
        return max(0, (self.max_staleness + 1) * self.batch_size - num_outstanding)

    def select(self, ready: Collection[int], outstanding: Mapping[int, int], version: int) -> list[int] | None:
        """The finished groups to learn from at weight version `version`; None: wait for more.

        Of the groups that must be learned from within the next j + 1 steps, counting this one, j batches can wait: the
        others have to be in this one, for every j.

        Args:
            ready: Ids of finished groups.
            outstanding: Version of every group not learned from, finished or not.
            version: Of the weights that learn.
        """
        chosen = sorted(ready, key=lambda group: (outstanding[group], group))[: self.batch_size]
        if len(chosen) < self.batch_size:
            return None
        for j in range(self.max_staleness + 1):
            limit = version - self.max_staleness + j
            num_due = sum(released <= limit for released in outstanding.values())
            num_chosen = sum(outstanding[group] <= limit for group in chosen)
            if num_chosen < num_due - j * self.batch_size:
                return None
        return chosen

    def expire(self, outstanding: Mapping[int, int], version: int) -> list[int]:
        """Groups to give up at `version`: none, for they are waited for."""
        del outstanding, version
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class DropStale(BoundedStaleness):
    """At most `max_staleness` versions behind, by throwing away what is late: the trainer waits for no straggler."""

    def select(self, ready: Collection[int], outstanding: Mapping[int, int], version: int) -> list[int] | None:
        """The finished groups that were released first."""
        del version
        chosen = sorted(ready, key=lambda group: (outstanding[group], group))[: self.batch_size]
        return chosen if len(chosen) == self.batch_size else None

    def expire(self, outstanding: Mapping[int, int], version: int) -> list[int]:
        """Groups released more than `max_staleness` versions ago."""
        return [group for group, released in outstanding.items() if released < version - self.max_staleness]
