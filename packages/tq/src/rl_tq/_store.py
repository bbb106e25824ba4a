"""The bookkeeping of a queue: which rows exist, which columns they have, where those lie, and who was given which row.

Pure: no I/O, no clock, no thread, no tensor. Whoever hosts it (a process's lock, or the control server) calls one
method at a time, passes the time in, and after each call delivers what `drain` returns. Every method does all of its
work or none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

from rl_tq._ready import ReadyRows
from rl_tq._schema import ColumnSchema
from rl_tq.errors import MissingDataError, SchemaError, StaleReferenceError, TransferQueueError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

Place: TypeAlias = tuple[int, int]
"""Extent, and the row's index in it."""


@dataclass(slots=True, kw_only=True)
class Row:
    """One row."""

    number: int
    """Given once in the life of the store."""
    sample_id: str
    """The caller's name for it, unique in its partition while it exists."""
    tags: dict[str, Any]
    """Small values, merged from every put."""
    places: dict[str, Place]
    """Column name to where its value lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows as a store answers them."""

    partition: str
    """Their partition."""
    generation: int
    """Its generation."""
    rows: tuple[Row, ...]
    """In the order asked for, or oldest first."""
    version: int
    """Grows whenever the partition changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where the values of a batch lie."""

    columns: dict[str, tuple[ColumnSchema, list[tuple[int, int, int]]]]
    """Column name to its schema and its runs: extent, first index, number of rows, in the order of the batch."""
    extents: set[int]
    """Every extent among them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waiter:
    """A request for ready rows: parked until it can be answered or its deadline passes."""

    key: Any
    """The host's name for whoever waits."""
    partition: str
    """Where to look."""
    columns: tuple[str, ...]
    """What a row must have to be ready."""
    task: str
    """Who consumes."""
    batch_size: int
    """Rows wanted."""
    deadline: float
    """On the host's clock, seconds."""
    is_claim: bool
    """True: claim the oldest. False: list all ready rows, for a sampler to choose among."""
    after: int = -1
    """List only once the partition's version is beyond this."""


Outcome: TypeAlias = "Batch | TransferQueueError"


@dataclass(slots=True, kw_only=True)
class _Extent:
    nbytes: int
    num_rows: int
    """Rows that still refer to it."""


@dataclass(slots=True, kw_only=True)
class _Partition:
    generation: int
    schema: dict[str, ColumnSchema] = field(default_factory=dict[str, ColumnSchema])
    rows: dict[int, Row] = field(default_factory=dict[int, Row])
    by_id: dict[str, Row] = field(default_factory=dict[str, Row])
    nbytes: int = 0
    consumed: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    ready: dict[tuple[str, frozenset[str]], ReadyRows] = field(
        default_factory=dict[tuple[str, frozenset[str]], ReadyRows]
    )


