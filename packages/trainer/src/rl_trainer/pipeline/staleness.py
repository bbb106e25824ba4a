"""Schedules: what a training step may overlap with, and how old the tokens may be that it learns from.

How many groups may be outstanding, which a batch gets and which are given up is decided by the queue, by the staleness
policy (`rl_tq.types.StalenessPolicy`) that the schedule names: shipped ones by name, others as an entry point of
`rl_tq.policies`, a `FILE.py:NAME` or an object. A custom schedule is a function of the configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_tq.registry import register_policy, staleness_policies
from rl_tq.types import StalenessPolicy
from rl_trainer.errors import ConfigError
from rl_trainer.plugins import named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_trainer.config import Config

POLICY_GROUP = "rl_tq.policies"


class AgeBound(NamedTuple):
    """Ages that tokens may have, in weight versions behind those that learn."""

    least: int = 0
    """Lowest age."""
    most: int | None = None
    """Highest age; None: the policy bounds something else."""


def create_policy(name: str, *, max_staleness: float, batch_size: int) -> StalenessPolicy:
    """The staleness policy of that name, for `Schedule.policy`.

    Raises:
        ConfigError: no such policy (lists them), or a number that it cannot take.
    """
    known = staleness_policies()
    kind: Any = named(name, known, group=POLICY_GROUP, kind=type, key="staleness.policy")
    if not issubclass(kind, StalenessPolicy):
        raise ConfigError(f"staleness.policy={name!r} is not a subclass of StalenessPolicy; make it one")
    try:
        return kind(max_staleness=max_staleness, batch_size=batch_size)
    except ValueError as error:
        raise ConfigError(f"staleness.policy={name}, staleness.max_staleness={max_staleness:g}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Schedule of the loop: what a training step overlaps with, and how old the tokens may be that it learns from.

    A custom one is made by a function of the configuration, installed under its name in the entry point group
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
        late = math.ceil(self.policy.num_extra / self.policy.batch_size)
        return AgeBound(lag, None if self.policy.bound is None else self.policy.bound + lag + late)


def sync(config: Config) -> Schedule:
    """On-policy schedule: generation and learning take turns."""
    return Schedule(policy=create_policy("threshold_fraction", max_staleness=0, batch_size=config.batch.batch_size))


def one_step_off(config: Config) -> Schedule:
    """One-step-off schedule: the next batch is generated while this one is learned from.

    Weights change between two batches, when nothing is being generated.

    `staleness.max_staleness=0` releases it after the new weights instead: the losses are those of `sync`.
    """
    policy = create_policy("threshold_fraction", max_staleness=0, batch_size=config.batch.batch_size)
    is_ahead = config.staleness.max_staleness > 0
    return Schedule(policy=policy, releases_before_update=is_ahead, releases_after_sync=not is_ahead, lag=int(is_ahead))


def fully_async(config: Config) -> Schedule:
    """Fully asynchronous schedule: generation runs ahead as `staleness` admits, and weights change under it."""
    given = config.staleness
    policy = create_policy(given.policy, max_staleness=given.max_staleness, batch_size=config.batch.batch_size)
    return Schedule(policy=policy, releases_after_sync=True, settles_before_sync=False)


SCHEDULES: Mapping[str, FunctionType] = {"sync": sync, "one_step_off": one_step_off, "fully_async": fully_async}
SCHEDULE_GROUP = "rl_trainer.schedules"


def create_schedule(config: Config) -> Schedule:
    """The schedule that `pipeline` names, shipped or installed, with its policy known to queues of this process.

    Raises:
        ConfigError: no such schedule (lists them), or `staleness` has what it cannot take.
    """
    made = named(config.pipeline, SCHEDULES, group=SCHEDULE_GROUP, kind=FunctionType, key="pipeline")(config)
    if not isinstance(made, Schedule):
        raise ConfigError(f"pipeline={config.pipeline!r} gave a {type(made).__name__}; a Schedule is needed")
    try:
        register_policy(type(made.policy))
    except ValueError as error:
        raise ConfigError(f"the staleness policy of pipeline={config.pipeline}: {error}") from error
    extra = math.ceil(config.batch.batch_size * config.batch.over_sampling)
    return replace(made, policy=replace(made.policy, num_extra=extra))
