"""Metadata store of a queue (sans-I/O): puts, claims, acks, parked requests and their consequences.

No I/O, clock, threads or tensors. The host calls one method at a time, sets `now` before it, and afterwards delivers
what `drain` returns. Every method does all of its work or none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_tq.errors import WaitTimeoutError
from rl_tq.metadata import checks
from rl_tq.metadata.admission import Admissions
from rl_tq.metadata.checks import few
from rl_tq.metadata.leasing import Claims, Leases
from rl_tq.metadata.ledger import Timers
from rl_tq.metadata.parking import Parking
from rl_tq.metadata.requests import Admission, Batch, Claim, Located, Outcome, Put, Request, batch_of
from rl_tq.metadata.rows import runs_of
from rl_tq.metadata.state import State
from rl_tq.policies import Fifo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rl_tq.metadata.ledger import TaskLedger
    from rl_tq.metadata.rows import Partition
    from rl_tq.types import AdvanceReport, Credit, RestoreReport
    from rl_tq.types.staleness import OutstandingGroups


class MetadataStore:
    """Metadata store: the state of a queue, and the requests parked for it."""

    def __init__(self, alias: Callable[[int], int]) -> None:
        """`alias(extent)` has the host give the memory of an extent a second number."""
        self.state = State()
        self.now = 0.0
        """The host's clock, seconds; it never goes back."""
        self.num_expired = 0
        """Leases that ended at their deadline."""
        self._admissions = Admissions(self.state, alias)
        self.timers = Timers()
        """Timers; `expire` must be called by `timers.earliest`."""
        self._leases = Leases(self.state, self.timers)
        self._claims = Claims(self.state, self._admissions, self._leases)
        self._parking = Parking(self.state, self._admissions, self._claims, self.timers)
        self.parked = self._parking.waiting.keys
        """Keys of the requests that wait."""

    # Rows in and out

    def put(self, put: Put) -> Batch | None:
        """Make an extent's rows visible, or park the put while there is no room for it and return None.

        Raises:
            TransferQueueError: of the kinds that `TransferQueue.put` lists.
        """
        if put.is_plain and put.partition not in self.state.options and not self._parking.waiting.line(put.partition):
            # Fast path of most puts: no limits, and no parked requests.
            home = self.state.partitions.get(put.partition)
            checks.check_put(put, home)
            rows = self._admissions.enter(put, [])
            home = home or self.state.partitions[put.partition]
            return batch_of(home, rows, put.schema.names, range(rows[0].number, rows[0].number + put.num_rows))
        return self._parking.answer(put, self.now)

    def admit(self, request: Admission) -> Credit | None:
        """Reserve room for rows to be generated, or park the request and return None.

        Raises:
            QueueFullError: the limits are smaller than the request.
        """
        return self._parking.answer(request, self.now)

    def release(self, credit: int) -> None:
        """Return a credit, used up or not."""
        partition = self._admissions.release(credit)
        if partition is not None:
            self._parking.resolve(partition, self.now)

    def locate(
        self,
        *,
        partition: str,
        columns: Sequence[str],
        generation: int = 0,
        rows: Sequence[int] = (),
        sample_ids: Sequence[str] = (),
    ) -> Located:
        """Locations of the columns of rows.

        Raises:
            StaleReferenceError: a row, or its whole generation, was cleared.
            MissingDataError: a row has no such column, or (in a reference by ids alone) there is no such row.
        """
        found = checks.find_rows(self.state, partition, generation, rows, sample_ids)
        checks.check_columns(partition, found, columns)
        schema = self.state.partitions[partition].schema
        which, runs = runs_of(found, columns)
        extents = {run[0] for each in runs for run in each}
        return Located(columns={c: (schema[c], which[c]) for c in columns}, runs=runs, extents=extents)

    def clear_rows(
        self, *, partition: str, generation: int = 0, rows: Sequence[int] = (), sample_ids: Sequence[str] = ()
    ) -> None:
        """Clear rows: all of them, or none if one was cleared before.

        Raises:
            StaleReferenceError, MissingDataError: as `locate`.
        """
        found = {row.number for row in checks.find_rows(self.state, partition, generation, rows, sample_ids)}
        self.state.clear(partition, sorted(found), None)
        self._parking.resolve(partition, self.now)

    def clear_partition(self, partition: str) -> None:
        """Clear a partition: rows, schema and consumption. A no-op if it does not exist."""
        if partition in self.state.partitions:
            self.state.clear_all(partition)
            self._parking.resolve(partition, self.now)

    def configure(self, partition: str, options: Mapping[str, Any]) -> None:
        """Set a partition's options; it need not exist yet.

        Raises:
            ValueError: an option is unknown, or a value not allowed.
        """
        self.state.configure(partition, options)
        self._parking.resolve(partition, self.now)

    def advance(self, partition: str, weight_version: int) -> AdvanceReport:
        """Set the weight version, and clear rows and groups that are now too old.

        Raises:
            ValueError: versions only grow.
        """
        held = self.state.versions.get(partition, 0)
        if weight_version < held:
            raise ValueError(
                f"the weight version of partition {partition!r} is {held} and cannot become {weight_version}"
            )
        self.state.advance(partition, weight_version)
        report = self._admissions.expire(partition)
        self._parking.resolve(partition, self.now)
        return report

    # Claiming

    def claim(self, claim: Claim) -> Batch | None:
        """Answer at once, or park the claim and return None: `drain` gives the outcome later.

        Raises:
            PolicyError: the policy can never give one of the rows; or the partition does not declare the task.
        """
        answer = self._claims.answer(claim, self.now)
        if answer is None:
            self._parking.waiting.park(claim)
        if self._claims.has_made_room:
            self._parking.resolve(claim.partition, self.now)
        return answer

    def claim_rows(self, claim: Claim, rows: Sequence[int]) -> Batch | None:
        """Claim exactly the rows that a sampler chose; None, and no claim, if one of them is no longer ready."""
        return self._claims.give(claim, rows, self.now)

    def ack(self, *, partition: str, generation: int, task: str, rows: Sequence[int], leases: Sequence[int], step: int,
            sample_ids: Sequence[str] = ()) -> None:  # fmt: skip
        """Consume rows at a training step. Acking again under the same lease is a no-op.

        Raises:
            LeaseLostError: a row is leased under another number, or not at all; nothing is acked.
        """
        ledger = ledger_of(self.state, partition, generation, task)
        due = checks.check_leases(ledger, partition, task, rows, leases, sample_ids, may_be_acked=True)
        if due:
            self.state.ack(partition, task, due, step)
            self._leases.retire(partition, due, step)
            self._parking.resolve(partition, self.now)

    def nack(self, *, partition: str, generation: int, task: str, rows: Sequence[int], leases: Sequence[int],
             reason: str, sample_ids: Sequence[str] = ()) -> None:  # fmt: skip
        """Return rows to the queue, for another claim.

        Raises:
            LeaseLostError: as `ack`.
        """
        ledger = ledger_of(self.state, partition, generation, task)
        due = checks.check_leases(ledger, partition, task, rows, leases, sample_ids, may_be_acked=False)
        self._leases.take_back(partition, task, due, reason, is_counted=True)
        self._parking.resolve(partition, self.now)

    def extend(self, *, partition: str, generation: int, task: str, rows: Sequence[int], leases: Sequence[int],
               lease_s: float, sample_ids: Sequence[str] = ()) -> None:  # fmt: skip
        """Set the deadline of leases to `lease_s` seconds from now.

        Raises:
            LeaseLostError: as `ack`.
        """
        ledger = ledger_of(self.state, partition, generation, task)
        checks.check_leases(ledger, partition, task, rows, leases, sample_ids, may_be_acked=False)
        self._leases.extend(leases, lease_s, self.now)

    def restore(self, partition: str, step: int, task: str | None) -> RestoreReport:
        """Revoke every lease and undo every ack after `step`, of one task or all."""
        report = self._leases.restore(partition, step, task)
        self._parking.resolve(partition, self.now)
        return report

    def dead_letters(self, partition: str, task: str) -> tuple[Batch | None, dict[int, str]]:
        """Dead letters of a task, and the reason of each."""
        home = self.state.partitions.get(partition)
        ledger = home.tasks.get(task) if home else None
        if home is None or ledger is None:
            return None, {}
        return batch_of(home, [home.rows[number] for number in sorted(ledger.dead)]), ledger.dead

    def move(self, *, extent: int, nbytes: int, old: Sequence[int], rows: Sequence[int]) -> None:
        """Compaction: move rows from old extents to a new one. Rows cleared meanwhile stay cleared."""
        left = [number for number in old if number in self.state.extents]
        if not left:
            self.state.freed.append(extent)
        else:
            partition = self.state.extents[left[0]].partition
            self.state.move(extent, nbytes, left, rows)
            self._parking.resolve(partition, self.now)

    # Time, and clients that go

    def withdraw(self, key: Any) -> None:
        """Drop a parked request whose caller is gone."""
        if key in self._parking.waiting:
            request = self._parking.waiting.leave(key)
            if isinstance(request, Put):
                self.state.freed.append(request.extent)
            self._parking.resolve(request.partition, self.now)

    def owner_left(self, owner: Any, why: str, *, is_counted: bool) -> None:
        """End the leases and credits of a client that left. `is_counted`: it died, which counts as a failed attempt."""
        touched = self._admissions.owner_left(owner)
        for partition in touched | self._leases.owner_left(owner, why, is_counted=is_counted):
            self._parking.resolve(partition, self.now)

    def adopt(self) -> None:
        """After a replay: leases with a deadline restart, the others end, as their owners are gone."""
        self._leases.adopt(self.now)

    def expire(self) -> None:
        """End the leases and parked requests whose deadline has passed."""
        for kind, key in self.timers.due(self.now):
            if kind == "lease":
                lease = self.state.leases.get(key)
                if lease is not None:
                    self.num_expired += 1
                    self._leases.end(lease, f"its lease ({lease.label}) expired", is_counted=True)
                    self._parking.resolve(lease.partition, self.now)
            else:
                request = self._parking.waiting.find(key)
                self._parking.end(request, WaitTimeoutError(self.explain(request)))
                self._parking.resolve(request.partition, self.now)

    def has_news(self, now: float) -> bool:
        """Whether a deadline has passed, `drain` would return anything, or rows of an extent were cleared."""
        deadline = self.timers.earliest
        return bool(
            self._parking.resolved
            or self.state.freed
            or self.state.shrunk
            or (deadline is not None and deadline <= now)
        )

    def drain(self) -> tuple[list[tuple[Request, Outcome]], list[int]]:
        """Results of parked requests since the last call, and extents that can be freed."""
        settled, freed = self._parking.resolved, self.state.freed
        self._parking.resolved, self.state.freed = [], []
        return settled, freed

    # Looking

    def explain(self, request: Request) -> str:
        """Reason why a request waits: missing rows, columns and their owners."""
        if isinstance(request, Claim):
            groups = self._admissions.groups(request.partition, request.columns)
            return explain_claim(self.state, request, groups if isinstance(request.policy, Fifo) else None)
        return self._admissions.explain(request)

    def stats(self) -> dict[str, Any]:
        """Rows, bytes, columns, consumption and waiters per partition."""
        waiting = self._parking.waiting.counts()
        partitions = {
            name: {**partition_stats(home), "waiters": waiting.pop(name, 0), **self._admissions.stats(name)}
            for name, home in self.state.partitions.items()
        }
        return {
            "partitions": partitions,
            "waiters_elsewhere": dict(waiting),
            "rows": sum(len(home.rows) for home in self.state.partitions.values()),
            "bytes": sum(home.nbytes for home in self.state.partitions.values()),
            "extents": len(self.state.extents),
            "leases": len(self.state.leases),
            "leases_expired": self.num_expired,
        }


