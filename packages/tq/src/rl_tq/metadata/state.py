"""Event-sourced state of a queue: partitions, extents and leases, and the methods that change them.

Each change is a method with JSON arguments and no decisions of its own: records `[method, *args]` are both the journal
and the snapshot, and replaying them gives the same state. Decisions and their consequences are in `metadata.store`.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeAlias

from rl_tq.columns.schema import ColumnSchema, Schema
from rl_tq.metadata.ledger import Lease, TaskLedger
from rl_tq.metadata.rows import NO_TAGS, Extent, Partition, Row, as_range
from rl_tq.policies import policy_from_json
from rl_tq.types import DEFAULT_OPTIONS, PartitionOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rl_tq.types.policy import ReadyRows

Record: TypeAlias = list[Any]
"""`[method, *arguments]` of one change."""


class State:
    """Partitions, extents and leases."""

    def __init__(self) -> None:
        self.partitions: dict[str, Partition] = {}
        self.options: dict[str, PartitionOptions] = {}
        """Options by partition name; kept while the partition is empty or cleared."""
        self.versions: dict[str, int] = {}
        """Weight version, by partition name."""
        self.extents: dict[int, Extent] = {}
        self.leases: dict[int, Lease] = {}
        self.freed: list[int] = []
        """Extents without rows, since the reader last emptied the list."""
        self.shrunk: set[int] = set()
        """Extents some of whose rows were cleared, since `take_shrunk`."""
        self.log: list[Record] | None = None
        """Records of changes since the reader last emptied the list; None: not recorded."""
        self.next_row = self.next_generation = self.next_lease = 1
        self._changes = 0
        self._columns: dict[frozenset[str], frozenset[str]] = {}

    def num_rows(self) -> int:
        """Rows of all partitions."""
        return sum(len(home.rows) for home in self.partitions.values())

    def replay(self, records: Iterable[Record]) -> None:
        """Replay recorded changes."""
        for method, *arguments in records:
            note = NOTES.get(method)
            if note is None:
                getattr(self, method)(*arguments)
            else:
                note(self, *arguments)
        self.freed.clear()
        self.shrunk.clear()

    def take_shrunk(self) -> set[int]:
        """Extents of which a part was cleared since the last call."""
        shrunk, self.shrunk = self.shrunk, set()
        return shrunk

    def touch(self, home: Partition) -> None:
        """Increase the version counter of a partition."""
        self._changes += 1
        home.changed = self._changes

    # The changes

    def configure(self, partition: str, options: Mapping[str, Any]) -> None:
        """Set a partition's options."""
        staleness = options.get("staleness")
        decoded = {**options, "staleness": policy_from_json(staleness)} if isinstance(staleness, dict) else options
        checked = PartitionOptions.from_json(decoded)
        self._record("configure", partition, checked.to_json())
        self.options[partition] = checked
        if (home := self.partitions.get(partition)) is not None:
            home.options = self.options[partition]
            self.touch(home)

    def advance(self, partition: str, weight_version: int) -> None:
        """Set a partition's weight version."""
        self._record("advance", partition, weight_version)
        self.versions[partition] = weight_version
        if (home := self.partitions.get(partition)) is not None:
            home.weight_version = weight_version
            self.touch(home)

    def open(self, partition: str, generation: int) -> None:
        """Make an empty partition."""
        self._record("open", partition, generation)
        self.next_generation = max(self.next_generation, generation + 1)
        self.partitions[partition] = Partition(
            name=partition,
            generation=generation,
            options=self.options.get(partition, DEFAULT_OPTIONS),
            weight_version=self.versions.get(partition, 0),
        )

    def put(
        self,
        partition: str,
        extent: int,
        schema: Schema | Mapping[str, list[Any]],
        nbytes: int,
        num_rows: int,
        owner: str,
        places: Sequence[int] | None,
        numbers: Sequence[int],
        sample_ids: Sequence[str | None] | None,
        tags: Sequence[Mapping[str, Any]] | None,
    ) -> list[Row]:
        """Enter an extent and the rows in it; `places` None means that row i is at index i.

        Rows whose number is known get its columns; the others are new, of that id (None, as a whole or of one row:
        `row` and the number). The schema comes as JSON in a record.
        """
        if not isinstance(schema, Schema):
            schema = Schema.from_json(schema)
        if self.log is not None:
            self._record(
                "put", partition, extent, schema.as_json, nbytes, num_rows, owner, places, list(numbers), sample_ids,
                tags,
            )  # fmt: skip
        home = self.partitions[partition]
        home.accept(schema)
        columns = self._interned(schema.names)
        whole = as_range(numbers)
        held = self.extents[extent] = Extent(
            number=extent, columns=columns, nbytes=nbytes, num_rows=num_rows, num_live=len(numbers), owner=owner,
            partition=partition, rows=whole if places is None else tuple(numbers),
        )  # fmt: skip
        home.nbytes += nbytes
        indexes = range(len(numbers)) if places is None else places
        least, most = (whole[0], whole[-1]) if isinstance(whole, range) else (min(whole), max(whole))
        is_all_new = least >= self.next_row
        if is_all_new:
            names = sample_ids or repeat(None)
            rows = list(map(Row, numbers, names, repeat(NO_TAGS), repeat(columns), repeat(held), indexes))
            home.enter(numbers, rows, has_names=sample_ids is not None, tags=tags)
        else:
            rows = [
                self._extended(
                    home,
                    home.rows.get(number),
                    number,
                    sample_ids[i] if sample_ids else None,
                    tags[i] if tags else NO_TAGS,
                )
                for i, number in enumerate(numbers)
            ]
            for row, index in zip(rows, indexes, strict=True):
                row.columns = self._interned(row.columns | columns)
                row.set_pieces((*row.pieces, (held, index)))
        self.next_row = max(self.next_row, most + 1)
        for ledger in home.tasks.values():
            if is_all_new:
                ledger.offer_new(numbers, rows, columns)
            else:
                ledger.offer(rows)
        self.touch(home)
        return rows

    def share(
        self,
        partition: str,
        extent: int,
        of: int,
        columns: Sequence[str],
        numbers: Sequence[int],
        places: Sequence[int],
    ) -> None:
        """Let rows share columns of an extent, row i at index `places[i]`.

        They refer to the number `extent`: that of the extent itself if it has no other columns, else an alias of the
        same memory, which counts no bytes.
        """
        self._record("share", partition, extent, of, columns, numbers, places)
        home = self.partitions[partition]
        names = self._interned(frozenset(columns))
        held = self.extents.get(extent)
        if held is None:
            source = self.extents[of]
            held = self.extents[extent] = Extent(
                number=extent, columns=names, nbytes=0, num_rows=source.num_rows, num_live=0, owner=source.owner,
                partition=partition, rows=(),
            )  # fmt: skip
        held.num_live += len(numbers)
        held.rows = (*held.rows, *numbers)
        rows = [home.rows[number] for number in numbers]
        for row, index in zip(rows, places, strict=True):
            row.columns = self._interned(row.columns | names)
            row.set_pieces((*row.pieces, (held, index)))
        for ledger in home.tasks.values():
            ledger.offer(rows)
        self.touch(home)

    def move(self, extent: int, nbytes: int, old: Sequence[int], numbers: Sequence[int]) -> None:
        """Compaction: let rows refer to a new extent, row i at index i, instead of old ones with the same columns.

        Rows cleared since it was written are left out; if no row is left, it is freed at once.
        """
        self._record("move", extent, nbytes, old, numbers)
        first = self.extents[old[0]]
        home = self.partitions[first.partition]
        held = self.extents[extent] = Extent(
            number=extent, columns=first.columns, nbytes=nbytes, num_rows=len(numbers), num_live=0, owner=first.owner,
            partition=home.name, rows=as_range(numbers),
        )  # fmt: skip
        home.nbytes += nbytes
        gone = {self.extents[number] for number in old}
        for index, number in enumerate(numbers):
            row = home.rows.get(number)
            left = [piece for piece in row.pieces if piece[0] in gone] if row is not None else []
            if row is not None and left:
                [(there, _)] = left
                row.set_pieces((*(piece for piece in row.pieces if piece[0] is not there), (held, index)))
                held.num_live += 1
                self._leave(home, there)
        if not held.num_live:
            held.num_live = 1
            self._leave(home, held)
        elif held.num_live < len(numbers):
            self.shrunk.add(extent)

    def lease(
        self,
        partition: str,
        task: str,
        number: int,
        rows: Sequence[int],
        lease_s: float | None,
        is_grouped: bool,
        taken_from: ReadyRows | None = None,
    ) -> Lease:
        """Lease rows to a claim. The caller fills in the owner, which is not recorded.

        `taken_from` is the index that has removed the rows already, if any; not recorded.
        """
        if self.log is not None:
            self._record("lease", partition, task, number, list(rows), lease_s, is_grouped)
        self.next_lease = max(self.next_lease, number + 1)
        lease = self.leases[number] = Lease(
            number=number, partition=partition, task=task, owner=None, label="", lease_s=lease_s, rows=set(rows),
            is_grouped=is_grouped,
        )  # fmt: skip
        home = self.partitions[partition]
        self.ledger(home, task).lease(lease, taken_from)
        self.touch(home)
        return lease

    def ack(self, partition: str, task: str, rows: Sequence[int], step: int) -> None:
        """Consume leased rows."""
        self._record("ack", partition, task, rows, step)
        home = self.partitions[partition]
        ledger = home.tasks[task]
        for number in rows:
            lease = ledger.leased[number]
            ledger.ack(home.rows[number], step)
            self._end_if_empty(lease)
        self.touch(home)

    def give_back(self, partition: str, task: str, rows: Sequence[int], reason: str, is_counted: bool) -> list[int]:
        """Return leased rows; with `is_counted`, those that came back too often become dead letters. Returns these."""
        self._record("give_back", partition, task, rows, reason, is_counted)
        home = self.partitions[partition]
        ledger = home.tasks[task]
        free: list[Row] = []
        dead: list[int] = []
        for number in rows:
            row = home.rows[number]
            lease = ledger.leased.pop(number)
            lease.rows.discard(number)
            self._end_if_empty(lease)
            if is_counted:
                ledger.attempts[number] = ledger.attempts.get(number, 0) + 1
            why = ledger.why_dead(row, reason, home.options.max_attempts, is_grouped=lease.is_grouped)
            if why:
                ledger.dead[number] = why
                dead.append(number)
            else:
                free.append(row)
        ledger.returned.update(row.number for row in free)
        ledger.offer(free)
        self.touch(home)
        return dead

    def unack(self, partition: str, task: str, rows: Sequence[int]) -> None:
        """Free acked rows again."""
        self._record("unack", partition, task, rows)
        home = self.partitions[partition]
        ledger = home.tasks[task]
        found = [home.rows[number] for number in rows]
        for row in found:
            ledger.unack(row)
        ledger.returned.update(rows)
        ledger.offer(found)
        self.touch(home)

    def clear(self, partition: str, rows: Sequence[int], reason: str | None) -> None:
        """Delete rows; with a reason, they count as dropped for it."""
        self._record("clear", partition, rows, reason)
        home = self.partitions[partition]
        for number in rows:
            row = home.rows[number]
            leases = [lease for ledger in home.tasks.values() if (lease := ledger.leased.get(number))]
            home.leave(row)
            for lease in leases:
                self._end_if_empty(lease)
            self._release(home, row)
        for ledger in home.tasks.values():
            ledger.withdraw(rows)
        if reason is not None:
            home.dropped[reason] += len(rows)
        self.touch(home)

    def clear_all(self, partition: str) -> None:
        """Delete a partition: rows, schema and consumption. Its options and weight version stay."""
        self._record("clear_all", partition)
        home = self.partitions.pop(partition)
        for ledger in home.tasks.values():
            for number in {lease.number for lease in ledger.leased.values()}:
                del self.leases[number]
        for row in home.rows.values():
            self._release(home, row)

    # Parts

    def ledger(self, home: Partition, task: str) -> TaskLedger:
        """Ledger of a task, created on first use."""
        ledger = home.tasks.get(task)
        if ledger is None:
            ledger = home.tasks[task] = TaskLedger()
        return ledger

    def _extended(
        self, home: Partition, row: Row | None, number: int, name: str | None, tags: Mapping[str, Any]
    ) -> Row:
        """Row to which columns are added, with its new tags merged; created if it does not exist."""
        if row is None:
            row = Row(number, name, NO_TAGS, frozenset())
            home.enter([number], [row], has_names=name is not None, tags=[tags])
        elif tags:
            for ledger in home.tasks.values():
                ledger.withdraw([number])
            home.tag(row, tags)
        return row

    def _end_if_empty(self, lease: Lease) -> None:
        if not lease.rows:
            self.leases.pop(lease.number, None)

    def _release(self, home: Partition, row: Row) -> None:
        for extent, _ in row.pieces:
            self._leave(home, extent)

    def _leave(self, home: Partition, extent: Extent) -> None:
        """Count one row less in an extent; free the extent after the last."""
        extent.num_live -= 1
        if extent.num_live:
            self.shrunk.add(extent.number)
        else:
            del self.extents[extent.number]
            self.shrunk.discard(extent.number)
            home.nbytes -= extent.nbytes
            self.freed.append(extent.number)

    def _interned(self, columns: frozenset[str]) -> frozenset[str]:
        return self._columns.setdefault(columns, columns)

    def _record(self, *record: Any) -> None:
        if self.log is not None:
            self.log.append(list(record))


