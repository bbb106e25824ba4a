"""Requests to the metadata store and their results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from rl_tq.policies import Fifo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_tq.columns.locations import Run
    from rl_tq.columns.schema import ColumnSchema, Schema
    from rl_tq.errors import TransferQueueError
    from rl_tq.metadata.rows import Partition, Row
    from rl_tq.types import Credit, Policy

_FIFO = Fifo()


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Rows in a reply of the store."""

    partition: str
    """Their partition."""
    generation: int
    """Its generation."""
    rows: Sequence[Row]
    """Rows in the requested order or that of the policy; only the first if it represents all (`answered_rows`)."""
    numbers: Sequence[int]
    """Numbers of the rows."""
    is_bare: bool
    """Whether none of them has a name or tags."""
    version: int
    """Grows whenever the partition changes."""
    task: str = ""
    """Task that claimed them."""
    lease: int = 0
    """The claim's lease; 0 where nothing was claimed."""
    columns: frozenset[str] = frozenset()
    """Columns put or claimed, whose locations the reply may include."""


def batch_of(
    home: Partition, rows: Sequence[Row], columns: frozenset[str] = frozenset(), numbers: Sequence[int] | None = None
) -> Batch:
    """Batch of rows of a partition, without a claim."""
    if numbers is None:
        numbers = [row.number for row in rows]
    return Batch(
        partition=home.name, generation=home.generation, rows=rows, numbers=numbers, is_bare=home.is_bare,
        version=home.changed, columns=columns,
    )  # fmt: skip


class Located(msgspec.Struct, frozen=True, kw_only=True):
    """Locations of a batch's values in extents."""

    columns: dict[str, tuple[ColumnSchema, int]]
    """Column name to its schema and the position of its runs."""
    runs: list[list[Run]]
    """Runs of rows, in the order of the batch."""
    extents: set[int]
    """Every extent among them."""


class Request(msgspec.Struct, kw_only=True, eq=False):
    """Request that may have to wait: parked until it can be answered or its deadline passes."""

    key: Any
    """The host's key for the pending reply."""
    partition: str
    """Name of the partition."""
    deadline: float
    """On the host's clock, seconds."""
    owner: Any = None
    """The client: leases and credits end with it."""
    label: str = "a client"
    """Description of the client, for messages."""


class Claim(Request, kw_only=True, eq=False):
    """Claim of ready rows for a task."""

    columns: tuple[str, ...]
    """Columns that a row must have to be ready."""
    task: str
    """Name of the consumer."""
    batch_size: int
    """Rows wanted."""
    is_claim: bool = True
    """True: claim. False: list all ready rows, for a sampler to choose among."""
    after: int = -1
    """List only once the partition's version is beyond this."""
    policy: Policy = _FIFO
    """Policy that orders and groups the rows."""
    lease_s: float | None = None
    """Seconds until the lease expires; None: it ends with its owner."""


class Put(Request, kw_only=True, eq=False):
    """Put of an extent: row i of it is at index i."""

    num_rows: int
    schema: Schema
    extent: int
    nbytes: int
    sample_ids: Sequence[str] | None = None
    tags: Sequence[Mapping[str, Any]] | None = None
    credits: Sequence[int] = ()
    """The credits that it draws on."""
    rows: Sequence[int] = ()
    """Row numbers, where the caller gave a reference instead of ids."""
    generation: int = 0
    task: str = ""
    leases: Sequence[int] = ()
    """The leases under which the caller writes: refused if one of them is lost."""
    shared: Sequence[str] = ()
    """Columns that each row shares with its group."""

    @property
    def is_plain(self) -> bool:
        """Whether all of its rows are new, with nothing but values and tags."""
        return not (self.sample_ids or self.rows or self.credits or self.shared or self.leases)


class Admission(Request, kw_only=True, eq=False):
    """Admission request: room for rows that are still to be generated."""

    num_rows: int
    num_bytes: int
    group_id: Any = None
    """The group that the rows will be; None where groups are not admitted."""


Outcome: TypeAlias = "Batch | Credit | TransferQueueError"