def ledger_of(state: State, partition: str, generation: int, task: str) -> TaskLedger | None:
    """Ledger of a task in a generation of a partition; None if there is none."""
    home = state.partitions.get(partition)
    return home.tasks.get(task) if home and home.generation == generation else None


def explain_claim(state: State, request: Claim, groups: OutstandingGroups | None = None) -> str:
    """Reason why a claim waits: ready rows, leases and their holders, missing columns and producers.

    `groups`: outstanding groups, where the partition's staleness policy chooses among them.
    """
    home = state.partitions.get(request.partition)
    wanted = (
        f"task {request.task!r} wanted {request.batch_size} {'rows' if groups is None else 'groups'} of partition "
        f"{request.partition!r} with {list(request.columns)}"
    )
    if groups is not None:
        wanted += f", chosen by {state.options[request.partition].staleness}"
    elif not isinstance(request.policy, Fifo):
        wanted += f", chosen by {request.policy}"
    if home is None:
        where = f"there are {sorted(state.partitions) or 'no partitions'}"
        return f"{wanted}, and nothing was put there; {where}" + ("" if groups is None else f"; {groups.why_waiting()}")
    ledger = state.ledger(home, request.task)
    index = ledger.index(home.rows, request.columns, request.policy) if groups is None else groups
    needs = frozenset(request.columns)
    lacking = [row for row in home.rows.values() if ledger.is_free(row.number) and not needs <= row.columns]
    clauses = [f"{len(index)} of its {len(home.rows)} rows are ready"]
    if not request.is_claim and len(index) >= request.batch_size:
        clauses[0] += ", among which the sampler did not choose"
    clauses[0] += f", {len(ledger.leased) + len(ledger.acked)} were given to this task before"
    clauses[0] += f", {len(lacking)} are incomplete"
    if why := index.why_waiting():
        clauses.append(why)
    for column in request.columns:
        rows = [row for row in lacking if column not in row.columns]
        if rows:
            owners = sorted({extent.owner for row in rows for extent, _ in row.pieces})
            names = few([row.sample_id for row in rows], 3)
            clauses.append(
                f"{len(rows)} lack {column!r} ({names}; the rest of them was put by {few(owners, 3, quote=False)})"
            )
    if ledger.leased:
        clauses.append(_holders(ledger))
    if ledger.dead:
        clauses.append(f"{len(ledger.dead)} are dead letters ({next(iter(ledger.dead.values()))})")
    if home.dropped:
        clauses.append("dropped so far: " + ", ".join(f"{times} {reason}" for reason, times in home.dropped.items()))
    return f"{wanted}: " + "; ".join(clauses)


