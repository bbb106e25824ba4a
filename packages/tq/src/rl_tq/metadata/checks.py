"""Validation of requests, and the error messages."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

from rl_tq.errors import LeaseLostError, MissingDataError, SchemaError, StaleReferenceError, TransferQueueError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from rl_tq.columns.schema import ColumnSchema
    from rl_tq.metadata.ledger import TaskLedger
    from rl_tq.metadata.requests import Put
    from rl_tq.metadata.rows import Partition, Row
    from rl_tq.metadata.state import State


LONGEST_S = 1e6
"""Longest timeout in seconds: the kernel's timeouts are 31-bit milliseconds."""


def check_seconds(name: str, seconds: float, *, may_be_none_left: bool = False) -> None:
    """Raise ValueError for a timeout that is negative, not finite or too long."""
    if not 0 <= seconds <= LONGEST_S or not (seconds or may_be_none_left):
        least = "0 or more" if may_be_none_left else "more than 0"
        raise ValueError(f"{name} is {seconds}: it must be {least} seconds, and {LONGEST_S:.0f} (11 days) at most")


def check_process(address: str, pid: int) -> None:
    """Raise TransferQueueError if this is not the process that made a client (a forked child)."""
    if os.getpid() != pid:
        raise TransferQueueError(
            f"this client of {address} was made in process {pid} and does not survive a fork: call "
            f"rl_tq.connect({address!r}) in process {os.getpid()}"
        )


def find_rows(
    state: State, partition: str, generation: int, rows: Sequence[int], sample_ids: Sequence[str]
) -> list[Row]:
    """Rows of a reference, by number or (if it was made by hand) by sample id.

    Raises:
        StaleReferenceError: a row, or the whole generation of the partition, was cleared.
        MissingDataError: there are no rows with such ids.
    """
    home = state.partitions.get(partition)
    if generation and (home is None or home.generation != generation):
        raise StaleReferenceError(
            f"partition {partition!r} was cleared: this reference is of its generation {generation}, "
            + (f"the present one is {home.generation}" if home else "and it was not put to since")
        )
    if home is None:
        raise MissingDataError(f"there is no partition {partition!r}; there are {sorted(state.partitions) or 'none'}")
    found = [home.rows.get(n) for n in rows] if rows else [home.find(i) for i in sample_ids]
    if None in found:
        gone = [name for name, row in zip(sample_ids or map(str, rows), found, strict=True) if row is None]
        what = f"{len(gone)} of {len(found)} rows of partition {partition!r}"
        if rows:
            raise StaleReferenceError(f"{what} were cleared since this reference was made: {few(gone)}")
        raise MissingDataError(f"{what} are not there: {few(gone)}")
    return [row for row in found if row is not None]


