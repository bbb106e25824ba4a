"""Elastic rollout: how many replicas a run has, decided after every step from what the loop measured of it.

A policy sees a `Load` and says how many replicas it wants; it knows nothing of processes. `Elastic` keeps it within
`rollout.elastic`'s bounds and asks the replica set. One of your own is a subclass of `ElasticPolicy`: a plug-in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from rl_trainer.errors import ConfigError
from rl_trainer.plugins import named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_trainer.config.schema import ElasticSection
    from rl_trainer.metrics import StepRecord
    from rl_trainer.runtime.base import ReplicaSet

GROUP = "rl_trainer.elastic"
_JOIN_STEPS = 10
"""Steps that a replica which was asked for may take to join before the policy is asked again."""
_IDLE_SHARE, _LENT_SHARE, _WAITING_SHARE = 0.02, 0.05, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of a step: generation and learning compared."""

    step: int
    """Number of the training step."""
    num_replicas: int
    """Replicas that are there."""
    wait_share: float
    """Share of the step, evaluation left out, in which learning waited for groups; 0 to 1."""
    num_ready: int
    """Finished groups that wait to be learned from."""
    num_running: int
    """Groups that are being generated."""
    batch_size: int
    """Groups that a step learns from."""
    staleness_mean: float
    """Age of a sample's oldest token, weight versions."""
    late_groups: float
    """Groups that were given up as too old."""
    is_lent: bool = False
    """Whether the engine's GPUs generated while learning waited."""

    @classmethod
    def of(cls, record: StepRecord, num_replicas: int, batch_size: int) -> Load:
        """Load of a training step, by its record."""
        busy_s = record.wall_s - record.phase_s.get("eval", 0.0)
        return cls(
            step=record.step,
            num_replicas=num_replicas,
            wait_share=record.phase_s.get("wait_generate", 0.0) / busy_s if busy_s > 0 else 0.0,
            num_ready=len(record.held),
            num_running=len(record.pending),
            batch_size=batch_size,
            staleness_mean=record.metrics.get("staleness_mean", 0.0),
            late_groups=record.metrics.get("late_groups", 0.0),
        )


class ElasticPolicy(ABC):
    """Decides how many replicas a run has.

    Args:
        patience: Steps in a row that have to ask for a change before it is made.
    """

    def __init__(self, *, patience: int) -> None:
        self.patience = patience

    @abstractmethod
    def wanted(self, load: Load) -> int:
        """Replicas that the next steps are to have, called after every training step in which none is joining."""

    def lends(self, load: Load) -> bool:
        """Whether the next step lends the engine's GPUs while it waits, with `rollout.elastic.lend`.

        By default where learning waited for over 20% of the last step; once lent, until it waits for less than 5%.
        """
        return load.wait_share > (_LENT_SHARE if load.is_lent else _WAITING_SHARE)


class WaitShare(ElasticPolicy):
    """Elastic policy: one replica more where learning waits, one fewer where generation is ahead.

    More: learning waited for over 20% of each of the last `patience` steps. Fewer: it waited for less than 2%, and a
    whole batch was finished in addition to the one that was learned from.
    """

    def __init__(self, *, patience: int) -> None:
        super().__init__(patience=patience)
        self._change, self._count = 0, 0

    def wanted(self, load: Load) -> int:
        """The current number, or an adjacent one."""
        is_ahead = load.wait_share < _IDLE_SHARE and load.num_ready >= load.batch_size
        change = 1 if load.wait_share > _WAITING_SHARE else -1 if is_ahead else 0
        self._count = self._count + 1 if change == self._change else 1
        self._change = change
        if not change or self._count < self.patience:
            return load.num_replicas
        self._count = 0
        return load.num_replicas + change


POLICIES: Mapping[str, type[ElasticPolicy]] = {"wait_share": WaitShare}


def create_policy(section: ElasticSection) -> ElasticPolicy:
    """The policy that `rollout.elastic.policy` names, shipped or a plug-in.

    Raises:
        ConfigError: there is none (lists them), or it is something else.
    """
    key = "rollout.elastic.policy"
    found: Any = named(section.policy, POLICIES, group=GROUP, kind=type, key=key)
    if not issubclass(found, ElasticPolicy):
        raise ConfigError(
            f"{key}={section.policy!r} leads to {found.__name__}, which is not a subclass of ElasticPolicy"
        )
    return found(patience=section.patience)


class Lender(Protocol):
    """What gives the engine's GPUs to replicas from one sync to the next step."""

    lends: bool
    """Whether the next sync does."""


class Elastic:
    """Has a replica set follow a policy."""

    def __init__(
        self,
        section: ElasticSection,
        replicas: ReplicaSet[Any],
        *,
        num_replicas: int,
        batch_size: int,
        weights: Lender | None = None,
    ) -> None:
        self._section, self._replicas, self._batch_size = section, replicas, batch_size
        self._weights = weights
        self._policy, self._target, self._num_waits = create_policy(section), num_replicas, 0

    def follow(self, record: StepRecord) -> list[str]:
        """Ask the policy after a step, and start or end replicas; returns what was begun, in sentences."""
        if record.is_evaluation:
            return []
        there = len(self._replicas.members)
        load = Load.of(record, there, self._batch_size)
        return [*self._lend(load), *self._resize(load)]

    def _lend(self, load: Load) -> list[str]:
        """Decide for the sync after the next step."""
        weights = self._weights
        if weights is None or not self._section.lend:
            return []
        was_lent, weights.lends = weights.lends, self._policy.lends(replace(load, is_lent=weights.lends))
        if was_lent == weights.lends:
            return []
        what = "are lent while learning waits" if weights.lends else "are lent no more"
        return [f"rollout.elastic: the engine's GPUs {what}; it waited for {load.wait_share:.0%} of step {load.step}"]

    def _resize(self, load: Load) -> list[str]:
        there = load.num_replicas
        if there < self._target and self._num_waits < _JOIN_STEPS:  # the load is another once it is there
            self._num_waits += 1
            return []
        self._num_waits = 0
        section = self._section
        self._target = min(max(self._policy.wanted(load), section.min_replicas), section.max_replicas)
        if self._target == there:
            return []
        self._replicas.resize(self._target)
        return [
            f"rollout.elastic: {there} replicas to {self._target} after step {load.step}, in which learning waited "
            f"for {load.wait_share:.0%} and {load.num_ready} finished groups were left"
        ]
