"""Schedules and staleness policies: what may overlap, and how far tokens may be behind the trained weights.

Pure: it knows counts and versions, no process and no clock.

A policy answers three questions: how many more groups may be released (`admit`), which finished ones to learn from now
(`select`), and which to give up (`expire`). The field means six things by staleness; each is a policy of about 20
lines, chosen by name (`staleness.policy`). Pacing is preferred to discarding: only `oldest_token` and `group_age` throw
anything away. With `staleness.max_staleness=0` all of them release one batch per version.

A policy of one's own is a subclass, a schedule of one's own a function of the configuration: see `rl_trainer.plugins`.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from rl_trainer.errors import ConfigError
from rl_trainer.plugins import named

if TYPE_CHECKING:
    from rl_trainer.config import Config

GROUP = "rl_trainer.staleness"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Weight versions of an outstanding group: one that was released and not learned from."""

    released: int
    """Version on the servers when it was released: none of its tokens is older."""
    oldest: int | None = None
    """Version of its oldest token; None while it is being generated."""
    newest: int | None = None
    """Version of its newest token; None while it is being generated."""

    @property
    def since(self) -> int:
        """Version of its oldest token, or while it is being generated the lowest possible one."""
        return self.released if self.oldest is None else self.oldest


class AgeBound(NamedTuple):
    """Ages that tokens may have, in weight versions behind those that learn."""

    least: int = 0
    """Lowest age."""
    most: int | None = None
    """Highest age; None: the policy bounds something else."""


Outstanding = Mapping[int, Span]
"""Outstanding groups by id: released and not learned from, finished or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessPolicy(ABC):
    """Staleness policy; this base releases `1 + max_staleness` batches and takes finished groups, oldest tokens first.

    `expire` is asked before `select`; what it gives up is replaced and no longer outstanding.
    """

    takes_fractions: ClassVar[bool] = False
    """Whether `max_staleness` may be other than a whole number."""

    max_staleness: float
    """Highest staleness, in the policy's own unit."""
    batch_size: int
    """Groups per step."""

    def __post_init__(self) -> None:
        if not self.takes_fractions and self.max_staleness != int(self.max_staleness):
            raise ConfigError(
                f"staleness.max_staleness={self.max_staleness:g} counts whole versions with this staleness.policy; "
                "give a whole number, or choose batch_ratio or threshold_fraction"
            )

    @property
    def bound(self) -> int | None:
        """Versions that the oldest token of a selected group may be behind; None: the policy bounds something else."""
        return math.ceil(self.max_staleness)

    def admit(self, num_outstanding: int) -> int:
        """Number of groups that may be released, given how many are outstanding."""
        return max(0, math.floor((1 + self.max_staleness) * self.batch_size) - num_outstanding)

    def select(self, ready: Collection[int], outstanding: Outstanding, version: int) -> list[int] | None:
        """The `batch_size` finished groups to learn from at weight version `version`; None: wait for more."""
        del version
        return _first(ready, outstanding, self.batch_size)

    def expire(self, outstanding: Outstanding, version: int) -> list[int]:
        """The groups to give up at weight version `version`."""
        del outstanding, version
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission(StalenessPolicy):
    """Admission capacity, in versions: at most `(max_staleness + 1) * batch_size` groups are ahead of the trainer.

    The rule of AReaL (2505.24298, section 5.1: `max_head_offpolicyness`), which SkyRL's asynchronous trainer has too.
    Alone it bounds the average; here the trainer also waits for a straggler before that would become too old.
    """

    def select(self, ready: Collection[int], outstanding: Outstanding, version: int) -> list[int] | None:
        """The first finished groups, if none that is left behind will be too old when its turn comes."""
        chosen = _first(ready, outstanding, self.batch_size)
        return chosen if chosen and _leaves_none_behind(chosen, outstanding, version, self) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OldestToken(StalenessPolicy):
    """Age of the oldest token, in versions: a finished group that has an older one is thrown away and replaced.

    What a replay buffer does that evicts by the version which began a trajectory, as NeMo-RL's (`max_trajectory_age_
    steps`) and torchforge's do. A group that only waited in a server's queue is as young as its first token.
    """

    def expire(self, outstanding: Outstanding, version: int) -> list[int]:
        """Finished groups whose oldest token is older."""
        limit = version - self.max_staleness
        return [group for group, span in outstanding.items() if span.oldest is not None and span.oldest < limit]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAge(StalenessPolicy):
    """Age of the group since its release, in versions: one that is older is given up, finished or not, and replaced.

    As prime-rl cancels rollouts that have lived through too many updates (`max_off_policy_steps`): a straggler never
    holds its place.
    """

    def expire(self, outstanding: Outstanding, version: int) -> list[int]:
        """Groups released longer ago."""
        return [group for group, span in outstanding.items() if span.released < version - self.max_staleness]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRatio(Admission):
    """Batches generated ahead as a ratio, which may be a fraction: 0.5 releases one and a half batches.

    As ROLL's `async_generation_ratio`, by which also the age is bounded (ROLL Flash, 2510.11345). Rounded up to whole
    versions here, and stragglers are waited for.
    """

    takes_fractions: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLength(StalenessPolicy):
    """Length of a queue of whole batches: so many may wait, finished, behind the one that is being generated.

    As OpenRLHF's `async_queue_size`: first in, first out, so that a batch is learned from as it was released, and is as
    many versions old as the queue is long.
    """

    def select(self, ready: Collection[int], outstanding: Outstanding, version: int) -> list[int] | None:
        """The groups that were released first, once all of them are finished."""
        del version
        chosen = sorted(outstanding)[: self.batch_size]
        return chosen if len(chosen) == self.batch_size and set(chosen) <= set(ready) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdFraction(StalenessPolicy):
    """Share of a batch that may be stale, at most 1: so many are released beyond a batch at every version.

    As verl's `staleness_threshold`. What is left of older versions counts against the next release, so no batch holds a
    larger share of them. How old a straggler among them gets is not bounded.
    """

    takes_fractions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.max_staleness > 1:
            raise ConfigError(
                f"staleness.max_staleness={self.max_staleness:g} is a share of the batch with "
                "staleness.policy=threshold_fraction; give 0 to 1"
            )

    @property
    def bound(self) -> int | None:
        """Bound of ages: None, since the share is bounded."""
        return None