def check_columns(partition: str, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Raise MissingDataError, naming rows, if one of them lacks a column."""
    wanted = frozenset(columns)
    if all(wanted <= held for held in {row.columns for row in rows}):
        return
    lacking = {c: ids for c in columns if (ids := [row.sample_id for row in rows if c not in row.columns])}
    clauses = [f"{len(ids)} of {len(rows)} rows have no {c!r} yet ({few(ids)})" for c, ids in lacking.items()]
    raise MissingDataError(f"partition {partition!r}: " + "; ".join(clauses))


def check_put(put: Put, home: Partition | None) -> None:
    """Raise SchemaError if a put's counts disagree, or its columns with what their partition holds."""
    if put.num_rows < 1:
        raise SchemaError(f"a put takes at least one row, not {put.num_rows}")
    if put.sample_ids is not None:
        _check_count("sample_ids", put.sample_ids, put.num_rows)
        if len(set(put.sample_ids)) < put.num_rows:
            twice = [sample_id for sample_id, times in Counter(put.sample_ids).items() if times > 1]
            raise SchemaError(f"sample ids occur more than once in one put: {few(twice)}")
    if put.tags is not None:
        _check_count("tags", put.tags, put.num_rows)
        _check_tags(put.tags)
    if home is not None and home.accepted is not put.schema:
        _check_schema(put.partition, home.schema, put.schema)


def _check_count(name: str, given: Sequence[Any], num_rows: int) -> None:
    if len(given) != num_rows:
        raise SchemaError(f"{len(given)} {name} were given for {num_rows} rows: one per row is needed")


MAX_TAG_DEPTH = 101
"""Deepest nesting of a tag, so that reading it never overflows the stack."""
_PLAIN = {str, int, float, bool, type(None)}

_READ: dict[str, tuple[Callable[[Any], bool], str]] = {
    "group_id": (lambda value: not isinstance(value, list | dict), "a string, number or null"),
    "weight_version_min": (lambda value: value is None or isinstance(value, int), "an integer"),
}
"""Tags that the server reads: a check of the value, and the allowed values in words."""


def _is_too_deep(value: Any, depth: int = 0) -> bool:
    if depth > MAX_TAG_DEPTH:
        return True
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(_is_too_deep(item, depth + 1) for item in items)


def _check_tags(tags: Sequence[Mapping[str, Any]]) -> None:
    for tag in tags:
        if not {*map(type, tag.values())} <= _PLAIN and _is_too_deep(tag):
            raise SchemaError(f"a tag is nested more than {MAX_TAG_DEPTH} deep: make it flat, or a column")
    for name, (is_good, wanted) in _READ.items():
        values = [tag[name] for tag in tags if name in tag]
        if {*map(type, values)} <= {int}:  # as most are
            continue
        wrong = [value for value in values if not is_good(value)]
        if wrong:
            raise SchemaError(f"the tag {name} is {wrong[0]!r}: it must be {wanted}")


def _check_schema(partition: str, held: Mapping[str, ColumnSchema], schema: Mapping[str, ColumnSchema]) -> None:
    for column, brought in schema.items():
        there = held.get(column)
        if there is not None and there is not brought and there != brought:
            raise SchemaError(
                f"column {column!r} of partition {partition!r} is {there}, and this put brings {brought}: "
                "convert it, use another column, or clear the partition"
            )


def check_unfilled(partition: str, rows: Sequence[Row], columns: Collection[str]) -> None:
    """Raise SchemaError if one of the rows has one of the columns: a value is written once."""
    for column in columns:
        filled = [row.sample_id for row in rows if column in row.columns]
        if filled:
            raise SchemaError(
                f"column {column!r} of partition {partition!r} is filled already in {len(filled)} rows "
                f"({few(filled)}): a value is written once; clear the rows or use another column"
            )


def check_leases(
    ledger: TaskLedger | None,
    partition: str,
    task: str,
    rows: Sequence[int],
    leases: Sequence[int],
    sample_ids: Sequence[str],
    *,
    may_be_acked: bool,
) -> list[int]:
    """Rows still leased under these lease numbers; with `may_be_acked`, the others may be acked under them.

    Raises:
        LeaseLostError: a row is leased under another number, or not at all.
    """
    due: dict[int, None] = {}
    lost: list[str] = []
    for i, (row, number) in enumerate(zip(rows, leases, strict=True)):
        lease = ledger.leased.get(row) if ledger else None
        if lease is not None and lease.number == number:
            due[row] = None
        elif not (may_be_acked and ledger is not None and ledger.acked.get(row, (0, 0))[1] == number):
            lost.append(f"{sample_ids[i] if sample_ids else row!r} ({_fate(ledger, row)})")
    if lost:
        raise LeaseLostError(
            f"{len(lost)} of {len(rows)} rows of partition {partition!r} are not leased to this claim of task {task!r} "
            f"any more: {few(lost, 3, quote=False)}; nothing was done. Drop what was made of them, and claim again"
        )
    return list(due)


def _fate(ledger: TaskLedger | None, row: int) -> str:
    if ledger is None or (row not in ledger.leased and row not in ledger.acked and row not in ledger.dead):
        return "it went back, or was cleared"
    if row in ledger.leased:
        return f"it is leased to {ledger.leased[row].label}"
    if row in ledger.acked:
        return f"it was acked at step {ledger.acked[row][0]}"
    return "it is a dead letter"


def few(names: Sequence[str], limit: int = 5, *, quote: bool = True) -> str:
    """First names of a list and the number of others, for messages."""
    shown = ", ".join(repr(name) if quote else name for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
