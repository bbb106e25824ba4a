"""The requests that a queue's server answers, as JSON values in and out: one place for every storage.

The host says where an extent lies (`extent` in a put is its number for it) and delivers what was parked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from rl_tq import errors
from rl_tq._schema import ColumnSchema
from rl_tq._store import Batch, MetadataStore, Outcome, Waiter

if TYPE_CHECKING:
    from collections.abc import Callable

Message: TypeAlias = dict[str, Any]
"""One request or reply: JSON values only."""


class Service:
    """A metadata store that is spoken to in messages. One call at a time, as the store itself."""

    def __init__(self) -> None:
        self._store = MetadataStore()
        self._operations: dict[str, Callable[[Message], Message | None]] = {
            "put": self._put,
            "locate": self._locate,
            "wait": self._wait,
            "claim_rows": self._claim_rows,
            "clear": self._clear,
            "stats": lambda _: self._store.stats(),
        }

    def handle(self, request: Message) -> Message | None:
        """Answer a request. None: it is parked under `request["key"]`, and `drain` will have the answer.

        Raises:
            TransferQueueError: the store refused it.
        """
        return self._operations[request["op"]](request)

    def drain(self, now: float) -> tuple[list[tuple[Any, Message]], list[int]]:
        """(key, reply) of the parked requests that are answered or whose time is up, and the extents to free."""
        self._store.expire(now)
        settled, freed = self._store.drain()
        return [(waiter.key, _reply(outcome)) for waiter, outcome in settled], freed

    def next_deadline(self) -> float | None:
        """When `drain` must be called again at the latest."""
        return self._store.next_deadline()

    def withdraw(self, key: Any) -> None:
        """Forget a parked request."""
        self._store.withdraw(key)

    def _put(self, request: Message) -> Message:
        return _reply(
            self._store.publish(
                partition=request["partition"],
                num_rows=request["num_rows"],
                schema={name: ColumnSchema.from_json(value) for name, value in request["schema"].items()},
                extent=request["extent"],
                nbytes=request["nbytes"],
                sample_ids=request["sample_ids"],
                tags=request["tags"],
            )
        )

    def _locate(self, request: Message) -> Message:
        located = self._store.locate(columns=request["columns"], **_rows_of(request))
        columns = {name: [schema.to_json(), runs] for name, (schema, runs) in located.columns.items()}
        return {"columns": columns, "extents": sorted(located.extents)}

    def _wait(self, request: Message) -> Message | None:
        answer = self._store.wait(
            Waiter(
                key=request["key"],
                partition=request["partition"],
                columns=tuple(request["columns"]),
                task=request["task"],
                batch_size=request["batch_size"],
                deadline=request["deadline"],
                is_claim=request["is_claim"],
                after=request["after"],
            )
        )
        return None if answer is None else _reply(answer)

    def _claim_rows(self, request: Message) -> Message:
        batch = self._store.claim_rows(
            partition=request["partition"], columns=request["columns"], task=request["task"], rows=request["rows"]
        )
        return {"is_conflict": True} if batch is None else _reply(batch)

    def _clear(self, request: Message) -> Message:
        if request["is_whole"]:
            self._store.clear_partition(request["partition"])
        else:
            self._store.clear_rows(**_rows_of(request))
        return {}


def _rows_of(request: Message) -> Message:
    return {name: request[name] for name in ("partition", "generation", "rows", "sample_ids")}


def _reply(outcome: Outcome) -> Message:
    if not isinstance(outcome, Batch):
        return error_reply(outcome)
    rows = outcome.rows
    return {
        "generation": outcome.generation,
        "version": outcome.version,
        "rows": [row.number for row in rows],
        "sample_ids": [row.sample_id for row in rows],
        "tags": [row.tags for row in rows] if any(row.tags for row in rows) else [],
    }


def error_reply(error: Exception) -> Message:
    """What stands for an error in a reply."""
    return {"error": type(error).__name__, "message": str(error)}


def raise_error(reply: Message) -> None:
    """Raise the error that stands in a reply, if one does."""
    if "error" in reply:
        kind = getattr(errors, reply["error"], None)
        if kind is None:
            raise errors.TransferQueueError(f"the server failed with {reply['error']}: {reply['message']}")
        raise kind(reply["message"])
