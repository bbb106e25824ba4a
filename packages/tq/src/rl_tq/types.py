"""The values that rl-tq takes and gives."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from rl_tq._batch_meta import BatchMeta as BatchMeta
from rl_tq._batch_meta import batch_meta as batch_meta
from rl_tq._buffer import Buffer as Buffer
from rl_tq._options import OnFull as OnFull
from rl_tq._options import PartitionOptions as PartitionOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMeta:
    """What a sampler sees of one row."""

    sample_id: str
    """Id of the row."""
    tags: Mapping[str, Any]
    """Its tags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Base of `rl_tq.policies`: plain values that travel to the server as JSON.

    A policy of your own is a subclass, a frozen dataclass of JSON values that overrides `choose`, installed under its
    `name` in the entry point group `rl_tq.policies` where the server runs.
    """

    name: ClassVar[str]

    def check(self, batch_size: int) -> None:
        """Raise ValueError if no claim of `batch_size` rows can be made this way."""

    def choose(self, rows: Sequence[RowMeta], batch_size: int) -> Sequence[int] | None:
        """For policies of one's own: positions in the ready rows (oldest first), or None to wait until they change.

        Runs in the server, under its lock, at every change while a claim waits: be quick. Those of `rl_tq.policies` do
        without: the server keeps indexes for them.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must override choose(rows, batch_size)")

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            "name": self.name,
            **{key: value.to_json() if isinstance(value, Policy) else value for key, value in values.items()},
        }
