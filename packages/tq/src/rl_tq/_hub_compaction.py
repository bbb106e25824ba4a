"""Compaction where the serving process holds the values: extents most of whose rows were cleared are written anew.

What a reader has located stays readable: it holds the memory, whatever extent its rows lie in by now.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import torch

from rl_tq._compaction import REST_S, is_worth_it
from rl_tq._rewrite import rewritten
from rl_tq.errors import TransferQueueError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rl_tq._hub import Hub
    from rl_tq._requests import Located
    from rl_tq._store import MetadataStore

_LOG = logging.getLogger(__name__)


class HubCompactor:
    """A thread beside a hub, from the first row on that is cleared before its neighbours."""

    def __init__(self, hub: Hub, store: MetadataStore) -> None:
        self._hub = hub
        self._store = store
        self._since: dict[int, float] = {}
        """Extents of which a part was cleared, and when last. Like the store, only for who holds the hub's lock."""
        self._wake = threading.Event()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def note(self, extents: Iterable[int], now: float) -> None:
        """A part of these was cleared. Call it with the hub's lock held."""
        self._since.update(dict.fromkeys(extents, now))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"rl-tq-agent-{self._hub.address}", daemon=True)
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
                _LOG.warning("memory of cleared rows in %s was not compacted: %s", self._hub.address, error)
            with self._hub.lock:
                is_more_to_come = bool(self._since)
            if is_more_to_come and not self._is_closed.wait(REST_S):
                self._wake.set()

    def _step(self) -> bool:
        """Write one extent anew, if that is worth it; returns whether there may be more to do."""
        with self._hub.lock:
            extent = self._choose(time.monotonic())
            if extent is None:
                return False
            nbytes = self._store.state.extents[extent].nbytes
            rows, located = self._rest(extent)
            opened = {number: self._hub.extents[number] for number in located.extents}
        columns = {name: (schema, located.runs[which]) for name, (schema, which) in located.columns.items()}
        layout = rewritten(columns, opened, len(rows))
        if layout.nbytes < nbytes:
            memory = torch.empty(layout.nbytes, dtype=torch.uint8)
            layout.write(memory)
            self._hub.replace(extent, rows, memory)
        return True

    def _choose(self, now: float) -> int | None:
        for number, since in list(self._since.items()):
            extent = self._store.state.extents.get(number)
            verdict = False
            # One without bytes stands for a part of another, which then cannot be let go of either.
            if extent is not None and extent.nbytes and not extent.is_spilled and number not in self._hub.aliased:
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
