"""Claims that several ranks make for the same batch: the first is given rows, the others the same ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from rl_tq.policies import RankAware

if TYPE_CHECKING:
    from rl_tq._ledger import TaskLedger
    from rl_tq._requests import Batch, Claim
    from rl_tq._rows import Partition

_Key: TypeAlias = tuple[str, int, str, int, int]


@dataclass(slots=True)
class _Given:
    batch: Batch
    num_left: int
    """Ranks that did not ask for it yet."""


class Replicas:
    """Batches that some of their ranks were given."""

    def __init__(self) -> None:
        self._given: dict[_Key, _Given] = {}

    def find(self, claim: Claim, home: Partition, ledger: TaskLedger) -> Batch | None:
        """What another rank was given for this batch; None if none was, or if it went back since.

        Rows that were cleared since are given all the same: a get of them is refused, where other rows would make the
        ranks differ without a word.
        """
        key = _key(claim, home)
        given = self._given.get(key) if key else None
        if key is None or given is None:
            return None
        if not _is_held(given.batch, home, ledger):
            del self._given[key]
            return None
        given.num_left -= 1
        if not given.num_left:
            del self._given[key]
        return given.batch

    def note(self, claim: Claim, home: Partition, batch: Batch) -> None:
        """Keep a batch for the other ranks."""
        key = _key(claim, home)
        if key is not None and isinstance(claim.policy, RankAware) and claim.policy.num_replicas > 1:
            self._given[key] = _Given(batch, claim.policy.num_replicas - 1)

    def forget(self, partition: str) -> None:
        """A partition is cleared."""
        for key in [key for key in self._given if key[0] == partition]:
            del self._given[key]


def _key(claim: Claim, home: Partition) -> _Key | None:
    policy = claim.policy
    if not isinstance(policy, RankAware):
        return None
    return claim.partition, home.generation, claim.task, policy.dp_rank, policy.batch_index


def _is_held(batch: Batch, home: Partition, ledger: TaskLedger) -> bool:
    """Whether none of the rows went back: each is leased or acked under the batch's lease, or gone."""
    for number in batch.numbers:
        lease = ledger.leased.get(number)
        held = lease.number if lease is not None else ledger.acked.get(number, (0, 0))[1]
        if number in home.rows and held != batch.lease:
            return False
    return True
