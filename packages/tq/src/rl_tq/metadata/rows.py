"""What the bookkeeping keeps: rows, the extents that their values lie in, and the partitions that hold them."""

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
    """What one put wrote. It and its rows are never part of a cycle, so the collector of cycles need not walk them."""

    number: int
    """The host's, given once."""
    columns: frozenset[str]
    """Its columns."""
    nbytes: int
    """All of it."""
    num_rows: int
    """Rows it was written with."""
    num_live: int
    """Rows that still refer to it."""
    owner: str
    """Who put it, in words."""
    partition: str
    """Where its rows are."""
    rows: Sequence[int]
    """Their numbers, those that are cleared among them. A range: row i of it lies at index i."""

    @property
    def live_nbytes(self) -> int:
        """About how many of its bytes are of rows that still refer to it."""
        return self.nbytes * self.num_live // self.num_rows


class Row(msgspec.Struct, eq=False, gc=False):
    """One row."""

    number: int
    """Given once in the life of the store; a smaller one is older."""
    name: str | None
    """The caller's name for it, unique in its partition while it exists; None: `row` and the number."""
    tags: Mapping[str, Any]
    """Small values, merged from every put. Replaced, never changed in place."""
    columns: frozenset[str]
    """What it has."""
    extent: Extent | None = None
    """What its first put wrote; there are as many rows as nothing else of the server's, and most have one alone."""
    index: int = 0
    """Its index in that."""
    more: tuple[tuple[Extent, int], ...] = ()
    """The others, as in `pieces`."""

    @property
    def pieces(self) -> tuple[tuple[Extent, int], ...]:
        """Extents that hold its values, and its index in each; no two hold the same column."""
        return self.more if self.extent is None else ((self.extent, self.index), *self.more)

    def set_pieces(self, pieces: Sequence[tuple[Extent, int]]) -> None:
        """Replace them."""
        (self.extent, self.index), *more = pieces
        self.more = tuple(more)

    @property
    def sample_id(self) -> str:
        """What callers call it."""
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
    """The same numbers, in less memory where they follow one another."""
    if isinstance(numbers, range):
        return numbers
    whole = range(numbers[0], numbers[0] + len(numbers))
    return whole if list(numbers) == list(whole) else tuple(numbers)


def runs_of(rows: Sequence[Row], columns: Collection[str]) -> tuple[dict[str, int], list[list[Run]]]:
    """Where columns lie: for each, the position of its runs in the list. Columns of the same extents share theirs."""
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
"""Rows that lie in more pieces are asked for when they are read: their locations would be longer than the question."""


@dataclass(slots=True, kw_only=True, eq=False)
class Partition:
    """Rows under one name."""

    name: str
    generation: int
    options: PartitionOptions = field(default_factory=PartitionOptions)
    schema: dict[str, ColumnSchema] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)
    """By number, oldest first."""
    by_name: dict[str, Row] = field(default_factory=dict)
    """Those that a caller named."""
    by_version: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    by_group: defaultdict[Hashable, set[int]] = field(default_factory=lambda: defaultdict(set))
    nbytes: int = 0
    """Of its extents."""
    weight_version: int = 0
    tasks: dict[str, TaskLedger] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows that were cleared by a limit, by the reason."""
    done: dict[int, list[int]] = field(default_factory=dict)
    """Training step to the rows that every declared task acked at it or before, for `keep_steps`."""
    changed: int = 0
    """Grows whenever it changes."""
    is_bare: bool = True
    """Whether no row was ever named or tagged by a caller."""
    accepted: Schema | None = None
    """Columns of its last put: the same again agree with the others, and need not be compared."""
    _packed: dict[frozenset[str], bytes] = field(default_factory=dict)

    def packed_schema(self, columns: frozenset[str]) -> bytes:
        """The schema of some columns, for a message. It never changes: a column's is that of its first put."""
        packed = self._packed.get(columns)
        if packed is None:
            packed = self._packed[columns] = pack_schema((name, self.schema[name]) for name in columns)
        return packed

    def accept(self, schema: Schema) -> None:
        """Take in the columns of a put, which agree with those that it has."""
        if self.accepted is not schema:
            self.schema |= schema
            self.accepted = schema

    def is_leased(self, number: int) -> bool:
        """Whether any task has a lease on a row."""
        return any(number in ledger.leased for ledger in self.tasks.values())

    def enter(
        self, numbers: Sequence[int], rows: Sequence[Row], *, has_names: bool, tags: Sequence[Mapping[str, Any]] | None
    ) -> None:
        """Take new rows of these numbers in, with their tags."""
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
        """Let a row go."""
        del self.rows[row.number]
        if row.name is not None:
            del self.by_name[row.name]
        self._declassify(row)
        for ledger in self.tasks.values():
            ledger.forget(row.number)

    def find(self, sample_id: str) -> Row | None:
        """The row of that name, the caller's or ours."""
        row = self.by_name.get(sample_id)
        if row is None and sample_id.startswith("row") and sample_id[3:].isdecimal():
            row = self.rows.get(int(sample_id[3:]))
            if row is not None and row.sample_id != sample_id:
                return None
        return row

    def tag(self, row: Row, tags: Mapping[str, Any]) -> None:
        """Merge tags into a row's."""
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
    """The rows of these numbers, for a `Batch`; only the first of those that one put made, if it stands for all.

    It does where an answer says nothing of a row but its number and where it lies: looking each row up in a partition
    of a million takes longer than all else of a claim.
    """
    if home.is_bare and isinstance(numbers, range):
        first = home.rows[numbers[0]]
        if columns and _is_one_put(first, numbers, columns):
            return [first]
    return list(map(home.rows.__getitem__, numbers))


def _is_one_put(first: Row, numbers: range, columns: frozenset[str]) -> bool:
    """Whether rows of consecutive numbers lie one after the other, with these columns, in the first one's extent."""
    extent = first.extent
    # Rows that one put made have numbers in the order in which they lie.
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
    """What `pieces_of` gives, as a reply has it: layout and numbers of each in turn; None if one is not known.

    `where` says segment, offset, bytes, slot and generation of an extent.
    """
    packed: list[bytes] = []
    for extent, first, count, start in pieces:
        place = where(extent.number)
        if place is None:
            return None
        layout = home.packed_schema(columns if columns <= extent.columns else extent.columns & columns)
        packed += pack_location(layout, first, count, start, extent.number, *place)
    return packed