def dump(state: State) -> Iterator[Record]:
    """Records that make this state out of an empty one."""
    for name, options in state.options.items():
        yield ["configure", name, options.to_json()]
    for name, version in state.versions.items():
        yield ["advance", name, version]
    holders: dict[int, list[tuple[Row, int]]] = {number: [] for number in state.extents}
    homes: dict[int, Partition] = {}
    for name, home in state.partitions.items():
        yield ["open", name, home.generation]
        yield ["note_schema", name, {column: schema.to_json() for column, schema in home.schema.items()}]
        for row in home.rows.values():
            for extent, index in row.pieces:
                holders[extent.number].append((row, index))
                homes[extent.number] = home
    for number in sorted(holders):
        extent, rows = state.extents[number], holders[number]
        home = homes[number]
        schema = {column: home.schema[column].to_json() for column in extent.columns}
        yield [
            "put", home.name, number, schema, extent.nbytes, extent.num_rows, extent.owner,
            [index for _, index in rows], [row.number for row, _ in rows], [row.sample_id for row, _ in rows],
            [dict(row.tags) for row, _ in rows],
        ]  # fmt: skip
    for name, home in state.partitions.items():
        for task, ledger in home.tasks.items():
            groups = [[group, times] for group, times in ledger.acked_groups.items()]
            yield [
                "note_ledger", name, task, sorted([n, *ack] for n, ack in ledger.acked.items()),
                sorted(ledger.dead.items()), sorted(ledger.attempts.items()), groups,
                sorted(ledger.cleared.items()), ledger.num_acked,
                sorted(ledger.returned),
            ]  # fmt: skip
        yield ["note_dropped", name, dict(home.dropped)]
    for lease in state.leases.values():
        yield [
            "lease", lease.partition, lease.task, lease.number, sorted(lease.rows), lease.lease_s, lease.is_grouped
        ]  # fmt: skip
    yield ["note_numbers", state.next_row, state.next_generation, state.next_lease]


