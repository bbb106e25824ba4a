"""What outlives a control server: the state that it takes up from a journal or a snapshot, and writes down again."""

from __future__ import annotations

import gc
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rl_tq._dump import dump
from rl_tq._snapshot import Snapshot, spill_directory_of
from rl_tq._spill import source_of
from rl_tq.errors import AddressError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from rl_tq._journal import Journal
    from rl_tq._segment_table import SegmentTable
    from rl_tq._segments import Segment
    from rl_tq._service import Service
    from rl_tq._state import Record


class Recovery:
    """Of one server's bookkeeping and memory."""

    def __init__(self, address: str, service: Service, table: SegmentTable, journal: Journal | None) -> None:
        self._address = address
        self._service = service
        self._table = table
        self._journal = journal

    def resume(self, journal: Journal) -> None:
        """Take up what an earlier server of this directory left."""
        with _no_collections():
            records = journal.load()
            store = self._service.store
            self._service.resume([record for record in records if record[0] != "note_place"], time.monotonic())
            places = {record[1]: record[2:] for record in records if record[0] == "note_place"}
            live = {extent: places[extent] for extent in store.state.extents}
            spilled_to = {each.spill_directory for each in store.state.options.values() if each.spill_directory}
            self._table.reopen(journal.directory, live, max(places, default=0), spilled_to)
            store.adopt()
            store.state.log = []
            journal.rewrite(self.records())

    def restore(self, path: Path) -> None:
        """Begin with what a snapshot holds, in memory and files of this queue's own.

        Raises:
            AddressError: there is a queue already.
        """
        store = self._service.store
        if store.state.next_row > 1 or store.state.options:
            raise AddressError(
                f"{self._address} holds a queue already: serve it without a snapshot, or take another directory"
            )
        directory = None if self._journal is None else self._journal.directory
        with _no_collections(), Snapshot(path) as snapshot:
            self._service.resume(snapshot.records, time.monotonic())
            places = {number: snapshot.places[number] for number in store.state.extents}
            spills = {places[number][0]: spill_directory_of(store.state, number) for number in places}

            def make(file: str) -> tuple[Segment, str | None]:
                segment, own = source_of(directory, spills[file]).create(snapshot.nbytes(file))
                snapshot.read(file, 0, segment.map(is_shared=True))
                return segment, own

            self._table.restore(places, max(snapshot.places, default=0), make)
            store.adopt()
            if self._journal is not None:
                self._journal.rewrite(self.records())

    def records(self) -> Iterator[Record]:
        """Records that make all there is."""
        yield from dump(self._service.store.state)
        yield from self._table.records()


@contextmanager
def _no_collections() -> Generator[None]:
    """Have Python not look for garbage: among a hundred thousand rows that come to stay, it takes half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
