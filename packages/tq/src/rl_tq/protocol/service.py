"""Service: the request handlers of a queue's server, with messages as plain values; the same for every storage.

The host supplies the extent number of a put, the caller and the time, and delivers replies of parked requests.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import msgspec

from rl_tq import errors
from rl_tq.columns.schema import read_schema
from rl_tq.metadata.requests import Admission, Batch, Claim, Outcome, Put
from rl_tq.metadata.rows import packed_locations, pieces_of
from rl_tq.metadata.state import dump
from rl_tq.metadata.store import MetadataStore
from rl_tq.policies import Fifo, policy_from_json
from rl_tq.protocol.codec import lengthen, shorten
from rl_tq.types import Credit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_tq.metadata.state import Record

Message: TypeAlias = dict[str, Any]
"""Request or reply: MessagePack values with string keys."""

_FIFO = Fifo()


class Caller(msgspec.Struct, frozen=True):
    """Caller of a request: pending reply, client and its description."""

    key: Any
    """The host's key for the reply, if the request is parked."""
    owner: Any
    """The client: its leases and credits end with it."""
    label: str
    """Description of the client, for messages."""


class Service:
    """Message interface of a metadata store. Not thread-safe, like the store."""

    def __init__(self, alias: Callable[[int], int], where: Callable[[int], Sequence[int] | None] | None = None) -> None:
        """Start with an empty store.

        `alias(extent)` gives the memory of an extent a second number, freed separately; `where(extent)` returns
        segment, offset, size, slot and generation, if clients can read extents without a request.
        """
        self.store = MetadataStore(alias)
        self.timers = self.store.timers
        """Timers; `drain` must be called by `timers.earliest`."""
        self.has_news = self.store.has_news
        """Whether `drain(now)` has anything to do or return."""
        self._where = where
        self._most = self.store.state.num_rows
        """Most row numbers that a client may name: the number of rows."""

    def resume(self, records: Sequence[Record], now: float) -> None:
        """Restore the state from records. Call `store.adopt` once its extents are restored."""
        self.store.now = now
        self.store.state.replay(records)

    def handle(self, request: Message, caller: Caller, now: float) -> Message | None:
        """Answer a request. None: it is parked under the caller's key, and `drain` will have the answer.

        Raises:
            TransferQueueError, ValueError: the store refused it.
        """
        self.store.now = now
        operation = self.operations.get(request["op"])
        if operation is None:
            raise errors.TransferQueueError(f"there is no operation {request['op']!r}; client and server differ")
        return operation(self, request, caller)

    def drain(self, now: float) -> tuple[list[tuple[Any, Message]], list[int]]:
        """(key, reply) of the parked requests that are answered or whose time is up, and the extents to free."""
        self.store.now = now
        self.store.expire()
        settled, freed = self.store.drain()
        return [(request.key, self._reply(outcome)) for request, outcome in settled], freed

    # Rows

    def _put(self, request: Message, caller: Caller) -> Message | None:
        get = request.get
        put = Put(
            key=caller.key,
            owner=caller.owner,
            label=caller.label,
            partition=request["partition"],
            deadline=self.store.now + request["timeout_s"],
            num_rows=request["num_rows"],
            schema=read_schema(request["schema"]),
            extent=request["extent"],
            nbytes=request["nbytes"],
            sample_ids=get("sample_ids"),
            tags=get("tags"),
            credits=get("credits", ()),
            shared=get("shared", ()),
        )
        if "rows" in request:
            put.rows, put.generation = lengthen(request["rows"], self._most), request["generation"]
            put.task, put.leases = request["task"], lengthen(request["leases"], self._most)
        answer = self.store.put(put)
        return None if answer is None else self._reply(answer)

    def _locate(self, request: Message, _: Caller) -> Message:
        located = self.store.locate(columns=request["columns"], **self._rows_of(request))
        columns = {name: [schema.to_json(), which] for name, (schema, which) in located.columns.items()}
        return {"columns": columns, "runs": located.runs, "extents": sorted(located.extents)}

    def _snapshot(self, _: Message, __: Caller) -> Message:
        """Records and extents of the whole state."""
        return {"records": list(dump(self.store.state)), "extents": sorted(self.store.state.extents)}

    def _clear(self, request: Message, _: Caller) -> Message:
        if request["is_whole"]:
            self.store.clear_partition(request["partition"])
        else:
            self.store.clear_rows(**self._rows_of(request))
        return {}

    # Claims

    def _wait(self, request: Message, caller: Caller) -> Message | None:
        answer = self.store.claim(self._claim(request, caller))
        return None if answer is None else self._reply(answer)

    def _claim_rows(self, request: Message, caller: Caller) -> Message:
        batch = self.store.claim_rows(self._claim(request, caller), lengthen(request["rows"], self._most))
        return {"is_conflict": True} if batch is None else self._reply(batch)

    def _claim(self, request: Message, caller: Caller) -> Claim:
        policy = request.get("policy")
        return Claim(
            key=caller.key,
            owner=caller.owner,
            label=caller.label,
            partition=request["partition"],
            deadline=self.store.now + request["timeout_s"],
            columns=tuple(request["columns"]),
            task=request["task"],
            batch_size=request["batch_size"],
            is_claim=request.get("is_claim", True),
            after=request.get("after", -1),
            policy=_FIFO if policy is None else policy_from_json(policy),
            lease_s=request.get("lease_s"),
        )

    def _ack(self, request: Message, _: Caller) -> Message:
        self.store.ack(**self._leased(request), step=request["step"])
        return {}

    def _nack(self, request: Message, _: Caller) -> Message:
        self.store.nack(**self._leased(request), reason=request["reason"])
        return {}

    def _extend(self, request: Message, _: Caller) -> Message:
        self.store.extend(**self._leased(request), lease_s=request["lease_s"])
        return {}

    def _restore(self, request: Message, _: Caller) -> Message:
        return asdict(self.store.restore(request["partition"], request["step"], request["task"]))

    def _dead_letters(self, request: Message, _: Caller) -> Message:
        batch, reasons = self.store.dead_letters(request["partition"], request["task"])
        if batch is None:
            return {"rows": [], "sample_ids": None, "tags": [], "generation": 0, "columns": []}
        columns = sorted(frozenset.intersection(*(row.columns for row in batch.rows))) if batch.rows else []
        tags = [{**row.tags, "dead_letter": reasons[row.number]} for row in batch.rows]
        return {**self._reply(batch), "tags": tags, "columns": columns}

    # Limits

    def _admit(self, request: Message, caller: Caller) -> Message | None:
        answer = self.store.admit(
            Admission(
                key=caller.key,
                owner=caller.owner,
                label=caller.label,
                partition=request["partition"],
                deadline=self.store.now + request["timeout_s"],
                num_rows=request["num_rows"],
                num_bytes=request["num_bytes"],
                group_id=request.get("group_id"),
            )
        )
        return None if answer is None else self._reply(answer)

    def _release(self, request: Message, _: Caller) -> Message:
        self.store.release(request["credit"])
        return {}

    def _configure(self, request: Message, _: Caller) -> Message:
        self.store.configure(request["partition"], request["options"])
        return {}

    def _advance(self, request: Message, _: Caller) -> Message:
        return asdict(self.store.advance(request["partition"], request["weight_version"]))

    # Looking

    def _explain(self, request: Message, caller: Caller) -> Message:
        return {"text": self.store.explain(self._claim(request, caller))}

    def _stats(self, _: Message, __: Caller) -> Message:
        return self.store.stats()

    def _rows_of(self, request: Message) -> Message:
        return {
            "partition": request["partition"],
            "generation": request["generation"],
            "rows": lengthen(request["rows"], self._most),
            "sample_ids": request["sample_ids"],
        }

    def _leased(self, request: Message) -> Message:
        return {**self._rows_of(request), "task": request["task"], "leases": lengthen(request["leases"], self._most)}

    def _reply(self, outcome: Outcome) -> Message:
        if not isinstance(outcome, Batch):
            return asdict(outcome) if isinstance(outcome, Credit) else error_reply(outcome)
        reply: Message = {
            "generation": outcome.generation,
            "version": outcome.version,
            "lease": outcome.lease,
            "rows": shorten(outcome.numbers),
            "sample_ids": None,
            "tags": [],
        }
        if not outcome.is_bare:
            rows = outcome.rows
            if any(row.name is not None for row in rows):
                reply["sample_ids"] = [row.sample_id for row in rows]
            if any(row.tags for row in rows):
                reply["tags"] = [row.tags or {} for row in rows]
        if self._where is not None and outcome.columns:
            pieces = pieces_of(outcome.rows, outcome.numbers, outcome.columns)
            if pieces is not None:  # not too many
                home = self.store.state.partitions[outcome.partition]
                if hints := packed_locations(home, pieces, outcome.columns, self._where):
                    reply["hints"] = hints
        return reply

    operations: ClassVar[dict[str, Callable[[Service, Message, Caller], Message | None]]] = {
        "put": _put, "locate": _locate, "snapshot": _snapshot, "wait": _wait,
        "claim_rows": _claim_rows, "clear": _clear, "ack": _ack, "nack": _nack,
        "extend": _extend, "restore": _restore, "dead_letters": _dead_letters,
        "admit": _admit, "release": _release, "configure": _configure,
        "advance": _advance, "explain": _explain, "stats": _stats,
    }  # fmt: skip
    """Request handlers by operation name: a new request is one entry."""


def error_reply(error: Exception) -> Message:
    """Reply that reports an error."""
    return {"error": type(error).__name__, "message": str(error)}


def raise_error(reply: Message) -> None:
    """Raise the error that a reply reports, if any."""
    if "error" in reply:
        name = reply["error"]
        kind = getattr(errors, name, None) or {"ValueError": ValueError, "MemoryError": MemoryError}.get(name)
        if kind is None:
            raise errors.TransferQueueError(f"the server failed with {name}: {reply['message']}")
        raise kind(reply["message"])
