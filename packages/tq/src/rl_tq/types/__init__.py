"""Public types: references, credits, options and reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from rl_tq.types.batch_meta import BatchMeta as BatchMeta
from rl_tq.types.batch_meta import batch_meta as batch_meta
from rl_tq.types.policy import Policy as Policy
from rl_tq.types.policy import RowMeta as RowMeta
from rl_tq.types.staleness import StalenessPolicy as StalenessPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Credit of admission control: reserved room, with which a producer can put that many rows without waiting."""

    number: int
    """Unique number at the server."""
    partition: str
    """Name of the partition."""
    num_rows: int
    """Reserved rows."""
    num_bytes: int
    """Reserved bytes."""
    weight_version: int
    """Weight version of the partition at that time."""
    group_id: Any = None
    """The group that the rows will be, where the partition has a staleness policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceReport:
    """Result of `TransferQueue.advance`."""

    num_cleared: int
    """Rows that were too old."""
    groups: tuple[Any, ...] = ()
    """Groups that the staleness policy gave up: their rows are cleared, and the credits of those in flight ended."""


@dataclass(frozen=True, slots=True)
class PerGroup:
    """Column of a put with one value per group (tag `group_id`), stored once and shared by the group's rows.

    `values` is any column data with one value per group, in the order in which groups first appear in the put's tags
    (or in those of the `BatchMeta` that names its rows). A get returns one value per row, as for any column; rows of
    one column may be put in either way.

    `PerGroup()`, without values, refers to the value that rows of the group already have; nothing is copied. The value
    is kept as long as one row refers to it.
    """

    values: Any = None
    """G values, one per group; None: the present value of each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """Result of `TransferQueue.restore`."""

    num_returned: int
    """Acks undone: rows that can be claimed again."""
    num_cleared: int
    """Rows acked after that step that were cleared since, and are lost."""
    num_revoked: int
    """Leased rows revoked from their holders, whose acks are refused from now on."""


@dataclass(slots=True, eq=False)
class Buffer:
    """Output buffer for `get(..., out=buffer)` that also reuses the tensor objects of the previous get.

    The values of a batch are valid until the next get into its buffer, which overwrites them as it does if `out` is a
    plain tensor. The rest of a batch is not changed: its columns, row lengths, and what was computed from it. Columns
    with the same row lengths and position as in the previous get are the same tensor objects: torch takes about as long
    to make a nested tensor as to copy a megabyte.

    For one get at a time.
    """

    memory: torch.Tensor
    """uint8 [n], contiguous, on any device. See `TransferQueue.get` for its layout."""
    kept: Any = field(default=None, init=False, repr=False)
    """Cache of the previous get; private to the client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionOptions:
    """Options of a partition: limits, and when rows are cleared. Set by `configure`; a clear retains them."""

    max_rows: int | None = None
    """Most rows; None: no limit."""
    max_bytes: int | None = None
    """Most bytes of extents; None: no limit."""
    tasks: tuple[str, ...] = ()
    """Tasks that consume every row: a row is cleared once all of them acked it, and claims for other tasks are
    refused. Empty: any task may claim, and only `clear` frees rows."""
    keep_steps: int = 0
    """A row acked by all `tasks` is cleared this many training steps later, so that `restore` can go back as far."""
    max_attempts: int = 3
    """A row that was returned this many times (nack, expired lease, dead consumer) becomes a dead letter."""
    staleness: StalenessPolicy | None = None
    """Staleness policy, with one task in `tasks`: groups are admitted by `admit(group_id=...)`, a claim without a
    sampler gets `batch_size` groups that the policy chooses, and `advance` clears those that it gives up."""

    def __post_init__(self) -> None:
        for name, least in (
            ("max_rows", 1), ("max_bytes", 1), ("keep_steps", 0), ("max_attempts", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise ValueError(f"{name} is {value!r}: it must be an integer" + (", or None" * (least == 1)))
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}: it must be at least {least}" + (", or None" * (least == 1)))
        if isinstance(self.tasks, str):
            raise ValueError(f"tasks is the string {self.tasks!r}: give a list of names")
        object.__setattr__(self, "tasks", tuple(self.tasks))
        given: Any = self.staleness  # of a caller without type checks, or from JSON
        if given is not None and not isinstance(given, StalenessPolicy):
            raise ValueError(f"staleness is {given!r}: it must be a StalenessPolicy, or None")
        if self.staleness is not None and len(self.tasks) != 1:
            raise ValueError(f"tasks is {list(self.tasks)}: a partition with a staleness policy has exactly one")
        if self.keep_steps and not self.tasks:
            raise ValueError(f"keep_steps is {self.keep_steps}, and no tasks are declared whose rows would be kept")

    def to_json(self) -> dict[str, Any]:
        """Options as JSON values."""
        return {**asdict(self), "tasks": list(self.tasks), "staleness": self.staleness and self.staleness.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PartitionOptions:
        """The inverse of `to_json`.

        Raises:
            ValueError: an option has no meaning; names those there are.
        """
        known = [each.name for each in fields(cls)]
        unknown = sorted(set(value) - set(known))
        if unknown:
            raise ValueError(f"a partition has no options {unknown}; it has {known}")
        return cls(**value)


DEFAULT_OPTIONS = PartitionOptions()
"""Options of a partition without `configure`."""
