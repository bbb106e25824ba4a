"""Which memory is worth copying together: segments most of whose bytes are of rows that were cleared.

Copying costs what is left, and frees what is gone. Where rows are consumed in the order in which they were put, whole
segments empty by themselves, so one is left alone until half of it is gone, or nothing more went for a while.
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
"""Live share of a segment at which it is copied at once, if so much is gone:"""
_AT_ONCE_BYTES = 4 << 20
_AT_REST = 0.93
"""Live share once nothing in it was cleared for so long:"""
REST_S = 0.5
_MAX_BYTES = 64 << 20
_MAX_EXTENTS = 4096
_MAX_LOOKED_AT = 4 * _MAX_EXTENTS
"""Of a segment's extents, in one plan: the server waits for it."""


def is_worth_it(live_nbytes: int, nbytes: int, rest_s: float) -> bool | None:
    """Whether what is left of memory is to be copied, now that nothing of it was cleared for so long; None: not yet."""
    gone = nbytes - live_nbytes
    if live_nbytes > _AT_REST * nbytes or gone < _MIN_WASTE_BYTES:
        return False
    is_urgent = live_nbytes <= _AT_ONCE * nbytes and gone >= _AT_ONCE_BYTES
    return True if is_urgent or rest_s >= REST_S else None


class Plan(NamedTuple):
    """What one copy takes."""

    partition: str
    columns: list[str]
    old: list[int]
    """Extents, all of these columns."""
    rows: list[int]
    """Numbers of the rows in them that are not cleared."""
    nbytes: int
    """Of the extents as they are."""


class CompactionQueue:
    """Segments in which something was cleared, and when last."""

    def __init__(self, memory: HeapMemory | SegmentTable, state: State) -> None:
        self._memory = memory
        self._state = state
        self._since: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._since)

    def adopt(self) -> None:
        """After a replay: what was cleared before."""
        for number, extent in self._state.extents.items():
            self._memory.shrink(number, extent.live_nbytes)

    def note(self, extent: int, now: float) -> None:
        """All or some of an extent was cleared."""
        held = self._state.extents.get(extent)
        self._memory.shrink(extent, 0 if held is None else held.live_nbytes)
        self._since[self._memory.segment_of(extent)] = now

    def forget(self, extent: int) -> None:
        """Copying an extent would gain nothing."""
        if extent in self._state.extents:
            self._since.pop(self._memory.segment_of(extent), None)

    def plan(self, now: float) -> Plan | None:
        """What to copy next; None: nothing yet."""
        for segment, since in list(self._since.items()):
            numbers, live_nbytes, put_nbytes = self._memory.usage(segment)
            verdict = is_worth_it(live_nbytes, put_nbytes, now - since)
            if verdict is False:
                del self._since[segment]
            if not verdict or (not live_nbytes and now - since < REST_S):
                continue
            self._memory.ask_to_seal(segment)
            held = map(self._state.extents.get, islice(numbers, _MAX_LOOKED_AT))
            extents = [extent for extent in held if extent is not None and extent.nbytes]  # no bytes: it is another's
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
    """An extent of these rows. Values that rows share are laid out for each: it may be larger than what there was."""
    collected = collect(columns, opened)
    return plan_extent({name: _column(name, schema, collected, num_rows) for name, (schema, _) in columns.items()})


def _column(name: str, schema: ColumnSchema, collected: Collected, num_rows: int) -> Column:
    bounds = collected.bounds.get(name)
    offsets, turns = None if bounds is None else bounds.offsets, None
    if schema.kind is ColumnKind.TURNS:
        lengths = collected.turns[name]
        offsets, turns = cumulated([len(row) for row in lengths]), cumulated(list(chain.from_iterable(lengths)))
    return Column(schema=schema, num_rows=num_rows, pieces=collected.parts[name], offsets=offsets, turns=turns)
