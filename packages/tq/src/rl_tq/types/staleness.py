"""`StalenessPolicy`: how many groups may be outstanding, which a claim gets, and which are given up.

A group is outstanding from its admission (`TransferQueue.admit(group_id=...)`) until a claim takes it: in flight while
its credit lasts, finished once a put has spent that. A partition follows a policy through its option `staleness`; the
shipped ones are in `rl_tq.policies.staleness`. Policies are pure: they see counts and weight versions, and no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from rl_tq.types.policy import Policy, UnsortedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

    from rl_tq.types.policy import Row

ADMITTED = "weight_version_admitted"
"""Tag that a put under a group's credit gives to its rows: the weight version at which the group was admitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Weight versions of an outstanding group."""

    admitted: int
    """Version of the partition when it was admitted: none of its tokens is older."""
    oldest: int | None = None
    """Version of its oldest token; None while it is in flight."""

    @property
    def since(self) -> int:
        """Version of its oldest token; while it is in flight the lowest possible one."""
        return self.admitted if self.oldest is None else self.oldest


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessPolicy(Policy):
    """Base class of staleness policies: admits `1 + max_staleness` batches, and gives the oldest finished groups first.

    Group ids are numbers that grow with every admission.
    """

    takes_fractions: ClassVar[bool] = False
    """Whether `max_staleness` may be other than a whole number."""

    max_staleness: float
    """Highest staleness, in the policy's own unit."""
    batch_size: int
    """Groups that are consumed per weight version."""
    num_extra: int = 0
    """Groups admitted in addition, for a consumer that leaves out the slowest."""

    def __post_init__(self) -> None:
        if self.max_staleness < 0 or self.batch_size < 1 or self.num_extra < 0:
            raise ValueError(f"{self}: batch_size must be at least 1, and max_staleness and num_extra at least 0")
        if not self.takes_fractions and self.max_staleness != int(self.max_staleness):
            raise ValueError(
                f"max_staleness={self.max_staleness:g} counts whole versions with the policy {self.name}; give a whole "
                "number, or choose batch_ratio or threshold_fraction"
            )

    @property
    def bound(self) -> int | None:
        """Versions that the oldest token of a claimed group may be behind; None: the policy bounds something else."""
        return math.ceil(self.max_staleness)

    def admit(self, num_outstanding: int) -> int:
        """Number of groups that may be admitted, given how many are outstanding."""
        capacity = math.floor((1 + self.max_staleness) * self.batch_size) + self.num_extra
        return max(0, capacity - num_outstanding)

    def select(self, finished: Collection[Any], outstanding: Mapping[Any, Span], version: int) -> list[Any] | None:
        """The `batch_size` finished groups that a claim gets at weight version `version`; None: it waits."""
        del version
        chosen = sorted(finished, key=lambda group: (outstanding[group].since, group))[: self.batch_size]
        return chosen if len(chosen) == self.batch_size else None

    def expire(self, outstanding: Mapping[Any, Span], version: int) -> list[Any]:
        """The groups to give up at weight version `version`."""
        del outstanding, version
        return []

    def make_index(self, given_groups: Callable[[], Iterable[Hashable]]) -> OutstandingGroups:
        """See `Policy.make_index`."""
        del given_groups
        return OutstandingGroups(self)


class OutstandingGroups(UnsortedRows):
    """Index of the outstanding groups of a partition. Rows that were put without a group's credit are left out."""

    def __init__(self, policy: StalenessPolicy) -> None:
        super().__init__()
        self._policy = policy
        self.in_flight: Mapping[Any, int] = {}
        """Groups in flight to the version of their admission; the owner of the index keeps it up to date."""
        self.version = 0
        """Weight version of the partition, likewise."""
        self._finished: dict[Any, Span] = {}
        self._rows: dict[Any, set[int]] = {}

    def add(self, row: Row, *, is_back: bool = False) -> None:
        """See `ReadyRows.add`."""
        admitted = row.tags.get(ADMITTED)
        if admitted is None or row.number in self.members:
            return
        self.members[row.number] = row
        known = self._finished.get(row.group)
        versions = [v for v in (row.version, known and known.oldest) if v is not None]
        self._finished[row.group] = Span(admitted=admitted, oldest=min(versions, default=admitted))
        self._rows.setdefault(row.group, set()).add(row.number)

    def discard(self, rows: Collection[int]) -> None:
        """See `ReadyRows.discard`."""
        for number in rows:
            row = self.members.pop(number, None)
            if row is not None:
                self._rows[row.group].discard(number)
                if not self._rows[row.group]:
                    del self._rows[row.group], self._finished[row.group]

    @property
    def outstanding(self) -> dict[Any, Span]:
        """All outstanding groups."""
        return {group: Span(admitted=version) for group, version in self.in_flight.items()} | self._finished

    @property
    def has_room(self) -> bool:
        """Whether the policy admits another group."""
        return self._policy.admit(len(self.in_flight) + len(self._finished)) > 0

    def take(self, count: int) -> Sequence[int] | None:
        """Remove and return the rows of `count` groups, in the policy's order; None: the claim waits."""
        if len(self._finished) < count:
            return None
        policy = self._policy if count == self._policy.batch_size else replace(self._policy, batch_size=count)
        chosen = policy.select(self._finished.keys(), self.outstanding, self.version)
        if chosen is None:
            return None
        rows = [number for group in chosen for number in sorted(self._rows[group])]
        self.discard(rows)
        return rows

    def expired(self) -> list[Any]:
        """Groups that the policy gives up at this version, in flight or finished."""
        return self._policy.expire(self.outstanding, self.version)

    def rows_of(self, groups: Iterable[Any]) -> list[int]:
        """Rows of those of the groups that are finished."""
        return [number for group in groups for number in self._rows.get(group, ())]

    def is_late(self, span: Span, group: Any) -> bool:
        """Whether a group that finishes now is given up at once."""
        return group in self._policy.expire({group: span}, self.version)

    def why_waiting(self) -> str:
        """See `ReadyRows.why_waiting`."""
        return (
            f"{len(self._finished)} groups are finished and {len(self.in_flight)} in flight "
            f"({', '.join(map(str, list(self.in_flight)[:8]))}) at weight version {self.version}"
        )
