"""Locations: extent and position of a reference's rows, which let a client on the host read them without a request.

A location is a hint: it has the generation number of its extent (`memory.generations`), by which a stale one is found.
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
"""Run (extent, first row in it, number of rows): rows that are consecutive in the batch and in the extent."""
_NUMBERS = struct.Struct("<9q")


class Location(NamedTuple):
    """Location of consecutively numbered rows that are consecutive in one extent."""

    columns: Mapping[str, ColumnSchema]
    """Schema of their columns in the extent."""
    first_row: int
    num_rows: int
    start: int
    """Index of the first row in the extent."""
    extent: int
    """Number of the extent."""
    segment: int
    """Number of the shared-memory segment."""
    offset: int
    """Start of the extent in the segment, bytes."""
    nbytes: int
    slot: int
    """Index of the extent's generation number."""
    generation: int
    """Value of the generation number when the server replied."""


def pack_location(layout: bytes, *numbers: int) -> tuple[bytes, bytes]:
    """Wire form of a location: the packed schema, and the numbers of a `Location`."""
    return layout, _NUMBERS.pack(*numbers)


def unpack_location(packed: PackedLocation) -> Location:
    """Inverse of `pack_location`."""
    return Location(read_schema(packed.layout), *_NUMBERS.unpack(packed.numbers))


def locations_of(packed: Sequence[bytes]) -> tuple[PackedLocation, ...]:
    """Locations in a reply, which lists layout and numbers of each in turn."""
    if len(packed) == 2:
        return (PackedLocation(packed[0], packed[1]),)
    return tuple(map(PackedLocation, packed[::2], packed[1::2]))


def find_runs(rows: Sequence[int], columns: Sequence[str], locations: Sequence[Location]) -> (
    tuple[dict[str, tuple[ColumnSchema, list[Run]]], list[Location]] | None
):  # fmt: skip
    """Runs of the columns of rows, and the locations used; None if the locations do not cover all of them."""
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
    """Number of leading rows whose numbers are consecutive."""
    if not rows or tuple(rows) == tuple(range(rows[0], rows[0] + len(rows))):
        return len(rows)
    return next(i for i, row in enumerate(rows) if row != rows[0] + i)