POLICIES: Mapping[str, type[StalenessPolicy]] = {
    "admission": Admission,
    "oldest_token": OldestToken,
    "group_age": GroupAge,
    "batch_ratio": BatchRatio,
    "queue_length": QueueLength,
    "threshold_fraction": ThresholdFraction,
}


def create_policy(config: Config) -> StalenessPolicy:
    """The policy that a run asks for, shipped or installed.

    Raises:
        ConfigError: no such policy (lists them), or a number that it cannot take.
    """
    kind: Any = named(config.staleness.policy, POLICIES, group=GROUP, kind=type, key="staleness.policy")
    if not issubclass(kind, StalenessPolicy):
        raise ConfigError(
            f"staleness.policy={config.staleness.policy!r} is not a subclass of StalenessPolicy; make it one"
        )
    return kind(max_staleness=config.staleness.max_staleness, batch_size=config.batch.batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Schedule of the loop: what a training step overlaps with, and how old the tokens may be that it learns from.

    One's own is a function of the configuration that returns one, installed under its name in the entry point group
    `rl_trainer.schedules`; `pipeline` names it.
    """

    policy: StalenessPolicy
    """Policy of how many groups may be outstanding, and which are learned from next."""
    releases_before_update: bool = False
    """The next batch is generated while this one is learned from."""
    releases_after_sync: bool = False
    """The next prompts are released with new weights at once, before an evaluation or a checkpoint."""
    settles_before_sync: bool = True
    """Weights change when nothing is being generated; otherwise under running generations."""
    lag: int = 0
    """Weight versions that a batch generated ahead is behind the weights that learn from it."""
    lags_from: int = 2
    """First step whose batch is generated ahead: that of a first step has no learning to overlap with."""

    @property
    def is_on_policy(self) -> bool:
        """Whether generation and learning take turns, so that both may use the same GPUs."""
        return not (self.releases_before_update or self.releases_after_sync)

    def starting(self, step: int, *, is_ahead: bool) -> Schedule:
        """The schedule from `step` on; `is_ahead`: its batch is there already, from an earlier process."""
        return replace(self, lags_from=step if is_ahead else step + 1)

    def bound_at(self, step: int) -> AgeBound:
        """Ages that tokens of the batch of `step` may have."""
        lag = self.lag if step >= self.lags_from else 0
        return AgeBound(lag, None if self.policy.bound is None else self.policy.bound + lag)


def sync(config: Config) -> Schedule:
    """On-policy schedule: generation and learning take turns."""
    return Schedule(policy=StalenessPolicy(max_staleness=0, batch_size=config.batch.batch_size))


def one_step_off(config: Config) -> Schedule:
    """One-step-off schedule: the next batch is generated while this one is learned from.

    Weights change between two batches, when nothing is being generated.

    `staleness.max_staleness=0` releases it after the new weights instead: the losses are those of `sync`.
    """
    policy = StalenessPolicy(max_staleness=0, batch_size=config.batch.batch_size)
    is_ahead = config.staleness.max_staleness > 0
    return Schedule(policy=policy, releases_before_update=is_ahead, releases_after_sync=not is_ahead, lag=int(is_ahead))


def fully_async(config: Config) -> Schedule:
    """Fully asynchronous schedule: generation runs ahead as `staleness` admits, and weights change under it."""
    return Schedule(policy=create_policy(config), releases_after_sync=True, settles_before_sync=False)


SCHEDULES: Mapping[str, FunctionType] = {
    "sync": sync,
    "one_step_off": one_step_off,
    "fully_async": fully_async,
}
SCHEDULE_GROUP = "rl_trainer.schedules"


def create_schedule(config: Config) -> Schedule:
    """The schedule that `pipeline` names, shipped or installed.

    Raises:
        ConfigError: no such schedule (lists them), or `staleness` has what it cannot take.
    """
    made = named(config.pipeline, SCHEDULES, group=SCHEDULE_GROUP, kind=FunctionType, key="pipeline")(config)
    if not isinstance(made, Schedule):
        raise ConfigError(f"pipeline={config.pipeline!r} gave a {type(made).__name__}; a Schedule is needed")
    return made


def _first(ready: Collection[int], outstanding: Outstanding, count: int) -> list[int] | None:
    """First `count` finished groups by oldest token, then by release; None if there are fewer.

    Group ids grow with every release.
    """
    chosen = sorted(ready, key=lambda group: (outstanding[group].since, group))[:count]
    return chosen if len(chosen) == count else None


def _leaves_none_behind(chosen: list[int], outstanding: Outstanding, version: int, policy: StalenessPolicy) -> bool:
    """Whether every group that is not chosen now can still be learned from in time.

    Of the groups that must be learned from within the next j + 1 steps, counting this one, j batches can wait: the
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
