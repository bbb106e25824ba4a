"""Locations: where the rows of a reference lie, as far as their server said, so that they can be read without asking.

A location is a hint: it names the generation number that its extent had (`memory.generations`).
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from rl_tq.columns.schema import read_schema
from rl_tq.types.batch_meta import PackedLocation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_tq.columns.schema import ColumnSchema

Run: TypeAlias = tuple[int, int, int]
"""Extent, first row in it, number of rows: rows of a batch that are consecutive in it and in memory."""
_NUMBERS = struct.Struct("<9q")


class Location(NamedTuple):
    """Rows of consecutive numbers that lie one after the other in one extent."""

    columns: Mapping[str, ColumnSchema]
    """What the extent holds of them."""
    first_row: int
    num_rows: int
    start: int
    """Index of the first row in the extent."""
    extent: int
    """The server's number of it."""
    segment: int
    """The server's number of the shared memory that it is in."""
    offset: int
    """Where it begins there."""
    nbytes: int
    slot: int
    """Which generation is the extent's."""
    generation: int
    """What that was when this was told."""


def pack_location(layout: bytes, *numbers: int) -> tuple[bytes, bytes]:
    """The wire form of a location: the extent's columns, packed, and the numbers of a `Location`."""
    return layout, _NUMBERS.pack(*numbers)


def unpack_location(packed: PackedLocation) -> Location:
    """The inverse."""
    return Location(read_schema(packed.layout), *_NUMBERS.unpack(packed.numbers))


def locations_of(packed: Sequence[bytes]) -> tuple[PackedLocation, ...]:
    """The locations in a reply: layout and numbers of each in turn."""
    if len(packed) == 2:
        return (PackedLocation(packed[0], packed[1]),)
    return tuple(map(PackedLocation, packed[::2], packed[1::2]))


def find_runs(rows: Sequence[int], columns: Sequence[str], locations: Sequence[Location]) -> (
    tuple[dict[str, tuple[ColumnSchema, list[Run]]], list[Location]] | None
):  # fmt: skip
    """Where columns of rows lie, and the locations that say so; None where the locations do not tell."""
    if len(locations) == 1:
        [location] = locations
        start = rows[0] - location.first_row
        is_there = 0 <= start <= location.num_rows - len(rows) and _num_consecutive(rows) == len(rows)
        runs = [(location.extent, location.start + start, len(rows))] if is_there else _runs(rows, [location], {})
        schemas = location.columns
        if not runs or any(column not in schemas for column in columns):
            return None
        return {column: (schemas[column], runs) for column in columns}, [location]
    found: dict[str, tuple[ColumnSchema, list[Run]]] = {}
    used: dict[Location | int, Location] = {}
    known: dict[tuple[int, ...], list[Run] | None] = {}
    for column in columns:
        holders = [location for location in locations if column in location.columns]
        key = tuple(map(id, holders))
        runs = known.get(key)
        if runs is None:
            runs = known[key] = _runs(rows, holders, used)
            if not runs:
                return None
        found[column] = (holders[0].columns[column], runs)
    return found, list(used.values())


def _runs(rows: Sequence[int], holders: list[Location], used: dict[Any, Location]) -> list[Run] | None:
    holders.sort(key=attrgetter("first_row"))
    firsts = [location.first_row for location in holders]
    runs: list[Run] = []
    done = 0
    while done < len(rows):
        at = bisect_right(firsts, rows[done]) - 1
        if at < 0:
            return None
        location = holders[at]
        index = rows[done] - location.first_row
        count = _num_consecutive(rows[done : done + location.num_rows - index])
        if not count:
            return None
        used[id(location)] = location
        run = (location.extent, location.start + index, count)
        if runs and runs[-1][0] == run[0] and runs[-1][1] + runs[-1][2] == run[1]:
            run = (run[0], runs[-1][1], runs.pop()[2] + count)
        runs.append(run)
        done += count
    return runs


def _num_consecutive(rows: Sequence[int]) -> int:
    """How many of the first rows follow one another."""
    if not rows or tuple(rows) == tuple(range(rows[0], rows[0] + len(rows))):
        return len(rows)
    return next(i for i, row in enumerate(rows) if row != rows[0] + i)
