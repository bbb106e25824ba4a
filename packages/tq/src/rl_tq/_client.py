"""What every storage's client does: columns into an extent, references out, and extents into a batch.

A storage adds three things: how a request reaches the server, where the memory of a new extent comes from, and how the
extents of an answer are opened.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from rl_tq._columns import check_json, parse_columns
from rl_tq._extent import Layout, plan_extent
from rl_tq._gather import Opened, gather
from rl_tq._schema import ColumnSchema
from rl_tq.base import Sampler, TransferQueue
from rl_tq.errors import MissingDataError, SchemaError
from rl_tq.types import BatchMeta, RowMeta

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tensordict import TensorDict

    from rl_tq._service import Message


class QueueClient(TransferQueue):
    """A `TransferQueue` over `_call`, `_store_extent` and `_locate`."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        """Deadline of every call that is not given its own, seconds."""

    @abstractmethod
    def _call(self, request: Message, timeout_s: float) -> Message:
        """Have a request answered, or raise the error it is answered with."""

    @abstractmethod
    def _store_extent(self, layout: Layout, request: Message) -> Message:
        """Write an extent where the server can hand it out from, and have the put that publishes it answered."""

    @abstractmethod
    def _locate(self, request: Message) -> tuple[Message, Opened]:
        """Have a locate answered and its extents opened; they stay readable whatever is cleared meanwhile."""

    def put(
        self,
        data: TensorDict | Mapping[str, Any],
        *,
        partition: str,
        sample_ids: Sequence[str] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> BatchMeta:
        """See `TransferQueue.put`."""
        columns = parse_columns(data)
        layout = plan_extent(columns)
        request = {
            "op": "put",
            "partition": partition,
            "num_rows": next(iter(columns.values())).num_rows,
            "schema": {name: column.schema.to_json() for name, column in columns.items()},
            "nbytes": layout.nbytes,
            "sample_ids": None if sample_ids is None else _checked_ids(sample_ids),
            "tags": None if tags is None else _checked_tags(tags),
        }
        return _batch_meta(self._store_extent(layout, request), partition, tuple(columns))

    def get(self, meta: BatchMeta, columns: Sequence[str] | None = None) -> TensorDict:
        """See `TransferQueue.get`."""
        names = meta.columns if columns is None else tuple(columns)
        if not len(meta) or not names:
            raise MissingDataError(
                f"a get of {len(meta)} rows and columns {list(names)} has nothing to fetch: both must be at least one"
            )
        reply, opened = self._locate({"op": "locate", "columns": names, **_rows_of(meta)})
        located = {name: (ColumnSchema.from_json(schema), runs) for name, (schema, runs) in reply["columns"].items()}
        return gather(located, opened, len(meta))

    def get_meta(
        self,
        *,
        partition: str,
        columns: Sequence[str],
        batch_size: int,
        task: str,
        sampler: Sampler | None = None,
        timeout_s: float | None = None,
    ) -> BatchMeta:
        """See `TransferQueue.get_meta`."""
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: claim 1 row or more")
        limit = self.timeout_s if timeout_s is None else timeout_s
        target: Message = {"partition": partition, "columns": list(columns), "task": task}
        if sampler is None:
            reply = self._wait(target, batch_size, limit, is_claim=True)
        else:
            reply = self._sample(target, batch_size, limit, sampler)
        return _batch_meta(reply, partition, tuple(columns))

    def clear(self, meta_or_partition: BatchMeta | str) -> None:
        """See `TransferQueue.clear`."""
        if isinstance(meta_or_partition, str):
            self._call({"op": "clear", "is_whole": True, "partition": meta_or_partition}, self.timeout_s)
        elif len(meta_or_partition):
            self._call({"op": "clear", "is_whole": False, **_rows_of(meta_or_partition)}, self.timeout_s)

    def stats(self) -> dict[str, Any]:
        """See `TransferQueue.stats`."""
        return self._call({"op": "stats"}, self.timeout_s)

    def _wait(self, target: Message, batch_size: int, limit: float, *, is_claim: bool, after: int = -1) -> Message:
        request = {
            "op": "wait",
            **target,
            "batch_size": batch_size,
            "timeout_s": limit,
            "is_claim": is_claim,
            "after": after,
        }
        return self._call(request, limit)

    def _sample(self, target: Message, batch_size: int, limit: float, sampler: Sampler) -> Message:
        """Let the sampler choose among the ready rows here and claim its choice; begin again if another was faster."""
        deadline = time.monotonic() + limit
        after = -1
        while True:
            left = max(0.0, deadline - time.monotonic())
            ready = self._wait(target, batch_size, left, is_claim=False, after=after)
            names = ready["sample_ids"]
            tags = ready["tags"] or [{} for _ in names]
            rows = [RowMeta(sample_id=name, tags=tag) for name, tag in zip(names, tags, strict=True)]
            choice = sampler(rows, batch_size)
            after = ready["version"]
            if choice is None:
                continue
            chosen = _checked_choice(choice, len(rows), batch_size)
            request = {"op": "claim_rows", **target, "rows": [ready["rows"][i] for i in chosen]}
            reply = self._call(request, self.timeout_s)
            if "is_conflict" not in reply:
                return reply
            after = -1


def _rows_of(meta: BatchMeta) -> Message:
    return {
        "partition": meta.partition,
        "generation": meta.generation,
        "rows": meta.rows,
        # Given by number, rows need their ids only in messages of errors.
        "sample_ids": meta.sample_ids,
    }


def _batch_meta(reply: Message, partition: str, columns: tuple[str, ...]) -> BatchMeta:
    return BatchMeta(
        partition=partition,
        sample_ids=tuple(reply["sample_ids"]),
        columns=tuple(dict.fromkeys(columns)),
        tags=tuple(reply["tags"]),
        rows=tuple(reply["rows"]),
        generation=reply["generation"],
    )


def _checked_ids(sample_ids: Sequence[str]) -> list[str]:
    ids = list(sample_ids)
    # Callers may be untyped.
    wrong = [i for i in ids if not isinstance(i, str)]  # pyright: ignore[reportUnnecessaryIsInstance]
    if wrong or isinstance(sample_ids, str):
        raise SchemaError(f"sample_ids is a list of strings, not {wrong[0] if wrong else sample_ids!r}")
    return ids


def _checked_tags(tags: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    copies = [dict(tag) for tag in tags]
    try:
        check_json(copies)
    except TypeError as error:
        raise SchemaError(f"tags must be mappings of JSON values: {error}") from error
    return copies


def _checked_choice(choice: Sequence[int], num_ready: int, batch_size: int) -> list[int]:
    chosen = [int(i) for i in choice]
    if len(set(chosen)) != batch_size or len(chosen) != batch_size or not all(0 <= i < num_ready for i in chosen):
        raise ValueError(
            f"the sampler chose {chosen[:8]}: it must return {batch_size} different positions below {num_ready}, "
            "or None to wait"
        )
    return chosen
