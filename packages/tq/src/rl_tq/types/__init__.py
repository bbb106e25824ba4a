"""The values that rl-tq takes and gives."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rl_tq.policies.base import Policy as Policy
from rl_tq.policies.base import RowMeta as RowMeta
from rl_tq.types.batch_meta import BatchMeta as BatchMeta
from rl_tq.types.batch_meta import batch_meta as batch_meta

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Room that a producer was promised by `admit`: it may put that many rows without waiting."""

    number: int
    """Given once by one server."""
    partition: str
    """Where."""
    num_rows: int
    """Rows it is good for."""
    num_bytes: int
    """Bytes it is good for."""
    weight_version: int
    """The partition's weight version when it was given."""


@dataclass(frozen=True, slots=True)
class PerGroup:
    """A column of a put whose rows share their value with all rows of their group (tag `group_id`): stored once each.

    `values` is whatever a column may be, of one value per group, in the order in which the groups first stand in the
    put's tags (or in those of the `BatchMeta` that names its rows). What comes back has a value per row, as any column:
    rows of one column may be put in either way.

    `PerGroup()`, without values, is the value that rows of the group already have, put by whomever in whatever way: a
    row that comes later refers to it, and nothing is copied. It stays as long as one row refers to it.
    """

    values: Any = None
    """G values, one per group; None: those that are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What `restore` did."""

    num_returned: int
    """Acks taken back: rows that a task will be given again."""
    num_cleared: int
    """Rows acked after that step that were cleared since and cannot come back."""
    num_revoked: int
    """Leased rows taken from their holders, whose acks are refused from now on."""


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory for `get(..., out=buffer)`, with what the get before left of tensors that need not be made again.

    A batch's values are good until the next get into its buffer, which overwrites them as it does where `out` is a
    plain tensor. What else a batch is stays as it was: its columns, the lengths of its rows, and all that was computed
    from it. Columns whose rows are as long as they were in the get before, and which come to lie where they lay, are
    the same tensor objects as before: torch takes about as long to make a nested tensor as to copy a megabyte.

    One get at a time.
    """

    memory: torch.Tensor
    """uint8 [n], contiguous, on any device; how a get lays values into it: `TransferQueue.get`."""
    kept: Any = field(default=None, init=False, repr=False)
    """What the get before left; the client's own."""


class OnFull(StrEnum):
    """What a put of new rows does in a partition that has no room for them."""

    BLOCK = "block"
    """Wait for room until the deadline."""
    RAISE = "raise"
    """Raise `QueueFullError` at once."""
    DROP_OLDEST = "drop_oldest"
    """Clear the oldest rows (whole groups) that nobody holds a lease on; `stats()` counts them."""
    DROP_STALEST = "drop_stalest"
    """The same, those of the lowest tag `weight_version_min` first; rows without that tag are never dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionOptions:
    """What a partition holds at most, and when its rows go. `TransferQueue.configure` sets it; a clear keeps it."""

    max_rows: int | None = None
    """Rows it holds at most; None: any number."""
    max_bytes: int | None = None
    """Bytes of the extents it holds at most; None: any number."""
    rows_per_version: int | None = None
    """Rows that training consumes between two weight versions. With `max_lag`, the partition takes at most
    `(max_lag + 1) * rows_per_version` rows, so that a row is consumed at most `max_lag` versions after it was begun
    (the admission rule of AReaL, arXiv:2505.24298, section 5.1)."""
    max_lag: int | None = None
    """Rows whose tag `weight_version_min` is more than this behind `advance`'s version are cleared and counted (with
    their group), and a put of such rows raises `StaleVersionError`; None: any age is good."""
    on_full: OnFull = OnFull.BLOCK
    """What a put of new rows does where there is no room."""
    tasks: tuple[str, ...] = ()
    """The tasks that consume every row: once all of them acked a row, it is cleared. A claim for another task is
    refused. Empty: any task may claim, and only `clear` frees rows."""
    keep_steps: int = 0
    """A row that all `tasks` acked is cleared this many training steps later, so that `restore` can go back as far."""
    max_attempts: int = 3
    """A row that came back this many times (nack, expired lease, dead consumer) becomes a dead letter."""

    def __post_init__(self) -> None:
        for name, least in (
            ("max_rows", 1), ("max_bytes", 1), ("rows_per_version", 1), ("max_lag", 0),
            ("keep_steps", 0), ("max_attempts", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise ValueError(f"{name} is {value!r}: it must be an integer" + (", or None" * (least == 1)))
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}: it must be at least {least}" + (", or None" * (least == 1)))
        choices = [str(choice) for choice in OnFull]
        if str(self.on_full) not in choices:
            raise ValueError(f"on_full is {self.on_full!r}: choose one of {choices}")
        object.__setattr__(self, "on_full", OnFull(self.on_full))
        if isinstance(self.tasks, str):
            raise ValueError(f"tasks is the string {self.tasks!r}: give a list of names")
        object.__setattr__(self, "tasks", tuple(self.tasks))
        if (self.rows_per_version is None) != (self.max_lag is None) and self.rows_per_version is not None:
            raise ValueError("rows_per_version bounds nothing without max_lag: give both, or max_rows")
        if self.keep_steps and not self.tasks:
            raise ValueError(f"keep_steps is {self.keep_steps}, and no tasks are declared whose rows would be kept")

    @property
    def row_limit(self) -> int | None:
        """The smaller of `max_rows` and what `max_lag` allows."""
        limits = [self.max_rows] if self.max_rows is not None else []
        if self.max_lag is not None and self.rows_per_version is not None:
            limits.append((self.max_lag + 1) * self.rows_per_version)
        return min(limits, default=None)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "tasks": list(self.tasks), "on_full": str(self.on_full)}

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
"""Of a partition that nobody configured."""
