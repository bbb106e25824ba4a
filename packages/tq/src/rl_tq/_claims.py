"""What a claim is answered: rows that its policy picks of those that are ready for its task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_tq._replicas import Replicas
from rl_tq._requests import Batch, Claim, batch_of
from rl_tq.errors import PolicyError
from rl_tq.policies import RankAware

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_tq._admission import Admissions
    from rl_tq._leases import Leases
    from rl_tq._state import State


class Claims:
    """Answers claims of a state, each with a lease."""

    def __init__(self, state: State, admissions: Admissions, leases: Leases) -> None:
        self._state = state
        self._admissions = admissions
        self._leases = leases
        self._replicas = Replicas()
        self.has_rejected = False
        """Whether a claim cleared rows, so that somebody may have room now; whoever reads it resets it."""

    def answer(self, claim: Claim, now: float) -> Batch | None:
        """Rows for a claim, or the list that a sampler asks for; None: it has to wait.

        Raises:
            PolicyError: a row stands in the way; the task is none of the partition's.
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
        ledger = self._state.ledger(home, claim.task)
        is_replicated = isinstance(claim.policy, RankAware)
        if is_replicated and (given := self._replicas.find(claim, home, ledger)) is not None:
            return given
        index = ledger.index(home, claim.columns, claim.policy)
        if index.rejected and self._admissions.drop_rejected(home, index.rejected):
            self.has_rejected = True
        if not claim.is_claim:
            if len(index) < claim.batch_size or home.changed <= claim.after:
                return None
            return batch_of(home, [home.rows[number] for number in index.oldest()])
        rows = index.take(claim.batch_size)
        if rows is None:
            return None
        batch = self._leases.give(home, claim, rows, now, taken_from=index)
        if is_replicated:
            self._replicas.note(claim, home, batch)
        return batch

    def give(self, claim: Claim, rows: Sequence[int], now: float) -> Batch | None:
        """The very rows that a sampler chose, or none of them (None) if one is no longer to be had."""
        home = self._state.partitions.get(claim.partition)
        if home is None:
            return None
        ready = self._state.ledger(home, claim.task).index(home, claim.columns, claim.policy).members
        if not rows or len(set(rows)) < len(rows) or any(row not in ready for row in rows):
            return None
        return self._leases.give(home, claim, rows, now)

    def forget(self, partition: str) -> None:
        """A partition is cleared."""
        self._replicas.forget(partition)