class MetadataStore:
    """Partitions of rows, the tasks that consume them, and the waiters parked for them."""

    def __init__(self) -> None:
        self._partitions: dict[str, _Partition] = {}
        self._extents: dict[int, _Extent] = {}
        self._numbers = count(1)
        self._generations = count(1)
        self._versions = count(1)
        self._changed: dict[str, int] = {}
        self._waiters: dict[Any, Waiter] = {}
        self._settled: list[tuple[Waiter, Outcome]] = []
        self._freed: list[int] = []

    # Rows in and out

    def publish(
        self,
        *,
        partition: str,
        num_rows: int,
        schema: Mapping[str, ColumnSchema],
        extent: int,
        nbytes: int,
        sample_ids: Sequence[str] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> Batch:
        """Make `num_rows` values of each column visible: they lie in `extent`, index 0 first.

        Raises:
            SchemaError: see `TransferQueue.put`.
        """
        self._check_counts(num_rows, sample_ids, tags)
        home = self._partitions.get(partition)
        known = home or _Partition(generation=0)
        _check_schema(partition, known, schema)
        existing = [known.by_id.get(sample_id) for sample_id in sample_ids or ()]
        _check_unfilled(partition, [row for row in existing if row], schema)
        if home is None:
            home = self._partitions[partition] = _Partition(generation=next(self._generations))
        home.schema.update(schema)
        home.nbytes += nbytes
        self._extents[extent] = _Extent(nbytes=nbytes, num_rows=num_rows)
        rows = [row or self._new_row(home, sample_ids[i] if sample_ids else None)
                for i, row in enumerate(existing or [None] * num_rows)]  # fmt: skip
        for index, row in enumerate(rows):
            row.places.update(dict.fromkeys(schema, (extent, index)))
            if tags is not None:
                row.tags.update(tags[index])
        _mark_ready(home, rows)
        self._touch(partition)
        self._settle(partition)
        return self._batch(partition, rows)

    def locate(
        self,
        *,
        partition: str,
        columns: Sequence[str],
        generation: int = 0,
        rows: Sequence[int] = (),
        sample_ids: Sequence[str] = (),
    ) -> Located:
        """Where the columns of rows lie.

        Raises:
            StaleReferenceError: a row, or its whole generation, was cleared.
            MissingDataError: a row has no such column, or (in a reference by ids alone) there is no such row.
        """
        found = self._find(partition, generation=generation, rows=rows, sample_ids=sample_ids)
        lacking = {c: ids for c in columns if (ids := [row.sample_id for row in found if c not in row.places])}
        if lacking:
            raise MissingDataError(
                f"partition {partition!r}: "
                + "; ".join(
                    f"{len(ids)} of {len(found)} rows have no {c!r} yet ({_few(ids)})" for c, ids in lacking.items()
                )
            )
        schema = self._partitions[partition].schema
        runs = {c: (schema[c], _runs([row.places[c] for row in found])) for c in columns}
        return Located(columns=runs, extents={run[0] for _, column in runs.values() for run in column})

    def clear_rows(
        self, *, partition: str, generation: int = 0, rows: Sequence[int] = (), sample_ids: Sequence[str] = ()
    ) -> None:
        """Forget rows, all of them or (when one was cleared before) none.

        Raises:
            StaleReferenceError, MissingDataError: as `locate`.
        """
        found = {r.number: r for r in self._find(partition, generation=generation, rows=rows, sample_ids=sample_ids)}
        home = self._partitions[partition]
        for row in found.values():
            del home.rows[row.number], home.by_id[row.sample_id]
            self._release(home, row)
        for given in home.consumed.values():
            given.difference_update(found)
        for ready in home.ready.values():
            ready.discard(found)
        self._touch(partition)

    def clear_partition(self, partition: str) -> None:
        """Forget a partition: rows, schema and who consumed what. Nothing happens when it is not there."""
        home = self._partitions.pop(partition, None)
        if home is not None:
            for row in home.rows.values():
                self._release(home, row)
            del self._changed[partition]

    # Waiting and claiming

    def wait(self, waiter: Waiter) -> Batch | None:
        """Answer at once, or park the waiter and return None: `drain` gives the outcome later."""
        answer = self._try(waiter)
        if answer is None:
            self._waiters[waiter.key] = waiter
        return answer

    def claim_rows(self, *, partition: str, columns: Sequence[str], task: str, rows: Sequence[int]) -> Batch | None:
        """Claim the very rows that a sampler chose, or none of them (None) if one is no longer to be had."""
        home = self._partitions.get(partition)
        if home is None:
            return None
        ready = _ready(home, task, columns)
        if not rows or len(set(rows)) < len(rows) or any(row not in ready for row in rows):
            return None
        return self._claimed(partition, home, task, rows)

    def withdraw(self, key: Any) -> None:
        """Forget a parked waiter, because whoever waited is gone."""
        self._waiters.pop(key, None)

    def expire(self, now: float) -> None:
        """Settle every waiter whose deadline has come with an error that says what is missing."""
        for waiter in [w for w in self._waiters.values() if w.deadline <= now]:
            del self._waiters[waiter.key]
            self._settled.append((waiter, WaitTimeoutError(self._explain(waiter))))

    def next_deadline(self) -> float | None:
        """The earliest deadline among the parked; None when nobody waits."""
        return min((w.deadline for w in self._waiters.values()), default=None)

    def drain(self) -> tuple[list[tuple[Waiter, Outcome]], list[int]]:
        """Waiters settled since the last call, and the extents that no row refers to any more."""
        settled, freed = self._settled, self._freed
        self._settled, self._freed = [], []
        return settled, freed

    def stats(self) -> dict[str, Any]:
        """Rows, bytes, columns, consumption and waiters per partition."""
        waiting = Counter(waiter.partition for waiter in self._waiters.values())
        partitions: dict[str, Any] = {
            name: {
                "generation": home.generation,
                "rows": len(home.rows),
                "bytes": home.nbytes,
                "columns": {column: str(schema) for column, schema in home.schema.items()},
                "consumed": {task: len(rows) for task, rows in home.consumed.items()},
                "waiters": waiting.pop(name, 0),
            }
            for name, home in self._partitions.items()
        }
        return {
            "partitions": partitions,
            "waiters_elsewhere": dict(waiting),
            "rows": sum(len(home.rows) for home in self._partitions.values()),
            "bytes": sum(extent.nbytes for extent in self._extents.values()),
            "extents": len(self._extents),
        }

    # Parts

    def _check_counts(self, num_rows: int, sample_ids: Sequence[str] | None, tags: Sequence[Any] | None) -> None:
        if num_rows < 1:
            raise SchemaError(f"a put takes at least one row, not {num_rows}")
        for name, given in (("sample_ids", sample_ids), ("tags", tags)):
            if given is not None and len(given) != num_rows:
                raise SchemaError(f"{len(given)} {name} were given for {num_rows} rows: one per row is needed")
        if sample_ids is not None and len(set(sample_ids)) < num_rows:
            twice = [sample_id for sample_id, times in Counter(sample_ids).items() if times > 1]
            raise SchemaError(f"sample ids stand more than once in one put: {_few(twice)}")

    def _new_row(self, home: _Partition, sample_id: str | None) -> Row:
        number = next(self._numbers)
        name = sample_id if sample_id is not None else f"row{number}"
        while sample_id is None and name in home.by_id:  # somebody chose this very name for a row of his own
            name += "+"
        row = Row(number=number, sample_id=name, tags={}, places={})
        home.rows[number] = home.by_id[name] = row
        return row

    def _find(self, partition: str, *, generation: int, rows: Sequence[int], sample_ids: Sequence[str]) -> list[Row]:
        home = self._partitions.get(partition)
        if generation and (home is None or home.generation != generation):
            raise StaleReferenceError(
                f"partition {partition!r} was cleared: this reference is of its generation {generation}, "
                + (f"the present one is {home.generation}" if home else "and it was not put to since")
            )
        if home is None:
            raise MissingDataError(
                f"there is no partition {partition!r}; there are {sorted(self._partitions) or 'none'}"
            )
        found = [home.rows.get(n) for n in rows] if rows else [home.by_id.get(i) for i in sample_ids]
        gone = [name for name, row in zip(sample_ids or map(str, rows), found, strict=True) if row is None]
        if gone:
            what = f"{len(gone)} of {len(found)} rows of partition {partition!r}"
            if rows:
                raise StaleReferenceError(f"{what} were cleared since this reference was made: {_few(gone)}")
            raise MissingDataError(f"{what} are not there: {_few(gone)}")
        return [row for row in found if row is not None]

    def _release(self, home: _Partition, row: Row) -> None:
        for extent in {place[0] for place in row.places.values()}:
            record = self._extents[extent]
            record.num_rows -= 1
            if not record.num_rows:
                del self._extents[extent]
                home.nbytes -= record.nbytes
                self._freed.append(extent)

    def _touch(self, partition: str) -> None:
        self._changed[partition] = next(self._versions)

    def _batch(self, partition: str, rows: Iterable[Row]) -> Batch:
        return Batch(
            partition=partition,
            generation=self._partitions[partition].generation,
            rows=tuple(rows),
            version=self._changed[partition],
        )

    def _settle(self, partition: str) -> None:
        """Answer whom the last publish made answerable, in the order in which they came."""
        for waiter in [w for w in self._waiters.values() if w.partition == partition]:
            answer = self._try(waiter)
            if answer is not None:
                del self._waiters[waiter.key]
                self._settled.append((waiter, answer))

    def _try(self, waiter: Waiter) -> Batch | None:
        home = self._partitions.get(waiter.partition)
        if home is None:
            return None
        ready = _ready(home, waiter.task, waiter.columns)
        if len(ready) < waiter.batch_size:
            return None
        if waiter.is_claim:
            return self._claimed(waiter.partition, home, waiter.task, ready.take(waiter.batch_size))
        if self._changed[waiter.partition] <= waiter.after:
            return None
        return self._batch(waiter.partition, (home.rows[number] for number in ready))

    def _claimed(self, partition: str, home: _Partition, task: str, rows: Sequence[int]) -> Batch:
        home.consumed.setdefault(task, set()).update(rows)
        for (owner, _), ready in home.ready.items():
            if owner == task:
                ready.discard(rows)
        return self._batch(partition, [home.rows[number] for number in rows])

    def _explain(self, waiter: Waiter) -> str:
        home = self._partitions.get(waiter.partition)
        wanted = (
            f"task {waiter.task!r} wanted {waiter.batch_size} rows of partition {waiter.partition!r} with "
            f"{list(waiter.columns)}"
        )
        if home is None:
            return f"{wanted}, and nothing was put there; there are {sorted(self._partitions) or 'no partitions'}"
        given = home.consumed.get(waiter.task, set())
        lacks = Counter(
            column
            for row in home.rows.values()
            if row.number not in given
            for column in waiter.columns
            if column not in row.places
        )
        ready = len(_ready(home, waiter.task, waiter.columns))
        others = len(home.rows) - len(given) - ready
        missing = "; ".join(f"{times} lack {column!r}" for column, times in lacks.items())
        sampler = "" if waiter.is_claim or ready < waiter.batch_size else ", among which the sampler did not choose"
        return (
            f"{wanted}: {ready} of its {len(home.rows)} rows are ready{sampler}, {len(given)} were given to this task "
            f"before, {others} are incomplete" + (f" ({missing})" if missing else "")
        )


def _ready(home: _Partition, task: str, columns: Collection[str]) -> ReadyRows:
    """The index of rows that `task` can claim with `columns`; made on first use, kept up to date from then on."""
    key = (task, frozenset(columns))
    if key not in home.ready:
        given = home.consumed.get(task, set())
        home.ready[key] = ReadyRows(
            number for number, row in home.rows.items() if number not in given and key[1] <= row.places.keys()
        )
    return home.ready[key]


def _mark_ready(home: _Partition, rows: Sequence[Row]) -> None:
    for (task, columns), ready in home.ready.items():
        given = home.consumed.get(task, set())
        for row in rows:
            if row.number not in given and columns <= row.places.keys():
                ready.add(row.number)


def _check_schema(partition: str, home: _Partition, schema: Mapping[str, ColumnSchema]) -> None:
    for column, brought in schema.items():
        held = home.schema.get(column, brought)
        if held != brought:
            raise SchemaError(
                f"column {column!r} of partition {partition!r} is {held}, and this put brings {brought}: "
                "convert it, use another column, or clear the partition"
            )


def _check_unfilled(partition: str, rows: Sequence[Row], columns: Collection[str]) -> None:
    for column in columns:
        filled = [row.sample_id for row in rows if column in row.places]
        if filled:
            raise SchemaError(
                f"column {column!r} of partition {partition!r} is filled already in {len(filled)} rows "
                f"({_few(filled)}): a value is written once; clear the rows or use another column"
            )


def _runs(places: Sequence[Place]) -> list[tuple[int, int, int]]:
    runs: list[tuple[int, int, int]] = []
    extent, start, length = -1, 0, 0
    for place in places:
        if place == (extent, start + length):
            length += 1
            continue
        if length:
            runs.append((extent, start, length))
        (extent, start), length = place, 1
    runs.append((extent, start, length))
    return runs


def _few(names: Sequence[str], limit: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
