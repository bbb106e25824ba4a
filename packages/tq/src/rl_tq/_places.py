"""Where the rows of a reference lie, as far as their server told: so that a process of its host reads without asking.

A place is a hint. Each extent has a stamp, a number in memory that server and clients share, which the server changes
when any of its rows is cleared and before the clear is answered: a place whose stamp is another is asked for anew.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from bisect import bisect_right
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_tq._schema import read_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rl_tq._rows import Extent, Partition, Row, Run
    from rl_tq._schema import ColumnSchema

MAX_PLACES = 64
"""Rows that lie in more pieces are asked for when they are read: their places would be longer than the question."""
_NUM_STAMPS = 1 << 16
_WORD_BYTES = 8
_NUMBERS = struct.Struct("<9q")


class Told(NamedTuple):
    """A place as it travels. Most references are acked or passed on by who gets them, and never read."""

    layout: bytes
    """Packed: the extent's columns, and"""
    numbers: bytes
    """the rest of a `Place`."""

    def read(self) -> Place:
        """What it says."""
        return Place(read_schema(self.layout), *_NUMBERS.unpack(self.numbers))


class Place(NamedTuple):
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
    """Which stamp is the extent's."""
    stamp: int
    """What that was when this was told."""


def find_runs(rows: Sequence[int], columns: Sequence[str], places: Sequence[Place]) -> (
    tuple[dict[str, tuple[ColumnSchema, list[Run]]], list[Place]] | None
):  # fmt: skip
    """Where columns of rows lie, and the places that say so; None where the places do not tell."""
    if len(places) == 1:
        [place] = places
        start = rows[0] - place.first_row
        is_there = 0 <= start <= place.num_rows - len(rows) and _num_consecutive(rows) == len(rows)
        runs = [(place.extent, place.start + start, len(rows))] if is_there else _runs(rows, [place], {})
        schemas = place.columns
        if not runs or any(column not in schemas for column in columns):
            return None
        return {column: (schemas[column], runs) for column in columns}, [place]
    found: dict[str, tuple[ColumnSchema, list[Run]]] = {}
    used: dict[Place | int, Place] = {}
    known: dict[tuple[int, ...], list[Run] | None] = {}
    for column in columns:
        holders = [place for place in places if column in place.columns]
        key = tuple(map(id, holders))
        runs = known.get(key)
        if runs is None:
            runs = known[key] = _runs(rows, holders, used)
            if not runs:
                return None
        found[column] = (holders[0].columns[column], runs)
    return found, list(used.values())


def _runs(rows: Sequence[int], holders: list[Place], used: dict[Any, Place]) -> list[Run] | None:
    holders.sort(key=attrgetter("first_row"))
    firsts = [place.first_row for place in holders]
    runs: list[Run] = []
    done = 0
    while done < len(rows):
        at = bisect_right(firsts, rows[done]) - 1
        if at < 0:
            return None
        place = holders[at]
        index = rows[done] - place.first_row
        count = _num_consecutive(rows[done : done + place.num_rows - index])
        if not count:
            return None
        used[id(place)] = place
        run = (place.extent, place.start + index, count)
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
            if len(found) + len(open_runs) > MAX_PLACES:
                return None
    return found + [tuple(run) for run in open_runs.values()]


def to_wire(home: Partition, pieces: Sequence[tuple[Extent, int, int, int]], columns: frozenset[str],
            where: Callable[[int], Sequence[int] | None]) -> list[bytes] | None:  # fmt: skip
    """What `pieces_of` gives, as a reply tells it: layout and numbers of each in turn; None if one cannot be told.

    `where` says segment, offset, bytes, slot and stamp of an extent.
    """
    told: list[bytes] = []
    for extent, first, count, start in pieces:
        place = where(extent.number)
        if place is None:
            return None
        told.append(home.packed_schema(columns if columns <= extent.columns else extent.columns & columns))
        told.append(_NUMBERS.pack(first, count, start, extent.number, *place))
    return told


def from_wire(told: Sequence[bytes]) -> tuple[Told, ...]:
    """The places in a reply."""
    if len(told) == 2:
        return (Told(told[0], told[1]),)
    return tuple(map(Told, told[::2], told[1::2]))


class Stamps:
    """The server's end: one number per extent, in memory that clients can read."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("rl-stamps", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, _WORD_BYTES * _NUM_STAMPS)
        self._words = memoryview(mmap.mmap(self.fd, _WORD_BYTES * _NUM_STAMPS)).cast("Q")
        # Numbers that no other server, nor this one before it was started again, is likely to have given.
        self._next = secrets.randbits(62)
        self._free = list(range(_NUM_STAMPS - 1, -1, -1))
        self._slots: dict[int, int] = {}

    def open(self, extent: int) -> None:
        """Give a new extent a stamp, if there is one left."""
        if self._free:
            self._slots[extent] = self._free.pop()
            self.change(extent)

    def change(self, extent: int) -> None:
        """Have every place that names an extent be noticed as old."""
        slot = self._slots.get(extent)
        if slot is not None:
            self._next += 1
            self._words[slot] = self._next

    def close(self, extent: int) -> None:
        """An extent is freed."""
        self.change(extent)
        slot = self._slots.pop(extent, None)
        if slot is not None:
            self._free.append(slot)

    def of(self, extent: int) -> tuple[int, int] | None:
        """Slot and stamp of an extent; None if it has none."""
        slot = self._slots.get(extent)
        return None if slot is None else (slot, self._words[slot])

    def end(self) -> None:
        """The queue is closed: no place is good any more."""
        for extent in list(self._slots):
            self.close(extent)
        os.close(self.fd)


class StampReader:
    """A client's end."""

    def __init__(self, fd: int) -> None:
        self._words = memoryview(mmap.mmap(fd, _WORD_BYTES * _NUM_STAMPS, access=mmap.ACCESS_READ)).cast("Q")
        os.close(fd)

    def are_valid(self, places: Iterable[Place]) -> bool:
        """Whether nothing in these places was cleared since they were told."""
        return all(0 <= place.slot < _NUM_STAMPS and self._words[place.slot] == place.stamp for place in places)
