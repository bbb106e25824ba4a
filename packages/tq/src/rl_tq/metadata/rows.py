"""Rows, the extents that hold their values, and partitions: the data structures of the metadata."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from rl_tq.columns.locations import pack_location
from rl_tq.columns.schema import Schema, pack_schema
from rl_tq.types import PartitionOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

    from rl_tq.columns.locations import Run
    from rl_tq.columns.schema import ColumnSchema
    from rl_tq.metadata.ledger import TaskLedger

NO_TAGS: Mapping[str, Any] = MappingProxyType({})


class Extent(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """Extent written by one put. Extents and rows are never in a reference cycle, so `gc=False` is safe."""

    number: int
    """Number given by the host, never reused."""
    columns: frozenset[str]
    """Its columns."""
    nbytes: int
    """Size in bytes."""
    num_rows: int
    """Number of rows it was written with."""
    num_live: int
    """Number of rows that still refer to it."""
    owner: str
    """Description of the producer, for messages."""
    partition: str
    """Partition of its rows."""
    rows: Sequence[int]
    """Numbers of its rows, including cleared ones. If it is a range, its i-th row is at index i."""

    @property
    def live_nbytes(self) -> int:
        """Estimated bytes of rows that still refer to it."""
        return self.nbytes * self.num_live // self.num_rows


class Row(msgspec.Struct, eq=False, gc=False):
    """Row of a partition: name, tags, columns, and the extents that hold its values."""

    number: int
    """Row number, never reused; a smaller one is older."""
    name: str | None
    """Sample id given by the caller, unique in the partition; None: `row` and the number."""
    tags: Mapping[str, Any]
    """Tags merged from every put. Replaced, never changed in place."""
    columns: frozenset[str]
    """Names of its columns."""
    extent: Extent | None = None
    """Extent of its first put. A separate field, to save memory: most rows have only this one."""
    index: int = 0
    """Its index in that extent."""
    more: tuple[tuple[Extent, int], ...] = ()
    """Further extents, as in `pieces`."""

    @property
    def pieces(self) -> tuple[tuple[Extent, int], ...]:
        """(extent, index) pairs that hold its values; no two hold the same column."""
        return self.more if self.extent is None else ((self.extent, self.index), *self.more)

    def set_pieces(self, pieces: Sequence[tuple[Extent, int]]) -> None:
        """Replace all pieces."""
        (self.extent, self.index), *more = pieces
        self.more = tuple(more)

    @property
    def sample_id(self) -> str:
        """Sample id, given or default."""
        return f"row{self.number}" if self.name is None else self.name

    @property
    def group(self) -> Hashable:
        """Its tag `group_id`, or None."""
        return self.tags.get("group_id")

    @property
    def version(self) -> int | None:
        """Its tag `weight_version_min`: the oldest weights that made any of it."""
        return self.tags.get("weight_version_min")


def as_range(numbers: Sequence[int]) -> Sequence[int]:
    """Numbers as a range if they are consecutive, which takes less memory; else as a tuple."""
    if isinstance(numbers, range):
        return numbers
    whole = range(numbers[0], numbers[0] + len(numbers))
    return whole if list(numbers) == list(whole) else tuple(numbers)


def runs_of(rows: Sequence[Row], columns: Collection[str]) -> tuple[dict[str, int], list[list[Run]]]:
    """Runs of columns: for each column the position of its runs in the list. Columns of the same extents share runs."""
    extents: dict[int, Extent] = {}
    for row in rows:
        for extent, _ in row.pieces:
            extents[extent.number] = extent
    which: dict[str, int] = {}
    known: dict[frozenset[int], int] = {}
    distinct: list[list[Run]] = []
    for column in columns:
        holders = frozenset([number for number, extent in extents.items() if column in extent.columns])
        if holders not in known:
            known[holders] = len(distinct)
            distinct.append(_runs([_place(row, column) for row in rows]))
        which[column] = known[holders]
    return which, distinct


def _place(row: Row, column: str) -> tuple[int, int]:
    for extent, index in row.pieces:
        if column in extent.columns:
            return extent.number, index
    raise AssertionError(f"row {row.number} has no {column!r}")


def _runs(places: Iterable[tuple[int, int]]) -> list[Run]:
    runs: list[Run] = []
    extent, start, length = -1, 0, 0
    for place in places:
        if place[0] == extent and place[1] == start + length:
            length += 1
            continue
        if length:
            runs.append((extent, start, length))
        (extent, start), length = place, 1
    runs.append((extent, start, length))
    return runs


MAX_LOCATIONS = 64
"""Most locations in a reply. Rows in more pieces are located when they are read: a request is shorter then."""


@dataclass(slots=True, kw_only=True, eq=False)
class Partition:
    """Partition: the rows under one name, their schema, options and consumption."""

    name: str
    generation: int
    options: PartitionOptions = field(default_factory=PartitionOptions)
    schema: dict[str, ColumnSchema] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)
    """Rows by number, oldest first."""
    by_name: dict[str, Row] = field(default_factory=dict)
    """Rows that a caller named."""
    by_version: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    by_group: defaultdict[Hashable, set[int]] = field(default_factory=lambda: defaultdict(set))
    nbytes: int = 0
    """Size of its extents, bytes."""
    weight_version: int = 0
    tasks: dict[str, TaskLedger] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of rows cleared by a limit, by reason."""
    done: dict[int, list[int]] = field(default_factory=dict)
    """Training step to rows that every declared task acked by then, for `keep_steps`."""
    changed: int = 0
    """Version counter, increased by every change."""
    is_bare: bool = True
    """Whether no row ever had a name or tags."""
    accepted: Schema | None = None
    """Schema of the last put: the same object again needs no comparison."""
    _packed: dict[frozenset[str], bytes] = field(default_factory=dict)

    def packed_schema(self, columns: frozenset[str]) -> bytes:
        """Packed schema of some columns, cached: a column's schema never changes after its first put."""
        packed = self._packed.get(columns)
        if packed is None:
            packed = self._packed[columns] = pack_schema((name, self.schema[name]) for name in columns)
        return packed

    def accept(self, schema: Schema) -> None:
        """Add the columns of a put, which agree with the present schema."""
        if self.accepted is not schema:
            self.schema |= schema
            self.accepted = schema

    def is_leased(self, number: int) -> bool:
        """Whether any task has a lease on a row."""
        return any(number in ledger.leased for ledger in self.tasks.values())

    def enter(
        self, numbers: Sequence[int], rows: Sequence[Row], *, has_names: bool, tags: Sequence[Mapping[str, Any]] | None
    ) -> None:
        """Add new rows with these numbers and tags."""
        self.rows.update(zip(numbers, rows, strict=True))
        if has_names:
            self.by_name.update({row.name: row for row in rows if row.name is not None})
            self.is_bare = self.is_bare and not self.by_name
        if not tags:
            return
        by_version, by_group = self.by_version, self.by_group
        for row, given in zip(rows, tags, strict=False):
            if not given:
                continue
            self.is_bare = False
            row.tags = given
            if (version := given.get("weight_version_min")) is not None:
                by_version[version].add(row.number)
            if (group := given.get("group_id")) is not None:
                by_group[group].add(row.number)

    def leave(self, row: Row) -> None:
        """Remove a row."""
        del self.rows[row.number]
        if row.name is not None:
            del self.by_name[row.name]
        self._declassify(row)
        for ledger in self.tasks.values():
            ledger.forget(row.number)

    def find(self, sample_id: str) -> Row | None:
        """Row with that sample id, given or default."""
        row = self.by_name.get(sample_id)
        if row is None and sample_id.startswith("row") and sample_id[3:].isdecimal():
            row = self.rows.get(int(sample_id[3:]))
            if row is not None and row.sample_id != sample_id:
                return None
        return row

    def tag(self, row: Row, tags: Mapping[str, Any]) -> None:
        """Merge tags into those of a row."""
        self._declassify(row)
        self.enter([row.number], [row], has_names=False, tags=[{**row.tags, **tags}])

    def _declassify(self, row: Row) -> None:
        if not row.tags:
            return
        if (version := row.version) is not None:
            _remove(self.by_version, version, row.number)
        if (group := row.group) is not None:
            _remove(self.by_group, group, row.number)


