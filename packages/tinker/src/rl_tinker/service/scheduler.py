"""Scheduler: runs each model's operations in order, and shares the training processes fairly between tenants.

An operation is pending in the journal before the client knows its id. Its outcome, the model's new state and the number
of the next operation are committed together before the client sees the outcome, so that a server which is killed at any
moment continues where the journal ends. A model that the training processes lost is restored from its durable state;
gradients that were added up since its last optimizer step are computed again from the journaled requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from rl_tinker import journal as db
from rl_tinker.errors import JournalError, RanksLostError, RequestError
from rl_tinker.service.model_operations import ModelOperations, failure
from rl_tinker.types import Checkpoint, Kind, Model, Operation, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_tinker.base import TrainingGroup
    from rl_tinker.service.store import Store

TURN_TOKENS = 65536
"""Tokens of one pass, after which other tenants have their turn; one larger request runs alone."""
OTHER_COST = 2048
"""Share of the training processes that other operations count for, in tokens."""
MAX_ATTEMPTS = 3
"""Times that the training processes may be lost while an operation runs before it counts as the cause, and fails. From
the second attempt on it runs alone."""
GAP_S = 600.0
"""Seconds that operations wait for one with a lower number that has not arrived."""
RETRY_S = (0.0, 0.5, 2.0, 10.0, 30.0)
"""Seconds before the training processes are started again, by the number of losses in a row."""
_CANCELLED = -1
_PASSES = (Kind.FORWARD, Kind.FORWARD_BACKWARD)

_log = logging.getLogger(__name__)


class Scheduler:
    """Queue of the operations of all models.

    Args:
        store: Records; operations that are pending there are queued again.
        group: Training processes.
        max_adapters: Most models in their memory.
    """

    def __init__(self, store: Store, group: TrainingGroup, *, max_adapters: int) -> None:
        self._store, self._group = store, group
        self._max_adapters = max_adapters
        self._work = ModelOperations(store, group, max_adapters=max_adapters)
        self._queues: dict[str, dict[int, Operation]] = {}
        """Operations that wait, by model and number."""
        self._served: dict[str, float] = {}
        """Tokens that each tenant has been served, or would have been since it came back."""
        # The former server may have been killed between the end of a session and that of its models.
        live = {each.session for each in store.models.values() if not each.is_unloaded}
        self._ended_sessions = [each.id for each in store.sessions.values() if each.finished and each.id in live]
        self._checks_gaps = False
        self._failures = 0
        """Losses of the training processes in a row."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.tokens_served = 0
        """Tokens of rows since the start."""
        for operation in store.operations.values():
            if operation.status == Status.PENDING:
                self._queues.setdefault(operation.model, {})[operation.seq] = operation

    @property
    def num_waiting(self) -> int:
        """Operations that wait or run."""
        return sum(map(len, self._queues.values()))

    def start(self) -> None:
        """Start to run operations."""
        self._task = asyncio.create_task(self._run(), name="rl-tinker-scheduler")

    async def stop(self) -> None:
        """Stop after the current command. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def submit(self, operation: Operation, *records: db.Record) -> Operation:
        """Accept an operation; returns the one of the same id if there is one, as after a client's retry.

        Raises:
            JournalError: it is not accepted.
        """
        if (known := self._store.operations.get(operation.id)) is not None:
            return known
        model = self._store.models.get(operation.model) or next(each for each in records if isinstance(each, Model))
        if operation.seq < model.next_seq:
            raise RequestError(
                f"{operation.model} has finished operation {operation.seq}, and its result is no longer there"
            )
        await self._store.journal.write(db.accept(operation), *map(db.put, records))
        if (known := self._store.operations.get(operation.id)) is not None:  # sent twice at the same time
            return known
        self._join_queue(operation.tenant)
        self._store.add(operation)
        self._store.apply(records)
        self._queues.setdefault(operation.model, {})[operation.seq] = operation
        self._wake.set()
        return operation

    def _join_queue(self, tenant: str) -> None:
        """A tenant that had nothing to run gets no credit for that time."""
        if not self._store.pending[tenant]:
            others = [served for name, served in self._served.items() if self._store.pending[name]]
            self._served[tenant] = max(self._served.get(tenant, 0.0), min(others, default=0.0))

    def cancel(self, operation: Operation) -> None:
        """Fail an operation that has not begun, in its turn; one that runs or has ended is left alone."""
        if operation.status == Status.PENDING:
            operation.attempts = _CANCELLED

    def unload(self, session_id: str) -> None:
        """Have the models of a session that ended freed, between two commands; their operations that wait fail."""
        self._ended_sessions.append(session_id)
        self._wake.set()

    def check_gaps(self) -> None:
        """Have operations failed that have waited too long for one that never arrived, between two commands."""
        self._checks_gaps = True
        self._wake.set()

    async def _do_chores(self) -> None:
        while self._ended_sessions:
            session_id = self._ended_sessions.pop()
            for model in [each for each in self._store.models.values() if each.session == session_id]:
                unloaded = msgspec.structs.replace(model, is_unloaded=True, state="")
                await self._store.journal.write(db.put(unloaded), db.forget_bodies(model.id, 2**62))
                self._store.forget_gradient(model)
                self._store.apply([unloaded])
                await self._store.remove_state(model.state)
                await self._store.remove_ephemeral(model)
                await self._fail_waiting(model.id, "the session has ended")
        if self._checks_gaps:
            self._checks_gaps, now = False, time.time()
            for model_id, queue in list(self._queues.items()):
                missing = self._store.models[model_id].next_seq
                if queue and missing not in queue and now - min(each.created for each in queue.values()) > GAP_S:
                    reason = f"operation {missing} of {model_id} did not arrive within {GAP_S:.0f} s"
                    await self._fail_waiting(model_id, reason)

    async def _fail_waiting(self, model_id: str, reason: str) -> None:
        for operation in sorted(self._queues.get(model_id, {}).values(), key=lambda each: each.seq):
            await self._finish(operation, self._store.models[model_id], failure(reason, is_user=True))

    def next_batch(self) -> list[Operation]:
        """Operations that run next: one, or passes of several models that the processes can run together."""
        heads = [
            queue[seq]
            for model_id, queue in self._queues.items()
            if (seq := self._store.models[model_id].next_seq) in queue
        ]
        served = {each.tenant: self._served.setdefault(each.tenant, 0.0) for each in heads}
        batch: list[Operation] = []
        tokens = 0
        while heads:
            best = min(heads, key=lambda each: (served[each.tenant], each.created))
            heads.remove(best)
            is_full = tokens + best.tokens > TURN_TOKENS or len(batch) == self._max_adapters
            if batch and (is_full or best.kind != batch[0].kind or best.attempts):
                continue
            batch.append(best)
            tokens += best.tokens
            served[best.tenant] += best.tokens or OTHER_COST
            if best.kind not in _PASSES or best.attempts:
                break
        return batch

    async def _run(self) -> None:
        while True:
            try:
                await self._turn()
            except JournalError:  # nothing was acknowledged: what ran is run again from the durable state
                _log.exception("the journal cannot be written")
                self._work.forget_all()
                await asyncio.sleep(RETRY_S[-2])
            except Exception:  # noqa: BLE001 - logged, and the server goes on
                _log.exception("an error of this program")
                await asyncio.sleep(RETRY_S[-2])

    async def _turn(self) -> None:
        """Run the next batch, or wait for one."""
        batch: list[Operation] = []
        try:
            await self._do_chores()
            waiting = self.next_batch()
            if not waiting:
                self._wake.clear()
                await self._wake.wait()
                return
            await self._group.start()  # processes that end while they start are not the fault of an operation
            batch = waiting
            await self._run_batch(batch)
            self._failures = 0
        except RanksLostError as error:
            _log.warning("training processes lost: %s", error)
            await self._give_up(batch, error)
            await asyncio.sleep(RETRY_S[min(self._failures, len(RETRY_S) - 1)])
            self._failures += 1
        except JournalError:
            raise
        except Exception:
            if not batch:
                raise
            _log.exception("an error of this program; the operation fails")
            for operation in batch:
                self._work.forget(operation.model)
                if self._store.operations[operation.id].status == Status.PENDING:
                    outcome = failure("an error of the server; its log has it", is_user=False)
                    await self._finish(operation, self._store.models[operation.model], outcome)

    async def _run_batch(self, batch: Sequence[Operation]) -> None:
        if batch[0].attempts == _CANCELLED:
            outcomes: list[dict[str, Any]] = [failure("cancelled", is_user=True)]
        elif batch[0].kind in _PASSES:
            outcomes = await self._work.passes(batch)
        else:
            outcomes = [await self._work.run(batch[0])]
        for operation, outcome in zip(batch, outcomes, strict=True):
            self._served[operation.tenant] += operation.tokens or OTHER_COST
            self.tokens_served += operation.tokens
            await self._finish(operation, self._store.models[operation.model], outcome)

    async def _give_up(self, batch: Sequence[Operation], error: RanksLostError) -> None:
        for operation in batch:
            if operation.attempts != _CANCELLED:
                operation.attempts += 1
            if operation.attempts >= MAX_ATTEMPTS and len(batch) == 1:
                outcome = failure(f"the training processes were lost {MAX_ATTEMPTS} times: {error}", is_user=False)
                await self._finish(operation, self._store.models[operation.model], outcome)

    async def _finish(self, operation: Operation, model: Model, outcome: dict[str, Any]) -> None:
        """Commit the outcome of an operation together with what it changes, then announce it."""
        ended = _ended(operation, outcome)
        changed = msgspec.structs.replace(
            model,
            last_request=ended.finished,
            next_seq=max(model.next_seq, operation.seq + 1),
            state=outcome.get("state", model.state),
            step=model.step + outcome.get("steps", 0),
        )
        records = [*outcome.get("records", ()), changed]
        statements: list[db.Statement] = [db.finish(ended), *map(db.put, records), *outcome.get("statements", ())]
        if outcome.get("drops_gradient"):
            statements.append(db.forget_bodies(model.id, operation.seq))
        await self._store.journal.write(*statements)
        # Nothing is visible before it is on disk.
        if outcome.get("drops_gradient"):
            self._store.forget_gradient(model)
        paths = [each.id for each in records if isinstance(each, Checkpoint)]
        replaced = [self._store.checkpoints[path] for path in paths if path in self._store.checkpoints]
        self._store.apply(records)
        self._store.end(ended)
        queue = self._queues[model.id]
        del queue[operation.seq]
        if not queue:  # a model of an empty queue may be deleted
            del self._queues[model.id]
        if changed.state != model.state:
            await self._store.remove_state(model.state)
        await self._store.remove_folders(replaced)


def _ended(operation: Operation, outcome: dict[str, Any]) -> Operation:
    """The operation with its outcome; its body stays only if a restored model needs it for its gradient."""
    failed = "error" in outcome
    error = {"error": outcome.get("error"), "category": outcome.get("category")}
    keeps_body = operation.kind == Kind.FORWARD_BACKWARD and not failed
    return msgspec.structs.replace(
        operation,
        finished=time.time(),
        status=Status.FAILED if failed else Status.DONE,
        result=msgspec.json.encode(error) if failed else outcome["result"],
        content_type=outcome.get("content_type", "application/json"),
        body=operation.body if keeps_body else b"",
    )
