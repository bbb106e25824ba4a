"""Which memory is worth copying together: segments most of whose bytes are of rows that were cleared.

Copying costs what is left, and frees what is gone. Where rows are consumed in the order in which they were put, whole
segments empty by themselves, so one is left alone until half of it is gone, or nothing more went for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from rl_tq.columns.encode import Column
from rl_tq.columns.extent import Layout, plan_extent
from rl_tq.columns.gather import Collected, collect, cumulated
from rl_tq.columns.schema import ColumnKind
from rl_tq.errors import TransferQueueError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rl_tq.columns.extent import ExtentView, LocatedColumns, Opened
    from rl_tq.columns.schema import ColumnSchema
    from rl_tq.metadata.requests import Located
    from rl_tq.metadata.state import State
    from rl_tq.metadata.store import MetadataStore
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
    spill: str | None
    """The directory that the copy belongs in, if they lie in files."""


class CompactionQueue:
    """Segments in which something was cleared, and when last."""

    def __init__(self, table: SegmentTable, state: State) -> None:
        self._table = table
        self._state = state
        self._since: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._since)

    def adopt(self) -> None:
        """After a replay: what was cleared before."""
        for number, extent in self._state.extents.items():
            self._table.shrink(number, extent.live_nbytes)

    def note(self, extent: int, now: float) -> None:
        """All or some of an extent was cleared."""
        held = self._state.extents.get(extent)
        self._table.shrink(extent, 0 if held is None else held.live_nbytes)
        self._since[self._table.segment_of(extent)] = now

    def forget(self, extent: int) -> None:
        """Copying an extent would gain nothing."""
        if extent in self._state.extents:
            self._since.pop(self._table.segment_of(extent), None)

    def plan(self, now: float) -> Plan | None:
        """What to copy next; None: nothing yet."""
        for segment, since in list(self._since.items()):
            numbers, live_nbytes, put_nbytes = self._table.usage(segment)
            verdict = is_worth_it(live_nbytes, put_nbytes, now - since)
            if verdict is False:
                del self._since[segment]
            if not verdict or (not live_nbytes and now - since < REST_S):
                continue
            self._table.ask_to_seal(segment)
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
                alike = (extent.partition, extent.columns, extent.is_spilled) == (
                    first.partition, first.columns, first.is_spilled
                )  # fmt: skip
                if alike and (not chosen or (nbytes + extent.live_nbytes <= _MAX_BYTES and len(chosen) < _MAX_EXTENTS)):
                    chosen.append(extent.number)
                    nbytes += extent.live_nbytes
                    rows.update(dict.fromkeys(number for number in extent.rows if number in home.rows))
            spill = home.options.spill_directory if first.is_spilled else None
            return Plan(first.partition, sorted(first.columns), chosen, list(rows), spill)
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


_LOG = logging.getLogger(__name__)


class HeapHost(Protocol):
    """The host of a queue whose extents are memory of this process."""

    address: str
    lock: threading.Lock
    extents: dict[int, ExtentView]
    aliased: set[int]

    def replace(self, extent: int, rows: Sequence[int], memory: torch.Tensor) -> None:
        """Have rows of an extent lie in a copy of them."""
        ...


class HeapCompactor:
    """A thread beside a host, from the first row on that is cleared before its neighbours."""

    def __init__(self, host: HeapHost, store: MetadataStore) -> None:
        self._host = host
        self._store = store
        self._since: dict[int, float] = {}
        """Extents of which a part was cleared, and when last. Like the store, only for who holds the host's lock."""
        self._wake = threading.Event()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def note(self, extents: Iterable[int], now: float) -> None:
        """A part of these was cleared. Call it with the host's lock held."""
        self._since.update(dict.fromkeys(extents, now))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"rl-tq-compactor-{self._host.address}", daemon=True)
            self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """End. Call it without the lock."""
        self._is_closed.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._wake.wait() and not self._is_closed.is_set():
            self._wake.clear()
            try:
                while self._step() and not self._is_closed.is_set():
                    pass
            except (MemoryError, RuntimeError, TransferQueueError) as error:  # no memory is left: for now
                _LOG.warning("memory of cleared rows in %s was not compacted: %s", self._host.address, error)
            with self._host.lock:
                is_more_to_come = bool(self._since)
            if is_more_to_come and not self._is_closed.wait(REST_S):
                self._wake.set()

    def _step(self) -> bool:
        """Write one extent anew, if that is worth it; returns whether there may be more to do."""
        with self._host.lock:
            extent = self._choose(time.monotonic())
            if extent is None:
                return False
            nbytes = self._store.state.extents[extent].nbytes
            rows, located = self._rest(extent)
            opened = {number: self._host.extents[number] for number in located.extents}
        columns = {name: (schema, located.runs[which]) for name, (schema, which) in located.columns.items()}
        layout = compacted_extent(columns, opened, len(rows))
        if layout.nbytes < nbytes:
            memory = torch.empty(layout.nbytes, dtype=torch.uint8)
            layout.write(memory)
            self._host.replace(extent, rows, memory)
        return True

    def _choose(self, now: float) -> int | None:
        for number, since in list(self._since.items()):
            extent = self._store.state.extents.get(number)
            verdict = False
            # One without bytes stands for a part of another, which then cannot be let go of either.
            if extent is not None and extent.nbytes and not extent.is_spilled and number not in self._host.aliased:
                verdict = is_worth_it(extent.live_nbytes, extent.nbytes, now - since)
            if verdict is not None:
                del self._since[number]
            if verdict:
                return number
        return None

    def _rest(self, number: int) -> tuple[list[int], Located]:
        extent = self._store.state.extents[number]
        home = self._store.state.partitions[extent.partition]
        rows = [
            row for row in extent.rows if row in home.rows and any(held is extent for held, _ in home.rows[row].pieces)
        ]
        return rows, self._store.locate(partition=home.name, columns=sorted(extent.columns), rows=rows)