def _remove(index: dict[Any, set[int]], key: Hashable, number: int) -> None:
    index[key].discard(number)
    if not index[key]:
        del index[key]


def answered_rows(home: Partition, numbers: Sequence[int], columns: frozenset[str]) -> list[Row]:
    """Rows with these numbers, for a `Batch`; only the first row of a single put, if it represents all of them.

    It does if the reply has no names or tags: looking up every row in a partition of a million rows takes longer than
    the rest of a claim.
    """
    if home.is_bare and isinstance(numbers, range):
        first = home.rows[numbers[0]]
        if columns and _is_one_put(first, numbers, columns):
            return [first]
    return list(map(home.rows.__getitem__, numbers))


def _is_one_put(first: Row, numbers: range, columns: frozenset[str]) -> bool:
    """Whether rows with consecutive numbers are consecutive, with these columns, in the extent of the first."""
    extent = first.extent
    # Rows of one put are numbered in the order of the extent.
    return (
        extent is not None
        and isinstance(extent.rows, range)
        and numbers[-1] in extent.rows
        and columns <= extent.columns
    )


def pieces_of(
    rows: Sequence[Row], numbers: Sequence[int], columns: frozenset[str]
) -> list[tuple[Extent, int, int, int]] | None:
    """(extent, first row, rows, start) of what holds any of the columns of rows of these numbers; None if too many."""
    if rows and isinstance(numbers, range) and _is_one_put(rows[0], numbers, columns):
        assert rows[0].extent is not None
        return [(rows[0].extent, numbers[0], len(numbers), rows[0].index)]
    found: list[tuple[Extent, int, int, int]] = []
    open_runs: dict[int, list[Any]] = {}
    for row in rows:
        number = row.number
        for extent, index in row.pieces:
            run = open_runs.get(extent.number)
            if run is not None and run[1] + run[2] == number and run[3] + run[2] == index:
                run[2] += 1
                continue
            if run is not None:
                found.append(tuple(run))
            elif columns.isdisjoint(extent.columns):
                continue
            open_runs[extent.number] = [extent, number, 1, index]
            if len(found) + len(open_runs) > MAX_LOCATIONS:
                return None
    return found + [tuple(run) for run in open_runs.values()]


def packed_locations(home: Partition, pieces: Sequence[tuple[Extent, int, int, int]], columns: frozenset[str],
            where: Callable[[int], Sequence[int] | None]) -> list[bytes] | None:  # fmt: skip
    """Locations in wire form, from `pieces_of`: layout and numbers of each in turn; None if one has no generation.

    `where` gives segment, offset, size in bytes, slot and generation of an extent.
    """
    packed: list[bytes] = []
    for extent, first, count, start in pieces:
        place = where(extent.number)
        if place is None:
            return None
        layout = home.packed_schema(columns if columns <= extent.columns else extent.columns & columns)
        packed += pack_location(layout, first, count, start, extent.number, *place)
    return packed
