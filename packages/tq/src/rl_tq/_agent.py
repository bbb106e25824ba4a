"""What runs in the process that serves a queue of this host: the control server, and the agent that compacts memory.

The agent is a client like others, in a thread of its own: it copies the rows that are left in segments that are mostly
cleared, and has the server refer to the copy. Readers keep what they look at; references find the rows by number.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

from rl_tq._compaction import REST_S
from rl_tq._rewrite import rewritten
from rl_tq._schema import ColumnSchema
from rl_tq._shm_client import ShmQueue
from rl_tq._shm_server import ControlServer
from rl_tq.errors import MissingDataError, ServerLostError, StaleReferenceError, TransferQueueError

if TYPE_CHECKING:
    from pathlib import Path

    from rl_tq._journal import Journal
    from rl_tq._service import Message

_PAUSE_S = 0.05
_LOG = logging.getLogger(__name__)


class Host:
    """The server and the agent of one queue."""

    def __init__(
        self, address: str, abstract: str, journal: Journal | None = None, snapshot: Path | None = None
    ) -> None:
        self._server = ControlServer(address, abstract, journal, snapshot)
        self._address = address
        self._abstract = abstract
        self._is_closed = threading.Event()
        self._agent = threading.Thread(target=self._run, name=f"rl-tq-agent-{address}", daemon=True)
        self._agent.start()

    def close(self) -> None:
        """End the queue. Idempotent."""
        self._is_closed.set()
        self._server.has_waste.set()
        self._agent.join()
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
                    _LOG.warning("the agent of %s begins anew: %s", self._address, error)
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
        self._session.send({"op": "agent"})

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
        layout = rewritten(columns, opened, len(plan["rows"]))
        is_gain = layout.nbytes < plan["nbytes"]
        if is_gain:
            move: Message = {"op": "move", "old": plan["old"], "rows": plan["rows"], "nbytes": layout.nbytes}
            self._store_in(plan["spill"], layout, move, self.timeout_s)
        else:
            self._call({"op": "keep", "old": plan["old"]}, self.timeout_s)
        return True
