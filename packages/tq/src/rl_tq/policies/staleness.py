"""Staleness policies: the field's six meanings of the word, for the option `staleness` of a partition.

Pacing is preferred to discarding: only `oldest_token` and `group_age` give anything up. With `max_staleness=0` all of
them admit one batch per weight version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rl_tq.types.staleness import Span, StalenessPolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission(StalenessPolicy):
    """Admission capacity, in versions: at most `(max_staleness + 1) * batch_size` groups are ahead of the consumer.

    The rule of AReaL (2505.24298, section 5.1: `max_head_offpolicyness`), which SkyRL's asynchronous trainer has too.
    Alone it bounds the average; here a claim also waits for a straggler before that would become too old.
    """

    name: ClassVar[str] = "admission"

    def select(self, finished: Collection[Any], outstanding: Mapping[Any, Span], version: int) -> list[Any] | None:
        """The first finished groups, if none that is left behind will be too old when its turn comes."""
        chosen = StalenessPolicy.select(self, finished, outstanding, version)
        return chosen if chosen and _leaves_none_behind(chosen, outstanding, version, self) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OldestToken(StalenessPolicy):
    """Age of the oldest token, in versions: a finished group that has an older one is given up.

    What a replay buffer does that evicts by the version which began a trajectory, as NeMo-RL's (`max_trajectory_age_
    steps`) and torchforge's do. A group that only waited in a server's queue is as young as its first token.
    """

    name: ClassVar[str] = "oldest_token"

    def expire(self, outstanding: Mapping[Any, Span], version: int) -> list[Any]:
        """Finished groups whose oldest token is older."""
        limit = version - self.max_staleness
        return [group for group, span in outstanding.items() if span.oldest is not None and span.oldest < limit]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAge(StalenessPolicy):
    """Age of the group since its admission, in versions: one that is older is given up, finished or not.

    As prime-rl cancels rollouts that have lived through too many updates (`max_off_policy_steps`): a straggler never
    occupies capacity for long.
    """

    name: ClassVar[str] = "group_age"

    def expire(self, outstanding: Mapping[Any, Span], version: int) -> list[Any]:
        """Groups admitted longer ago."""
        return [group for group, span in outstanding.items() if span.admitted < version - self.max_staleness]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRatio(Admission):
    """Batches generated ahead as a ratio, which may be a fraction: 0.5 admits one and a half batches.

    As ROLL's `async_generation_ratio`, by which also the age is bounded (ROLL Flash, 2510.11345). Rounded up to whole
    versions here, and stragglers are waited for.
    """

    name: ClassVar[str] = "batch_ratio"
    takes_fractions: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLength(StalenessPolicy):
    """Length of a queue of whole batches: so many may wait, finished, behind the one that is in flight.

    As OpenRLHF's `async_queue_size`: first in, first out, so that a batch is consumed as it was admitted, and is as
    many versions old as the queue is long.
    """

    name: ClassVar[str] = "queue_length"

    def select(self, finished: Collection[Any], outstanding: Mapping[Any, Span], version: int) -> list[Any] | None:
        """The groups that were admitted first, once all of them are finished."""
        del version
        chosen = sorted(outstanding)[: self.batch_size]
        return chosen if len(chosen) == self.batch_size and set(chosen) <= set(finished) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdFraction(StalenessPolicy):
    """Share of a batch that may be stale, at most 1: so many are admitted beyond a batch at every version.

    As verl's `staleness_threshold`. What is left of older versions counts against the next admission, so no batch has a
    larger share of them. How old a straggler among them gets is not bounded.
    """

    name: ClassVar[str] = "threshold_fraction"
    takes_fractions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        StalenessPolicy.__post_init__(self)
        if self.max_staleness > 1:
            raise ValueError(
                f"max_staleness={self.max_staleness:g} is a share of the batch with the policy {self.name}; give 0 to 1"
            )

    @property
    def bound(self) -> int | None:
        """Bound of ages: None, since the share is bounded; 0 if that is 0."""
        return None if self.max_staleness else 0


def _leaves_none_behind(
    chosen: list[Any], outstanding: Mapping[Any, Span], version: int, policy: StalenessPolicy
) -> bool:
    """Whether every group that is not chosen now can still be claimed in time.

    Of the groups that must be claimed within the next j + 1 versions, counting this one, j batches can wait: the
    others have to be in this one, for every j.
    """
    assert policy.bound is not None, "the callers bound the age"
    for j in range(policy.bound + 1):
        limit = version - policy.bound + j
        num_due = sum(span.since <= limit for span in outstanding.values())
        num_chosen = sum(outstanding[group].since <= limit for group in chosen)
        if num_chosen < num_due - j * policy.batch_size:
            return False
    return True
