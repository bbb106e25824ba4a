"""The values that rl-tq takes and gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rl_tq.policies.base import Policy as Policy
from rl_tq.policies.base import RowMeta as RowMeta
from rl_tq.types.batch_meta import BatchMeta as BatchMeta
from rl_tq.types.batch_meta import batch_meta as batch_meta
from rl_tq.types.options import OnFull as OnFull
from rl_tq.types.options import PartitionOptions as PartitionOptions

if TYPE_CHECKING:
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
