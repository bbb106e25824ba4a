"""`shm://NAME`: a queue for the processes of one host and user: tensors in shared memory, references on a socket."""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from typing import TYPE_CHECKING

from rl_tq.client.shm import ShmQueue
from rl_tq.columns.schema import ColumnSchema
from rl_tq.errors import MissingDataError, ServerLostError, StaleReferenceError, TransferQueueError
from rl_tq.protocol.sockets import socket_name
from rl_tq.server.compaction import REST_S, compacted_extent
from rl_tq.server.unix import ControlServer

if TYPE_CHECKING:
    from pathlib import Path

    from rl_tq.durability.journal import Journal
    from rl_tq.protocol.service import Message


def serve(name: str, *, timeout_s: float, snapshot: Path | None = None) -> ShmQueue:
    """See `rl_tq.serve`."""
    name = name or uuid.uuid4().hex[:12]
    address = f"shm://{name}"
    host = Host(address, socket_name(address), snapshot=snapshot)
    try:
        return ShmQueue(address, socket_name(address), timeout_s=timeout_s, host=host)
    except BaseException:
        host.close()
        raise


def connect(name: str, *, timeout_s: float) -> ShmQueue:
    """See `rl_tq.connect`."""
    address = f"shm://{name}"
    return ShmQueue(address, socket_name(address), timeout_s=timeout_s)


_PAUSE_S = 0.05
_LOG = logging.getLogger(__name__)


class Host:
    """The control server and the compactor of one queue."""

    def __init__(
        self, address: str, abstract: str, journal: Journal | None = None, snapshot: Path | None = None
    ) -> None:
        self._server = ControlServer(address, abstract, journal, snapshot)
        self._address = address
        self._abstract = abstract
        self._is_closed = threading.Event()
        self._compactor_thread = threading.Thread(target=self._run, name=f"rl-tq-compactor-{address}", daemon=True)
        self._compactor_thread.start()

    def close(self) -> None:
        """End the queue. Idempotent."""
        self._is_closed.set()
        self._server.has_waste.set()
        self._compactor_thread.join()
        self._server.close()

    def _run(self) -> None:
        """Compact what is worth it until the queue is closed; a connection that is lost is made again."""
        has_waste = self._server.has_waste
        with contextlib.ExitStack() as stack:
            compactor: Compactor | None = None
            while has_waste.wait() and not self._is_closed.wait(_PAUSE_S):
                has_waste.clear()
                try:
                    if compactor is None:
                        compactor = stack.enter_context(Compactor(self._address, self._abstract, timeout_s=60.0))
                    while compactor.step() and not self._is_closed.is_set():
                        pass
                    if compactor.is_more_to_come and not self._is_closed.wait(REST_S):
                        has_waste.set()
                except ServerLostError as error:
                    if compactor is None:
                        return  # nobody serves any more
                    _LOG.warning("the compactor of %s begins anew: %s", self._address, error)
                    compactor = None
                    has_waste.set()
                except (OSError, ValueError, TransferQueueError) as error:  # no memory or descriptor is left: for now
                    _LOG.warning("memory of cleared rows in %s was not compacted: %s", self._address, error)


class Compactor(ShmQueue):
    """A client that copies the rest of what was cleared together."""

    def __init__(self, address: str, socket_name: str, *, timeout_s: float) -> None:
        super().__init__(address, socket_name, timeout_s=timeout_s)
        self.is_more_to_come = False
        """Whether there are segments that may be worth it later."""
        self._session.send({"op": "compactor"})

    def step(self) -> bool:
        """Copy once, if that is worth it; returns whether there may be more to do."""
        reply = self._call({"op": "plan"}, self.timeout_s)
        self.is_more_to_come = reply["is_more_to_come"]
        plan = reply["plan"]
        if plan is None:
            return False
        rows = {"partition": plan["partition"], "generation": 0, "rows": plan["rows"], "sample_ids": ()}
        try:
            located, opened = self._locate({"op": "locate", "columns": plan["columns"], **rows}, is_copied=True)
        except (StaleReferenceError, MissingDataError):
            return True  # some or all of it was cleared meanwhile: plan again
        columns = {
            name: (ColumnSchema.from_json(schema), located["runs"][which])
            for name, (schema, which) in located["columns"].items()
        }
        layout = compacted_extent(columns, opened, len(plan["rows"]))
        is_gain = layout.nbytes < plan["nbytes"]
        if is_gain:
            move: Message = {"op": "move", "old": plan["old"], "rows": plan["rows"], "nbytes": layout.nbytes}
            self._store_in(plan["spill"], layout, move, self.timeout_s)
        else:
            self._call({"op": "keep", "old": plan["old"]}, self.timeout_s)
        return True
