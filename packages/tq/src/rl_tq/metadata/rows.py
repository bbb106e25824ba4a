"""What the bookkeeping keeps: rows, the extents that their values lie in, and the partitions that hold them."""

from __future__ import annotations

from itertools import repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

    from rl_tq.columns.locations import Run


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
    is_spilled: bool = False
    """Whether it lies in a file instead of memory."""

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


def rows_of(
    extent: Extent, numbers: Sequence[int], names: Sequence[str | None] | None, indexes: Sequence[int]
) -> list[Row]:
    """New rows, all of whose values lie in one extent; without names they are called by their numbers."""
    return list(
        map(Row, numbers, names or repeat(None), repeat(NO_TAGS), repeat(extent.columns), repeat(extent), indexes)
    )


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
