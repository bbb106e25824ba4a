"""Base classes of clients: put encodes columns into an extent, get assembles a batch from extents.

A storage adds three things: how a request reaches the server, where the memory of a new extent comes from, and how the
extents of a reply are opened.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rl_tq.base import Sampler, TransferQueue
from rl_tq.client.session import Session
from rl_tq.columns.encode import borrowed_columns, check_tags, encode_columns
from rl_tq.columns.extent import Layout, plan_extent
from rl_tq.columns.gather import Collected, assemble, bounds_of, gather
from rl_tq.columns.locations import locations_of
from rl_tq.columns.output import Output
from rl_tq.columns.schema import ColumnKind, ColumnSchema, pack_schema
from rl_tq.durability import write_snapshot
from rl_tq.errors import LeaseLostError, MissingDataError, SchemaError, StaleReferenceError
from rl_tq.metadata.checks import check_seconds
from rl_tq.protocol.codec import lengthen, shorten
from rl_tq.protocol.framing import ALIGNMENT, Payload
from rl_tq.types import (
    AdvanceReport,
    BatchMeta,
    Buffer,
    Credit,
    PartitionOptions,
    Policy,
    RestoreReport,
    RowMeta,
    batch_meta,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tensordict import TensorDict

    from rl_tq.client.session import Connection
    from rl_tq.columns.extent import LocatedColumns, Opened
    from rl_tq.columns.output import Bounds
    from rl_tq.protocol.service import Message

Answer = TypeVar("Answer")


class QueueClient(TransferQueue):
    """Client base class: a `TransferQueue` over `_call`, `_store_extent` and `_locate`."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        """Default deadline of calls, seconds."""
        self.host: Any = None
        """The `QueueHost` that this client closes, if `serve` made it; else None."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """See `TransferQueue.addresses`."""
        return (self.address,) if self.host is None else tuple(self.host.addresses)

    @abstractmethod
    def _call(self, request: Message, timeout_s: float) -> Message:
        """Send a request and return the reply, or raise the error in it."""

    @abstractmethod
    def _store_extent(self, layout: Layout, request: Message, timeout_s: float) -> Message:
        """Write an extent to memory that the server can hand out, send the put request, and return the reply."""

    @abstractmethod
    def _locate(self, request: Message, *, is_copied: bool) -> tuple[Message, Opened]:
        """Send a locate request; return the reply and its opened extents, which stay readable whatever is cleared.

        `is_copied`: values will be copied out, and no view of the extents is returned to the caller.
        """

    def put(
        self,
        data: TensorDict | Mapping[str, Any],
        *,
        partition: str,
        sample_ids: Sequence[str] | BatchMeta | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        credit: Credit | Sequence[Credit] | None = None,
        timeout_s: float | None = None,
    ) -> BatchMeta:
        """See `TransferQueue.put`."""
        row_tags = sample_ids.tags if tags is None and isinstance(sample_ids, BatchMeta) else tags
        borrowed = borrowed_columns(data)
        columns = encode_columns(data, row_tags, borrowed)
        layout = plan_extent(columns)
        limit = _limit(timeout_s, self.timeout_s)
        request: Message = {
            "op": "put",
            "partition": partition,
            "num_rows": next(iter(columns.values())).num_rows,
            "schema": pack_schema([(name, column.schema) for name, column in columns.items()]),
            "nbytes": layout.nbytes,
            "timeout_s": limit,
        }
        if isinstance(sample_ids, BatchMeta):
            request |= _target_of(sample_ids, partition, request["num_rows"])
        elif sample_ids is not None:
            request["sample_ids"] = _checked_ids(sample_ids)
        if tags is not None:
            request["tags"] = _checked_tags(tags)
        if credit is not None:
            request["credits"] = [each.number for each in ([credit] if isinstance(credit, Credit) else credit)]
        if borrowed:
            request["shared"] = borrowed
        return _batch_meta(self._store_extent(layout, request, limit), partition, (*columns, *borrowed))

    def get(
        self,
        meta: BatchMeta,
        columns: Sequence[str] | None = None,
        *,
        out: torch.Tensor | Buffer | None = None,
        device: torch.device | str | None = None,
    ) -> TensorDict:
        """See `TransferQueue.get`."""
        names = meta.columns if columns is None else tuple(columns)
        if not len(meta) or not names:
            raise MissingDataError(
                f"a get of {len(meta)} rows and columns {list(names)} has nothing to fetch: both must be at least one"
            )
        output = Output(out, device)
        if meta.places and (found := self._find_here(meta, names, is_copied=output.is_given)) is not None:
            return gather(*found, len(meta), output)
        return _about(meta, lambda request: self._fetch({"columns": names, **request}, len(meta), output))

    def _find_here(
        self, meta: BatchMeta, columns: Sequence[str], *, is_copied: bool
    ) -> tuple[LocatedColumns, Opened] | None:
        """Locations of columns and their opened extents, without a request to the server; None if one is needed."""
        return None

    def _say(self, meta: BatchMeta, request: Message) -> None:
        _about(meta, lambda rows: self._call({**request, **rows}, self.timeout_s))

    def _fetch(self, request: Message, num_rows: int, output: Output) -> TensorDict:
        """Fetch the values of rows."""
        reply, opened = self._locate({"op": "locate", **request}, is_copied=output.is_given)
        located = {
            name: (ColumnSchema.from_json(schema), reply["runs"][which])
            for name, (schema, which) in reply["columns"].items()
        }
        return gather(located, opened, num_rows, output)

    def get_meta(
        self,
        *,
        partition: str,
        columns: Sequence[str],
        batch_size: int,
        task: str,
        sampler: Sampler | Policy | None = None,
        timeout_s: float | None = None,
        lease_s: float | None = None,
    ) -> BatchMeta:
        """See `TransferQueue.get_meta`."""
        if lease_s is not None:
            check_seconds("lease_s", lease_s)
        claim = _claim(partition, columns, batch_size, task, sampler)
        claim["lease_s"] = lease_s
        limit = _limit(timeout_s, self.timeout_s)
        if sampler is None or isinstance(sampler, Policy):
            reply = self._call(_waiting(claim, limit, is_claim=True), limit)
        else:
            reply = self._sample(claim, limit, sampler)
        return _batch_meta(reply, partition, tuple(columns), task)

    def ack(self, meta: BatchMeta, *, step: int = 0) -> None:
        """See `TransferQueue.ack`."""
        self._say(meta, {"op": "ack", "step": step, **_leased(meta)})

    def nack(self, meta: BatchMeta, *, reason: str = "it was not acknowledged") -> None:
        """See `TransferQueue.nack`."""
        self._say(meta, {"op": "nack", "reason": reason, **_leased(meta)})

    def extend(self, meta: BatchMeta, lease_s: float) -> None:
        """See `TransferQueue.extend`."""
        check_seconds("lease_s", lease_s)
        self._say(meta, {"op": "extend", "lease_s": lease_s, **_leased(meta)})

    def restore(self, partition: str, step: int, *, task: str | None = None) -> RestoreReport:
        """See `TransferQueue.restore`."""
        reply = self._call({"op": "restore", "partition": partition, "step": step, "task": task}, self.timeout_s)
        return RestoreReport(**{name: reply[name] for name in ("num_returned", "num_cleared", "num_revoked")})

    def dead_letters(self, partition: str, task: str) -> BatchMeta:
        """See `TransferQueue.dead_letters`."""
        reply = self._call({"op": "dead_letters", "partition": partition, "task": task}, self.timeout_s)
        return _batch_meta(reply, partition, tuple(reply["columns"]))

    def configure(self, partition: str, **options: Any) -> None:
        """See `TransferQueue.configure`."""
        checked = PartitionOptions.from_json(options).to_json()
        self._call({"op": "configure", "partition": partition, "options": checked}, self.timeout_s)

    def advance(self, partition: str, weight_version: int) -> AdvanceReport:
        """See `TransferQueue.advance`."""
        if type(weight_version) is not int:
            raise ValueError(f"weight_version is {weight_version!r}: it must be an integer")
        request = {"op": "advance", "partition": partition, "weight_version": weight_version}
        reply = self._call(request, self.timeout_s)
        return AdvanceReport(num_cleared=reply["num_cleared"], groups=tuple(reply["groups"]))

    def admit(
        self,
        *,
        partition: str,
        num_rows: int,
        num_bytes: int = 0,
        group_id: int | str | None = None,
        timeout_s: float | None = None,
    ) -> Credit:
        """See `TransferQueue.admit`."""
        limit = _limit(timeout_s, self.timeout_s)
        request = {
            "op": "admit", "partition": partition, "num_rows": num_rows, "num_bytes": num_bytes, "group_id": group_id,
            "timeout_s": limit,
        }  # fmt: skip
        reply = self._call(request, limit)
        return Credit(**{each.name: reply[each.name] for each in fields(Credit)})

    def release(self, credit: Credit) -> None:
        """See `TransferQueue.release`."""
        self._call({"op": "release", "credit": credit.number}, self.timeout_s)

    def explain(
        self, *, partition: str, columns: Sequence[str], batch_size: int, task: str, sampler: Policy | None = None
    ) -> str:
        """See `TransferQueue.explain`."""
        claim = _claim(partition, columns, batch_size, task, sampler)
        return self._call({"op": "explain", "timeout_s": 0.0, **claim}, self.timeout_s)["text"]

    def clear(self, meta_or_partition: BatchMeta | str) -> None:
        """See `TransferQueue.clear`."""
        if isinstance(meta_or_partition, str):
            self._call({"op": "clear", "is_whole": True, "partition": meta_or_partition}, self.timeout_s)
        elif len(meta_or_partition):
            self._say(meta_or_partition, {"op": "clear", "is_whole": False})

    def snapshot(self, path: str | Path, *, timeout_s: float | None = None) -> None:
        """See `TransferQueue.snapshot`."""
        _limit(timeout_s, self.timeout_s)
        reply, opened = self._locate({"op": "snapshot"}, is_copied=True)
        write_snapshot(Path(path), reply["records"], {number: extent.memory for number, extent in opened.items()})

    def stats(self) -> dict[str, Any]:
        """See `TransferQueue.stats`."""
        return self._call({"op": "stats"}, self.timeout_s)

    def _sample(self, claim: Message, limit: float, sampler: Sampler) -> Message:
        """Claim by a sampler that runs here: list ready rows, choose, claim; repeat if another client was faster."""
        deadline = time.monotonic() + limit
        after = -1
        batch_size: int = claim["batch_size"]
        while True:
            left = max(0.0, deadline - time.monotonic())
            ready = self._call(_waiting(claim, left, is_claim=False, after=after), left)
            numbers = lengthen(ready["rows"])
            names = ready["sample_ids"] or [f"row{number}" for number in numbers]
            tags = ready["tags"] or [{} for _ in names]
            rows = [RowMeta(sample_id=name, tags=tag) for name, tag in zip(names, tags, strict=True)]
            choice = sampler(rows, batch_size)
            after = ready["version"]
            if choice is None:
                continue
            chosen = _checked_choice(choice, len(rows), batch_size)
            request = {"op": "claim_rows", **claim, "timeout_s": left, "rows": [numbers[i] for i in chosen]}
            reply = self._call(request, self.timeout_s)
            if "is_conflict" not in reply:
                return reply
            after = -1


def _limit(timeout_s: float | None, usual_s: float) -> float:
    """Seconds that a call may take.

    Raises:
        ValueError: it is no number of seconds.
    """
    limit = usual_s if timeout_s is None else timeout_s
    check_seconds("timeout_s", limit, may_be_none_left=True)
    return limit


def _waiting(claim: Message, limit: float, *, is_claim: bool, after: int = -1) -> Message:
    """Request that waits for rows."""
    return {"op": "wait", **claim, "timeout_s": limit, "is_claim": is_claim, "after": after}


def _about(meta: BatchMeta, ask: Callable[[Message], Answer]) -> Answer:
    """Send a request with row numbers; if it is refused, repeat it with sample ids for a better error message."""
    try:
        return ask(_rows_of(meta))
    except (StaleReferenceError, LeaseLostError):
        return ask(_rows_of(meta, has_names=True))


def _claim(
    partition: str, columns: Sequence[str], batch_size: int, task: str, sampler: Sampler | Policy | None
) -> Message:
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: claim 1 row or more")
    if isinstance(columns, str):
        raise ValueError(f"columns is the string {columns!r}: give a list of names")
    claim: Message = {"partition": partition, "columns": list(columns), "task": task, "batch_size": batch_size}
    if isinstance(sampler, Policy):
        sampler.check(batch_size)
        claim["policy"] = sampler.to_json()
    return claim


def _rows_of(meta: BatchMeta, *, has_names: bool = False) -> Message:
    """Fields of a request that identify rows. Rows with numbers need their ids only for error messages."""
    return {
        "partition": meta.partition,
        "generation": meta.generation,
        "rows": shorten(meta.rows),
        "sample_ids": meta.sample_ids if has_names or not meta.rows else (),
    }


def _leased(meta: BatchMeta) -> Message:
    if not meta.leases or not meta.rows:
        raise ValueError(
            f"this reference to {len(meta)} rows of partition {meta.partition!r} has no leases: only what get_meta "
            "returned, or was made of that, can be acked, nacked or extended"
        )
    return {"task": meta.task, "leases": shorten(meta.leases)}


def _target_of(meta: BatchMeta, partition: str, num_rows: int) -> Message:
    """Fields of a put request that identify the existing rows it adds to."""
    if meta.partition != partition:
        raise SchemaError(f"the rows given are in partition {meta.partition!r}, and the put is for {partition!r}")
    if len(meta) != num_rows:
        raise SchemaError(f"{len(meta)} sample_ids were given for {num_rows} rows: one per row is needed")
    if not meta.rows:
        return {"sample_ids": list(meta.sample_ids)}
    return {**_rows_of(meta, has_names=True), "task": meta.task, "leases": shorten(meta.leases)}


def _batch_meta(reply: Message, partition: str, columns: tuple[str, ...], task: str = "") -> BatchMeta:
    lease = reply.get("lease", 0)
    rows = lengthen(reply["rows"])
    names = reply["sample_ids"]
    return batch_meta(
        partition,
        None if names is None else tuple(names),
        tuple(dict.fromkeys(columns)),
        tuple(reply["tags"]),
        tuple(rows),
        reply["generation"],
        task if lease else "",
        (lease,) * len(rows) if lease else (),
        locations_of(reply.get("hints", ())),
        {},
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
        check_tags(copies)
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


class RemoteQueue(QueueClient):
    """Client base class for storages whose requests and values go over one connection."""

    def __init__(self, address: str, connection: Connection, *, timeout_s: float) -> None:
        super().__init__(address, timeout_s=timeout_s)
        self._session: Session[torch.Tensor | None] = Session(
            address, connection, note=_ignore, hold=lambda _, payload: payload, drop=_ignore
        )

    def close(self) -> None:
        """See `TransferQueue.close`."""
        if self._session.is_of_this_process:
            self._session.leave()
            self._session.close()

    def _request(
        self, request: Message, payload: Payload, timeout_s: float, output: Output | None = None
    ) -> tuple[Message, torch.Tensor | None]:
        """Send a request; return the reply and its payload, possibly in `output`'s memory; or raise the error in it."""
        self._session.check()
        return self._session.request(request, timeout_s, payload, output)

    def _call(self, request: Message, timeout_s: float) -> Message:
        return self._request({"timeout_s": timeout_s, **request}, [], timeout_s)[0]

    def _store_extent(self, layout: Layout, request: Message, timeout_s: float) -> Message:
        memory = torch.empty(layout.nbytes, dtype=torch.uint8)
        layout.write(memory)
        return self._request(request, [memory], timeout_s)[0]

    def snapshot(self, path: str | Path, *, timeout_s: float | None = None) -> None:
        """See `TransferQueue.snapshot`."""
        self._call({"op": "snapshot", "path": str(path)}, _limit(timeout_s, self.timeout_s))

    def _locate(self, request: Message, *, is_copied: bool) -> tuple[Message, Opened]:
        raise NotImplementedError("the values themselves are fetched: see _fetch")

    def _fetch(self, request: Message, num_rows: int, output: Output) -> TensorDict:
        reply, payload = self._request({"op": "fetch", **request}, [], self.timeout_s, output)
        return assembled(reply, payload, num_rows, output)


def _ignore(*_: object) -> None:
    """Callback of a session without unsolicited messages and without resources to release."""


def assembled(reply: Message, payload: torch.Tensor | None, num_rows: int, output: Output) -> TensorDict:
    """Batch of fetched values, from a fetch reply and its payload."""
    schemas: dict[str, ColumnSchema] = {}
    parts: dict[str, list[torch.Tensor]] = {}
    bounds: dict[str, Bounds] = {}
    turns: dict[str, list[list[int]]] = {}
    start = 0
    for name, (schema_json, size, nbytes, sizes) in reply["columns"].items():
        schema = schemas[name] = ColumnSchema.from_json(schema_json)
        dtype = torch.uint8 if schema.dtype == "utf8" else getattr(torch, schema.dtype)
        data = torch.empty(0, dtype=torch.uint8) if payload is None else payload[start : start + nbytes]
        parts[name] = [data.view(dtype).view(size, *schema.shape)]
        if schema.kind is ColumnKind.TURNS:
            turns[name] = sizes
        elif sizes is not None:
            bounds[name] = bounds_of(sizes)
        start += nbytes + -nbytes % ALIGNMENT
    return assemble(schemas, Collected(parts, bounds, turns), dict.fromkeys(schemas, True), num_rows, output)