# Records of a dump that no change method covers


def note_schema(state: State, partition: str, schema: Mapping[str, list[Any]]) -> None:
    """Restore the schema of a partition, including columns without rows."""
    state.partitions[partition].schema = {name: ColumnSchema.from_json(value) for name, value in schema.items()}


def note_ledger(
    state: State,
    partition: str,
    task: str,
    acked: Sequence[Sequence[int]],
    dead: Sequence[Any],
    attempts: Sequence[tuple[int, int]],
    groups: Sequence[Any],
    cleared: Sequence[tuple[int, int]],
    num_acked: int,
    returned: Sequence[int],
) -> None:
    """Restore the consumption of a task."""
    ledger = state.ledger(state.partitions[partition], task)
    ledger.acked = {number: (step, lease) for number, step, lease in acked}
    ledger.dead = dict(dead)
    ledger.attempts = dict(attempts)
    ledger.acked_groups.update(dict(groups))
    ledger.cleared.update(dict(cleared))
    ledger.num_acked = num_acked
    ledger.returned = set(returned)


def note_dropped(state: State, partition: str, dropped: Mapping[str, int]) -> None:
    """Restore the counters of dropped rows."""
    state.partitions[partition].dropped.update(dropped)


def note_numbers(state: State, next_row: int, next_generation: int, next_lease: int) -> None:
    """End of a dump: restore the next free numbers, and the order of rows."""
    for home in state.partitions.values():
        numbers = sorted(home.rows)  # the order of extents can differ from that of rows
        if numbers != list(home.rows):
            home.rows = {number: home.rows[number] for number in numbers}
    state.next_row, state.next_generation, state.next_lease = next_row, next_generation, next_lease


NOTES: dict[str, Callable[..., None]] = {
    each.__name__: each for each in (note_schema, note_ledger, note_dropped, note_numbers)
}
"""Note functions by their names in records."""
