"""Which ready rows a claim is given: pass one as `get_meta(sampler=...)`. They run in the server, on kept indexes.

Policies read these tags, which a put attaches to rows: `group_id` (any JSON value that is no list or mapping),
`weight_version_min` (int), `priority` (number), `num_tokens` (number).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from rl_tq.types import Policy

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Fifo(Policy):
    """Oldest first: the default."""

    name: ClassVar[str] = "fifo"


@dataclass(frozen=True, slots=True, kw_only=True)
class OldestVersion(Policy):
    """Rows with the lowest tag `weight_version_min` first, then the oldest; rows without it last."""

    name: ClassVar[str] = "oldest_version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Priority(Policy):
    """Rows with the highest tag `priority` first, then the oldest; rows without it count as 0."""

    name: ClassVar[str] = "priority"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupComplete(Policy):
    """Whole groups: `group_size` rows with one tag `group_id`, the group that was complete first first."""

    group_size: int
    """Rows of a group."""
    name: ClassVar[str] = "group_complete"

    def __post_init__(self) -> None:
        _at_least_one(group_size=self.group_size)

    def check(self, batch_size: int) -> None:
        """See `Policy.check`."""
        if batch_size % self.group_size:
            raise ValueError(
                f"batch_size is {batch_size}, and groups have {self.group_size} rows: claim a multiple of that"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstK(Policy):
    """The first `k` ready rows of every group (tag `group_id`); later ones of that group are never given to the task.

    For groups of which more samples are started than are needed, so that the slowest need not be waited for.
    """

    k: int
    """Rows taken of a group."""
    name: ClassVar[str] = "first_k"

    def __post_init__(self) -> None:
        _at_least_one(k=self.k)

    def check(self, batch_size: int) -> None:
        """See `Policy.check`."""
        if batch_size % self.k:
            raise ValueError(f"batch_size is {batch_size}, and {self.k} rows of a group are taken: claim a multiple")


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
        _at_least_one(max_tokens=self.max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBalanced(Policy):
    """Oldest first, then ordered so that `chunk(num_parts)` gives parts with nearly equal sums of tag `num_tokens`.

    Equal to `Fifo` and `BatchMeta.balanced`.
    """

    num_parts: int
    """Data-parallel ranks, or ranks times micro-batches."""
    name: ClassVar[str] = "length_balanced"

    def __post_init__(self) -> None:
        _at_least_one(num_parts=self.num_parts)

    def check(self, batch_size: int) -> None:
        """See `Policy.check`."""
        if batch_size % self.num_parts:
            raise ValueError(f"batch_size is {batch_size}, which {self.num_parts} parts cannot share equally")


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (Fifo, OldestVersion, Priority, GroupComplete, FirstK, TokenBudget, LengthBalanced)
}


def policy_from_json(value: Mapping[str, Any]) -> Policy:
    """The inverse of `Policy.to_json`.

    Raises:
        ValueError: there is no such policy, or it has no such parameter.
    """
    kind = POLICIES.get(value["name"])
    if kind is None:
        raise ValueError(f"there is no policy {value['name']!r}; there are {sorted(POLICIES)}")
    given = {key: item for key, item in value.items() if key != "name"}
    known = {each.name for each in fields(kind)}
    if given.keys() != known:
        raise ValueError(f"policy {value['name']!r} takes {sorted(known)}, not {sorted(given)}")
    return kind(**given)


def _at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")
