"""Compaction: chooses segments with many bytes of cleared rows, and copies their live rows to new extents.

Copying costs the live bytes and frees the rest. Where rows are consumed in the order of their puts, whole segments
become empty by themselves, so a segment is compacted only once half of it is cleared, or nothing changed for a while.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from rl_tq.columns.encode import Column
from rl_tq.columns.extent import plan_extent
from rl_tq.columns.gather import Collected, collect, cumulated
from rl_tq.columns.schema import ColumnKind

if TYPE_CHECKING:
    from rl_tq.columns.extent import Layout, LocatedColumns, Opened
    from rl_tq.columns.schema import ColumnSchema
    from rl_tq.metadata.state import State
    from rl_tq.server.memory import HeapMemory
    from rl_tq.server.segment_table import SegmentTable

_MIN_WASTE_BYTES = 64 << 10
_AT_ONCE = 0.5
"""Live fraction of a segment below which it is compacted at once, if at least this much is cleared:"""
_AT_ONCE_BYTES = 4 << 20
_AT_REST = 0.93
"""Live fraction below which it is compacted, once nothing in it was cleared for this long:"""
REST_S = 0.5
_MAX_BYTES = 64 << 20
_MAX_EXTENTS = 4096
_MAX_LOOKED_AT = 4 * _MAX_EXTENTS
"""Most extents of a segment examined per plan, because the server waits for it."""


def is_worth_it(live_nbytes: int, nbytes: int, rest_s: float) -> bool | None:
    """Whether memory should be compacted, after `rest_s` seconds without a clear in it; None: not yet."""
    gone = nbytes - live_nbytes
    if live_nbytes > _AT_REST * nbytes or gone < _MIN_WASTE_BYTES:
        return False
    is_urgent = live_nbytes <= _AT_ONCE * nbytes and gone >= _AT_ONCE_BYTES
    return True if is_urgent or rest_s >= REST_S else None


class Plan(NamedTuple):
    """Compaction plan: the extents to merge and their live rows."""

    partition: str
    columns: list[str]
    old: list[int]
    """Numbers of the extents, all with these columns."""
    rows: list[int]
    """Numbers of their live rows."""
    nbytes: int
    """Present size of the extents, bytes."""


class CompactionQueue:
    """Queue of segments in which rows were cleared, with the time of the last clear."""

    def __init__(self, memory: HeapMemory | SegmentTable, state: State) -> None:
        self._memory = memory
        self._state = state
        self._since: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._since)

    def adopt(self) -> None:
        """After a replay: take over what was cleared before."""
        for number, extent in self._state.extents.items():
            self._memory.shrink(number, extent.live_nbytes)

    def note(self, extent: int, now: float) -> None:
        """Note that rows of an extent were cleared."""
        held = self._state.extents.get(extent)
        self._memory.shrink(extent, 0 if held is None else held.live_nbytes)
        self._since[self._memory.segment_of(extent)] = now

    def forget(self, extent: int) -> None:
        """Remove the segment of an extent: compaction would gain nothing."""
        if extent in self._state.extents:
            self._since.pop(self._memory.segment_of(extent), None)

    def plan(self, now: float) -> Plan | None:
        """Next compaction; None if there is none yet."""
        for segment, since in list(self._since.items()):
            numbers, live_nbytes, put_nbytes = self._memory.usage(segment)
            verdict = is_worth_it(live_nbytes, put_nbytes, now - since)
            if verdict is False:
                del self._since[segment]
            if not verdict or (not live_nbytes and now - since < REST_S):
                continue
            self._memory.ask_to_seal(segment)
            held = map(self._state.extents.get, islice(numbers, _MAX_LOOKED_AT))
            extents = [extent for extent in held if extent is not None and extent.nbytes]  # not of an alias
            if not extents:
                del self._since[segment]
                continue
            first = extents[0]
            home = self._state.partitions[first.partition]
            chosen: list[int] = []
            rows: dict[int, None] = {}
            nbytes = 0
            for extent in extents:
                alike = (extent.partition, extent.columns) == (first.partition, first.columns)
                if alike and (not chosen or (nbytes + extent.live_nbytes <= _MAX_BYTES and len(chosen) < _MAX_EXTENTS)):
                    chosen.append(extent.number)
                    nbytes += extent.live_nbytes
                    rows.update(dict.fromkeys(number for number in extent.rows if number in home.rows))
            whole = sum(self._state.extents[number].nbytes for number in chosen)
            return Plan(first.partition, sorted(first.columns), chosen, list(rows), whole)
        return None


def compacted_extent(columns: LocatedColumns, opened: Opened, num_rows: int) -> Layout:
    """Layout of a new extent of these rows. Shared values are stored per row, so it may be larger than the old ones."""
    collected = collect(columns, opened)
    return plan_extent({name: _column(name, schema, collected, num_rows) for name, (schema, _) in columns.items()})


def _column(name: str, schema: ColumnSchema, collected: Collected, num_rows: int) -> Column:
    bounds = collected.bounds.get(name)
    offsets, turns = None if bounds is None else bounds.offsets, None
    if schema.kind is ColumnKind.TURNS:
        lengths = collected.turns[name]
        offsets, turns = cumulated([len(row) for row in lengths]), cumulated(list(chain.from_iterable(lengths)))
    return Column(schema=schema, num_rows=num_rows, pieces=collected.parts[name], offsets=offsets, turns=turns)
