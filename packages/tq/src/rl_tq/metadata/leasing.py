"""Leases: granted by claims, extended, revoked and expired; rows that all tasks consumed are cleared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_tq.errors import PolicyError
from rl_tq.metadata.requests import Batch, batch_of
from rl_tq.metadata.rows import answered_rows
from rl_tq.policies import Fifo, GroupComplete
from rl_tq.types import RestoreReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rl_tq.metadata.admission import Admissions
    from rl_tq.metadata.ledger import Lease, Timers
    from rl_tq.metadata.requests import Claim
    from rl_tq.metadata.rows import Partition
    from rl_tq.metadata.state import State
    from rl_tq.types.policy import ReadyRows


class Leases:
    """Leases of a state. Callers have checked the lease numbers."""

    def __init__(self, state: State, timers: Timers) -> None:
        self._state = state
        self._timers = timers
        self._owned: dict[Any, set[int]] = {}

    def give(
        self, home: Partition, claim: Claim, rows: Sequence[int], now: float, *, taken_from: ReadyRows | None = None
    ) -> Batch:
        """Lease rows to a claim; `taken_from` as in `State.lease`."""
        is_grouped = isinstance(claim.policy, GroupComplete)
        number = self._state.next_lease
        lease = self._state.lease(home.name, claim.task, number, rows, claim.lease_s, is_grouped, taken_from)
        lease.owner, lease.label = claim.owner, claim.label
        owned = self._owned.setdefault(claim.owner, set())
        owned.add(number)
        if len(owned) > 2 * len(self._state.leases) + 64:  # most of them ended
            owned.intersection_update(self._state.leases)
        if claim.lease_s is not None:
            self._timers.set(("lease", number), now + claim.lease_s)
        columns = frozenset(claim.columns)
        return Batch(
            partition=home.name, generation=home.generation, rows=answered_rows(home, rows, columns), numbers=rows,
            is_bare=home.is_bare, version=home.changed, task=claim.task, lease=number, columns=columns,
        )  # fmt: skip

    def extend(self, leases: Iterable[int], lease_s: float, now: float) -> None:
        """Set the deadlines of leases to `lease_s` seconds from now."""
        for number in set(leases):
            self._state.leases[number].lease_s = lease_s
            self._timers.set(("lease", number), now + lease_s)

    def end(self, lease: Lease, why: str, *, is_counted: bool) -> None:
        """End a lease: all of its rows return to the queue."""
        self.take_back(lease.partition, lease.task, sorted(lease.rows), why, is_counted=is_counted)

    def take_back(self, partition: str, task: str, rows: Sequence[int], why: str, *, is_counted: bool) -> None:
        """Return leased rows to the queue, except those that came back too often (dead)."""
        self._state.give_back(partition, task, rows, why, is_counted)

    def owner_left(self, owner: Any, why: str, *, is_counted: bool) -> set[str]:
        """End the leases of a client that left; returns their partitions."""
        touched: set[str] = set()
        for number in self._owned.pop(owner, set()):
            lease = self._state.leases.get(number)
            if lease is not None:
                touched.add(lease.partition)
                self.end(lease, why, is_counted=is_counted)
        return touched

    def adopt(self, now: float) -> None:
        """After a replay: leases with a deadline restart, the others end, as their owners are gone."""
        for lease in list(self._state.leases.values()):
            if lease.lease_s is None:
                self.end(lease, "the server started again", is_counted=False)
            else:
                lease.label = "a client from before the server's restart"
                self._timers.set(("lease", lease.number), now + lease.lease_s)
        for name, home in self._state.partitions.items():
            home.done.clear()
            for task in home.options.tasks[:1]:
                acked = home.tasks[task].acked if task in home.tasks else {}
                self.retire(name, list(acked), max((step for step, _ in acked.values()), default=0))

    def restore(self, partition: str, step: int, task: str | None) -> RestoreReport:
        """Revoke every lease and undo every ack after `step`, of one task or all."""
        home = self._state.partitions.get(partition)
        num_returned = num_cleared = num_revoked = 0
        for name, ledger in home.tasks.items() if home else ():
            if task not in (None, name):
                continue
            leased = sorted(ledger.leased)
            if leased:
                self.take_back(partition, name, leased, f"step {step} was restored", is_counted=False)
            acked = sorted(number for number, (at, _) in ledger.acked.items() if at > step)
            if acked:
                self._state.unack(partition, name, acked)
            num_revoked += len(leased)
            num_returned += len(acked)
            num_cleared += sum(times for at, times in ledger.cleared.items() if at > step)
        return RestoreReport(num_returned=num_returned, num_cleared=num_cleared, num_revoked=num_revoked)

    def retire(self, partition: str, rows: Iterable[int], step: int) -> None:
        """Clear rows that every declared task acked at least `keep_steps` steps before this one."""
        home = self._state.partitions[partition]
        options = home.options
        if not options.tasks:
            return
        for number in rows:
            acks = [ledger.acked.get(number) for task in options.tasks if (ledger := home.tasks.get(task))]
            if len(acks) == len(options.tasks) and None not in acks:
                home.done.setdefault(max(ack[0] for ack in acks if ack), []).append(number)
        for at in [at for at in home.done if at <= step - options.keep_steps]:
            done = [
                n for n in home.done.pop(at) if n in home.rows and all(n in home.tasks[t].acked for t in options.tasks)
            ]
            if done:
                self._state.clear(partition, done, None)


class Claims:
    """Claims of a state: chooses rows by the policy and grants a lease."""

    def __init__(self, state: State, admissions: Admissions, leases: Leases) -> None:
        self._state = state
        self._admissions = admissions
        self._leases = leases
        self.has_made_room = False
        """Whether a claim cleared rows or took admitted groups, so that others may enter; the reader resets it."""

    def answer(self, claim: Claim, now: float) -> Batch | None:
        """Answer a claim with rows, or with the list that a sampler asks for; None: it has to wait.

        Raises:
            PolicyError: the policy can never give one of the rows; or the partition does not declare the task.
        """
        home = self._state.partitions.get(claim.partition)
        options = self._state.options.get(claim.partition)
        if options is not None and (tasks := options.tasks) and claim.task not in tasks:
            raise PolicyError(
                f"partition {claim.partition!r} is consumed by the tasks {list(tasks)}, and {claim.task!r} is none of "
                "them: claim for one of these, or configure the partition"
            )
        if home is None:
            return None
        groups = self._admissions.groups(claim.partition, claim.columns) if isinstance(claim.policy, Fifo) else None
        index = groups
        if index is None:
            index = self._state.ledger(home, claim.task).index(home.rows, claim.columns, claim.policy)
        if not claim.is_claim:
            if len(index) < claim.batch_size or home.changed <= claim.after:
                return None
            return batch_of(home, [home.rows[number] for number in index.oldest()])
        rows = index.take(claim.batch_size)
        if rows is None:
            return None
        self.has_made_room = self.has_made_room or (options is not None and options.staleness is not None)
        return self._leases.give(home, claim, rows, now, taken_from=index)

    def give(self, claim: Claim, rows: Sequence[int], now: float) -> Batch | None:
        """Claim exactly the rows that a sampler chose; None, and no claim, if one of them is no longer ready."""
        home = self._state.partitions.get(claim.partition)
        if home is None:
            return None
        ready = self._state.ledger(home, claim.task).index(home.rows, claim.columns, claim.policy).members
        if not rows or len(set(rows)) < len(rows) or any(row not in ready for row in rows):
            return None
        return self._leases.give(home, claim, rows, now)