def _holders(ledger: TaskLedger) -> str:
    leases = {lease.number: lease for lease in ledger.leased.values()}
    clauses = [
        f"{len(lease.rows)} to {lease.label}" + ("" if lease.lease_s is None else f" for {lease.lease_s} s at a time")
        for lease in list(leases.values())[:3]
    ]
    more = f" and {len(leases) - 3} more" if len(leases) > 3 else ""
    return f"leased and not acked: {', '.join(clauses)}{more}"


def partition_stats(home: Partition) -> dict[str, Any]:
    """Counters of one partition."""
    versions = sorted(home.by_version)
    return {
        "generation": home.generation,
        "rows": len(home.rows),
        "bytes": home.nbytes,
        "columns": {column: str(schema) for column, schema in home.schema.items()},
        "weight_version": home.weight_version,
        "lag": home.weight_version - versions[0] if versions else 0,
        "dropped": dict(home.dropped),
        "consumed": {task: len(ledger.leased) + len(ledger.acked) for task, ledger in home.tasks.items()},
        "tasks": {
            task: {
                "leased": len(ledger.leased),
                "acked": ledger.num_acked,
                "dead": len(ledger.dead),
                "returns": sum(ledger.attempts.values()),
            }
            for task, ledger in home.tasks.items()
        },
        "options": home.options.to_json(),
    }
