"""Which ready rows a claim is given: pass one as `get_meta(sampler=...)`. They run in the server, on kept indexes.

Policies read these tags, which a put attaches to rows: `group_id` (any JSON value that is no list or mapping),
`weight_version_min` (int), `priority` (number), `num_tokens` (number).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, fields
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar

from rl_tq.errors import PolicyError
from rl_tq.types import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


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
    """Whole groups: `group_size` rows with one tag `group_id`, the group that was complete first first.

    A task is given a group once: rows that come with its `group_id` later stay out, and whoever waits is told.
    """

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


def _is_among(value: object, among: Sequence[object]) -> bool:
    return value in among


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "in": _is_among,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Where(Policy):
    """Rows whose tag compares so with a value, then as `then` says. Rows without the tag wait until they get it.

    With `is_clearing`, rows that do not are cleared with their group (unless somebody holds a lease on it), counted as
    dropped for the reason `rejected`. The room that they leave goes to whoever waits in `put` or `admit`, so that
    producers make others instead: dynamic sampling as of DAPO (arXiv:2503.14476, section 3.2) is
    `Where(tag="reward_std", op=">", value=0.0, is_clearing=True, then=GroupComplete(group_size=8))`.
    """

    tag: str
    """Which tag."""
    op: str
    """`==`, `!=`, `<`, `<=`, `>`, `>=` or `in`."""
    value: Any
    """A string, number, boolean or null; for `in`, several of them."""
    is_clearing: bool = False
    """Whether rows that do not compare so go, for all tasks."""
    then: Policy = field(default_factory=Fifo)
    """Among the others."""
    name: ClassVar[str] = "where"

    def __post_init__(self) -> None:
        if self.op not in _COMPARISONS:
            raise ValueError(f"op is {self.op!r}: it must be one of {sorted(_COMPARISONS)}")
        if self.op == "in":
            object.__setattr__(self, "value", tuple(self.value))
        elif isinstance(self.value, list | tuple | dict):
            raise ValueError(f"value is {self.value!r}: a tag is compared with one value, with several by op='in' only")
        _check_inner(self.then)

    def check(self, batch_size: int) -> None:
        """See `Policy.check`."""
        self.then.check(batch_size)

    def accepts(self, tags: Mapping[str, Any]) -> bool | None:
        """Whether a row of these tags is given; None: that is not known yet.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAware(Policy):
    """The same rows, under the same lease, for all that claim batch `batch_index` of data-parallel rank `dp_rank`.

    For trainers whose tensor-, pipeline- or context-parallel ranks fetch for themselves. The first that asks has rows
    chosen as `then` says. Any of them may ack; the lease ends with the client of the first.
    """

    dp_rank: int
    """Which data-parallel rank they are replicas of."""
    batch_index: int
    """Which of its batches: each is asked for once by each replica."""
    num_replicas: int
    """How many ranks ask."""
    then: Policy = field(default_factory=Fifo)
    """Which rows."""
    name: ClassVar[str] = "rank_aware"

    def __post_init__(self) -> None:
        _at_least_one(num_replicas=self.num_replicas)
        if min(self.dp_rank, self.batch_index) < 0:
            raise ValueError(f"dp_rank is {self.dp_rank} and batch_index {self.batch_index}: they are 0 or more")
        _check_inner(self.then)

    def check(self, batch_size: int) -> None:
        """See `Policy.check`."""
        self.then.check(batch_size)


GROUP = "rl_tq.policies"
"""Entry points of policies of one's own."""

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Fifo, OldestVersion, Priority, GroupComplete, FirstK, TokenBudget, LengthBalanced, Where, RankAware,
    )
}  # fmt: skip


def policy_from_json(value: Mapping[str, Any]) -> Policy:
    """The inverse of `Policy.to_json`.

    Raises:
        ValueError: there is no such policy, or it has no such parameter.
    """
    kind = POLICIES.get(value["name"]) or _plug_in(value["name"])
    given = {key: item for key, item in value.items() if key != "name"}
    known = {each.name for each in fields(kind)}
    if given.keys() != known:
        raise ValueError(f"policy {value['name']!r} takes {sorted(known)}, not {sorted(given)}")
    if "then" in given and kind in (Where, RankAware):
        given["then"] = policy_from_json(given["then"])
    return kind(**given)


def _plug_in(name: str) -> type[Policy]:
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise ValueError(f"there is no policy {name!r} where the server runs; there are {sorted({*POLICIES, *found})}")
    try:
        kind: Any = found[name].load()
    except ImportError as error:
        raise ValueError(
            f"policy {name!r} is installed, and cannot be imported where the server runs: {error}"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Policy) and getattr(kind, "name", None) == name):
        raise ValueError(f"the entry point {name!r} of {GROUP} must be a subclass of Policy whose name is {name!r}")
    return kind


def _check_inner(policy: Policy) -> None:
    if isinstance(policy, RankAware):
        raise ValueError("RankAware is the outermost policy: give it the other as `then`")


def _at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")
