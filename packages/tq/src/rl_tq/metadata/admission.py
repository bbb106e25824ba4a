"""Admission control: limits of partitions, credits, puts into full partitions, and clearing of stale rows."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from rl_tq.errors import MissingDataError, QueueFullError, SchemaError, StaleVersionError
from rl_tq.metadata import checks
from rl_tq.metadata.checks import few
from rl_tq.metadata.requests import Admission, Put, Request
from rl_tq.types import DEFAULT_OPTIONS, AdvanceReport, Credit, PartitionOptions
from rl_tq.types.staleness import ADMITTED, OutstandingGroups, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rl_tq.metadata.rows import Extent, Partition, Row
    from rl_tq.metadata.state import State


@dataclass(slots=True, kw_only=True)
class _Reservation:
    partition: str
    num_rows: int
    """Left of it."""
    num_bytes: int
    """Left of it."""
    owner: Any
    label: str
    credit: Credit


class Admissions:
    """Admission of puts and credits into a state."""

    def __init__(self, state: State, alias: Callable[[int], int]) -> None:
        self._state = state
        self._alias = alias
        self._reservations: dict[int, _Reservation] = {}
        self._num_given = 0
        self._in_flight: defaultdict[str, dict[Any, int]] = defaultdict(dict)
        """By partition, groups with a credit to the weight version of their admission."""

    # Puts

    def check(self, put: Put) -> list[Row | None]:
        """Validate a put, whatever room there is; raises as `TransferQueue.put` does.

        Returns, per row, the existing row that it adds to or None for a new one; empty if all rows are new.
        """
        home = self._state.partitions.get(put.partition)
        options = self._options(put.partition)
        checks.check_put(put, home)
        if put.credits:
            self._check_credits(put)
        if put.leases:
            ledger = home.tasks.get(put.task) if home else None
            checks.check_leases(
                ledger, put.partition, put.task, put.rows, put.leases, put.sample_ids or (), may_be_acked=True
            )
        existing = self._existing(put, home)
        if existing:
            checks.check_unfilled(put.partition, [row for row in existing if row], (*put.schema, *put.shared))
        if put.shared:
            check_group_columns(put, home, existing)
        if options is not DEFAULT_OPTIONS:
            num_new = existing.count(None) if existing else put.num_rows
            self._check_possible(put.partition, num_new, put.nbytes if num_new else 0, "a put")
        return existing

    def put(self, put: Put) -> list[Row] | None:
        """Enter a put's rows; None: it has to wait for room.

        Raises:
            TransferQueueError: as `check`.
        """
        existing = self.check(put)
        if self._options(put.partition) is DEFAULT_OPTIONS and not put.credits:
            return self.enter(put, existing)
        num_new, nbytes = existing.count(None) if existing else put.num_rows, put.nbytes
        used = [self._reservations[number] for number in put.credits]
        if num_new:
            rows_left = max(0, num_new - sum(each.num_rows for each in used))
            bytes_left = max(0, nbytes - sum(each.num_bytes for each in used))
            if not self._has_room(put.partition, rows_left, bytes_left):
                return None
        admitted = {each.credit.group_id: each.credit.weight_version for each in used}
        for each in used:
            num_new, each.num_rows = max(0, num_new - each.num_rows), max(0, each.num_rows - num_new)
            nbytes, each.num_bytes = max(0, nbytes - each.num_bytes), max(0, each.num_bytes - nbytes)
            if not each.num_rows or each.credit.group_id is not None:
                self.release(each.credit.number)
        if None not in admitted and put.tags:
            put.tags = [{**tags, ADMITTED: admitted[tags["group_id"]]} for tags in put.tags] if admitted else put.tags
        return self.enter(put, existing)

    def _check_credits(self, put: Put) -> None:
        """Check that credits are good, and that they are those of the groups in a put, which may not be too old.

        Raises:
            QueueFullError: a credit is not good for the partition any more.
            SchemaError: a row is of another group, or a group's rows come without tags.
            StaleVersionError: the staleness policy has given up a group with such old tokens.
        """
        admitted = {self._promise(put, number).credit.group_id: number for number in put.credits}
        if None in admitted:
            return
        groups: dict[Any, list[int]] = {}
        for tags in put.tags or ({},) * put.num_rows:
            groups.setdefault(tags.get("group_id"), []).append(tags.get("weight_version_min", 0))
        if groups.keys() != admitted.keys():
            raise SchemaError(f"the credits are for the groups {[*admitted]}, and the rows are of {[*groups]}")
        index = self.groups(put.partition)
        for group, versions in groups.items() if index is not None else ():
            since = self._reservations[admitted[group]].credit.weight_version
            if index is not None and index.is_late(Span(admitted=since, oldest=min(versions)), group):
                raise StaleVersionError(
                    f"group {group!r} has tokens of weight version {min(versions)}, which the staleness policy of "
                    f"partition {put.partition!r} gives up at version {index.version}; generate another"
                )

    def enter(self, put: Put, existing: list[Row | None]) -> list[Row]:
        """Enter a put that passed `check` and has room; `existing` is the result of `check`."""
        state = self._state
        if put.partition not in state.partitions:
            state.open(put.partition, state.next_generation)
        home = state.partitions[put.partition]
        names: Sequence[str | None] | None = put.sample_ids
        numbers: Sequence[int]
        if existing:
            following = count(state.next_row)
            numbers = [next(following) if row is None else row.number for row in existing]
        else:
            numbers = range(state.next_row, state.next_row + put.num_rows)
            if home.by_name:
                names = [_untaken(f"row{number}", home) for number in numbers]
        rows = state.put(
            put.partition, put.extent, put.schema, put.nbytes, put.num_rows, put.label, None, numbers, names, put.tags,
        )  # fmt: skip
        if put.shared:
            share_group_columns(state, home, put, rows, self._alias)
        return rows

    def _existing(self, put: Put, home: Partition | None) -> list[Row | None]:
        """Per row of a put, the existing row or None for a new one; empty if all rows are new."""
        if put.rows:
            return [*checks.find_rows(self._state, put.partition, put.generation, put.rows, put.sample_ids or ())]
        if put.sample_ids is None:
            return []
        return [home.find(sample_id) if home else None for sample_id in put.sample_ids]

    # Credits

    def admit(self, request: Admission) -> Credit | None:
        """Reserve room and return a credit; None: it has to wait.

        Raises:
            QueueFullError: the limits are smaller than the request.
        """
        name = request.partition
        if request.num_rows < 1 or request.num_bytes < 0:
            raise SchemaError(f"a credit is for 1 row or more and 0 bytes or more, not {request.num_rows} rows and {request.num_bytes} bytes")  # fmt: skip  # noqa: E501
        self._check_possible(name, request.num_rows, request.num_bytes, "a credit")
        index, group = self.groups(name), request.group_id
        if (index is None) != (group is None) or isinstance(group, list | dict):
            raise SchemaError(
                f"group_id is {group!r}: partition {name!r} has "
                + (
                    "no staleness policy"
                    if index is None
                    else "a staleness policy; name the group that is to be generated"
                )
            )
        if group in self._in_flight[name]:
            raise SchemaError(f"group {group!r} of partition {name!r} has a credit already")
        if (index is not None and not index.has_room) or not self._has_room(name, request.num_rows, request.num_bytes):
            return None
        self._num_given += 1
        credit = Credit(
            number=self._num_given, partition=name, num_rows=request.num_rows, num_bytes=request.num_bytes,
            weight_version=self._state.versions.get(name, 0), group_id=group,
        )  # fmt: skip
        self._reservations[self._num_given] = _Reservation(
            partition=name, num_rows=request.num_rows, num_bytes=request.num_bytes, owner=request.owner,
            label=request.label, credit=credit,
        )  # fmt: skip
        if group is not None:
            self._in_flight[name][group] = credit.weight_version
        return credit

    def release(self, credit: int) -> str | None:
        """End a reservation; returns its partition, None if it ended before."""
        reservation = self._reservations.pop(credit, None)
        if reservation is None:
            return None
        self._in_flight[reservation.partition].pop(reservation.credit.group_id, None)
        return reservation.partition

    def owner_left(self, owner: Any) -> set[str]:
        """End the reservations of a client that left; returns their partitions."""
        gone = [number for number, reservation in self._reservations.items() if reservation.owner == owner]
        return {partition for number in gone if (partition := self.release(number)) is not None}

    def groups(self, partition: str, columns: Sequence[str] = ()) -> OutstandingGroups | None:
        """Index of the outstanding groups whose rows have `columns`; None without a staleness policy."""
        options, home = self._options(partition), self._state.partitions.get(partition)
        if options.staleness is None:
            return None
        index = OutstandingGroups(options.staleness)
        if home is not None:
            found = self._state.ledger(home, options.tasks[0]).index(home.rows, columns, options.staleness)
            assert isinstance(found, OutstandingGroups), "a staleness policy makes no other"
            index = found
        index.in_flight, index.version = self._in_flight[partition], self._state.versions.get(partition, 0)
        return index

    def must_wait(self, request: Request, parked: Iterable[Request]) -> bool:
        """Whether a request must queue behind others that wait for room. Added columns and credits need not."""
        if isinstance(request, Put) and (request.credits or request.rows or not self._makes_rows(request)):
            return False
        return any(isinstance(other, Put | Admission) for other in parked)

    # Age

    def expire(self, partition: str) -> AdvanceReport:
        """Clear the groups that the staleness policy gives up at the present weight version; their credits end."""
        index = self.groups(partition)
        if index is None:
            return AdvanceReport(num_cleared=0)
        groups = index.expired()
        rows = sorted(index.rows_of(groups))
        if rows:
            self._state.clear(partition, rows, "stale")
        ended = {group for group in groups if self._in_flight[partition].pop(group, None) is not None}
        for number, each in [*self._reservations.items()] if ended else ():
            if each.partition == partition and each.credit.group_id in ended:
                self.release(number)
        return AdvanceReport(num_cleared=len(rows), groups=tuple(groups))

    # Messages and statistics

    def explain(self, request: Request) -> str:
        """Reason why a put or an admission waits, for error messages."""
        home = self._state.partitions.get(request.partition)
        options = self._options(request.partition)
        wanted = (
            f"{request.num_rows} rows, {request.nbytes} bytes" if isinstance(request, Put)
            else f"room for {request.num_rows} rows, {request.num_bytes} bytes" if isinstance(request, Admission)
            else "something"
        )  # fmt: skip
        rows, nbytes = self._reserved(request.partition)
        holders = sorted({p.label for p in self._reservations.values() if p.partition == request.partition})
        leased = sum(map(home.is_leased, home.rows)) if home else 0
        if (index := self.groups(request.partition)) is not None and not index.has_room:
            return (
                f"{options.staleness} admits no more groups to partition {request.partition!r}: {index.why_waiting()}"
            )
        return (
            f"partition {request.partition!r} has no room for {wanted}: it holds {len(home.rows) if home else 0} of "
            f"{options.max_rows} rows ({leased} leased), {home.nbytes if home else 0} of {options.max_bytes} bytes, "
            + f"and promised {rows} rows, {nbytes} bytes"
            + (f" to {', '.join(holders)}" if holders else "")
            + ". Rows leave when they are cleared"
            + (f", or acked by {list(options.tasks)}" if options.tasks else "")
        )

    def stats(self, partition: str) -> dict[str, Any]:
        """Reserved rows and bytes of a partition, for `stats`."""
        rows, nbytes = self._reserved(partition)
        return {"promised_rows": rows, "promised_bytes": nbytes}

    # Parts

    def _options(self, partition: str) -> PartitionOptions:
        return self._state.options.get(partition, DEFAULT_OPTIONS)

    def _promise(self, put: Put, credit: int) -> _Reservation:
        reservation = self._reservations.get(credit)
        if reservation is None or reservation.partition != put.partition:
            raise QueueFullError(
                f"credit {credit} is not good for partition {put.partition!r}"
                + (f" but for {reservation.partition!r}" if reservation else ": it is used up or was released")
                + "; ask for another with admit()"
            )
        return reservation

    def _makes_rows(self, put: Put) -> bool:
        home = self._state.partitions.get(put.partition)
        return home is None or put.sample_ids is None or not all(home.find(i) for i in put.sample_ids)

    def _check_possible(self, partition: str, num_rows: int, nbytes: int, what: str) -> None:
        options = self._options(partition)
        for amount, limit, unit in ((num_rows, options.max_rows, "rows"), (nbytes, options.max_bytes, "bytes")):
            if limit is not None and amount > limit:
                raise QueueFullError(
                    f"{what} of {amount} {unit} can never enter partition {partition!r}, which takes {limit}: put "
                    "fewer at once, or configure a larger limit"
                )

    def _has_room(self, partition: str, num_rows: int, nbytes: int) -> bool:
        options = self._options(partition)
        if options.max_rows is None and options.max_bytes is None:
            return True
        home = self._state.partitions.get(partition)
        held_rows, held_bytes = (len(home.rows), home.nbytes) if home else (0, 0)
        promised_rows, promised_bytes = self._reserved(partition)
        return (
            options.max_rows is None or not num_rows or held_rows + promised_rows + num_rows <= options.max_rows
        ) and (options.max_bytes is None or not nbytes or held_bytes + promised_bytes + nbytes <= options.max_bytes)

    def _reserved(self, partition: str) -> tuple[int, int]:
        mine = [reservation for reservation in self._reservations.values() if reservation.partition == partition]
        return sum(reservation.num_rows for reservation in mine), sum(reservation.num_bytes for reservation in mine)


def _untaken(name: str, home: Partition) -> str | None:
    """Similar name for a new row whose default name a caller used for another; None if the default is free."""
    if name not in home.by_name:
        return None
    while name in home.by_name:
        name += "+"
    return name


def check_group_columns(put: Put, home: Partition | None, existing: Sequence[Row | None]) -> None:
    """Check that rows of a put can share columns with their groups.

    Raises:
        SchemaError: a row has no group.
        MissingDataError: no row of its group has such a column.
    """
    for name in put.shared:
        lacking: dict[str, None] = {}
        for i in range(put.num_rows):
            tags = put.tags[i] if put.tags else {}
            row = existing[i] if existing else None
            group = tags.get("group_id", row.group if row else None)
            if group is None:
                raise SchemaError(
                    f"column {name!r} is that of each row's group, and a row has no tag 'group_id': tag all of them"
                )
            if home is None or not any(name in home.rows[number].columns for number in home.by_group.get(group, ())):
                lacking[repr(group)] = None
        if lacking:
            raise MissingDataError(
                f"no row of {len(lacking)} groups of partition {put.partition!r} has {name!r} "
                f"({few([*lacking], quote=False)}): put its values, PerGroup(values), with the first rows of a group"
            )


def share_group_columns(
    state: State, home: Partition, put: Put, rows: Sequence[Row], alias: Callable[[int], int]
) -> None:
    """Let new rows refer to the columns of their groups; `alias(extent)` gives an extent's memory a second number."""
    places: defaultdict[tuple[int, frozenset[str]], list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        wanted = frozenset(put.shared)
        found: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
        for name in wanted:
            extent, index = _holder(home, row, name, wanted)
            found[extent.number, index].add(name)
        for (number, index), names in found.items():
            places[number, frozenset(names)].append((row.number, index))
    for (number, names), takers in places.items():
        is_whole = state.extents[number].columns == names
        extent = number if is_whole else alias(number)
        state.share(home.name, extent, number, sorted(names), *map(list, zip(*takers, strict=True)))


def _holder(home: Partition, row: Row, name: str, wanted: frozenset[str]) -> tuple[Extent, int]:
    """Extent and index that hold a column for a row's group; preferably an extent with no other columns."""
    found: tuple[Extent, int] | None = None
    for number in home.by_group[row.group]:
        for extent, index in home.rows[number].pieces:
            if name in extent.columns:
                found = extent, index
                if extent.columns <= wanted:
                    return found
    assert found is not None
    return found
