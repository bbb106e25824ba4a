"""Rollouts by group, and what becomes of a group in which one failed. A baseline never sees a failed rollout."""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from rl_agent._concurrency import as_finished
from rl_agent.types import Failure

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from rl_agent.types import AgentLoopOutput, FailureKind, RolloutResult


class OnFailure(StrEnum):
    """What becomes of a group when one of its rollouts has failed, all its attempts included."""

    REFILL = "refill"
    """Another rollout of the same row takes its place, with a seed of its own; up to a limit, then as `drop`."""
    DROP = "drop"
    """The group yields no trajectory; its rollouts that have not started do not start."""
    MASK = "mask"
    """The group goes on without it, if enough rollouts are left; else as `drop`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """How one row's group ended."""

    row_index: int
    """Position of the row among the rows that were given."""
    rollouts: tuple[tuple[AgentLoopOutput, ...], ...]
    """Trajectories of each rollout that ended well, in the rollouts' order; empty where the group is dropped."""
    failures: tuple[Failure, ...]
    """Every rollout that failed, those included whose place another took."""

    @property
    def is_dropped(self) -> bool:
        """Whether there is nothing to learn from."""
        return not self.rollouts

    @property
    def num_failures(self) -> dict[FailureKind, int]:
        """Failed rollouts per kind."""
        return dict(Counter(failure.kind for failure in self.failures))


@dataclass(slots=True)
class _Group:
    """A group in the making."""

    num_refills: int
    """Places that may still be taken by another rollout."""
    num_started: int
    """Seeds given out."""
    ended: dict[int, tuple[AgentLoopOutput, ...]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """How groups are run."""

    group_size: int
    """Rollouts per row."""
    on_failure: OnFailure
    """What becomes of a group with a failed rollout."""
    max_refills: int
    """Of one group, with `refill`."""
    min_group_size: int
    """Rollouts that have to be left, with `mask`: below two there is no baseline."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.group_size < 1 or self.max_refills < 0:
            raise ValueError(
                f"group_size={self.group_size} must be positive and max_refills={self.max_refills} not negative"
            )
        if not 1 <= self.min_group_size <= self.group_size:
            raise ValueError(
                f"min_group_size={self.min_group_size} must lie between 1 and group_size={self.group_size}"
            )


async def run_groups(
    rollout: Callable[[int, int, int], Awaitable[RolloutResult]],
    grade: Callable[[RolloutResult], Awaitable[RolloutResult]] | None,
    num_rows: int,
    plan: GroupPlan,
    max_concurrent: int,
) -> AsyncGenerator[GroupResult, None]:
    """Yield each group as its last rollout ends.

    Args:
        rollout: Runs one, by row, place in the group, and which rollout of the group's seeds it is.
        grade: See `AgentRunner.run_groups`.
        num_rows: Groups.
        plan: What becomes of failures.
        max_concurrent: Rollouts running at the same time.
    """
    size = plan.group_size
    groups = [_Group(num_refills=plan.max_refills, num_started=size) for _ in range(num_rows)]
    num_left = [size] * num_rows

    async def fill(row: int, place: int) -> int:
        """Run rollouts for one place of a group until one ends well or no other may."""
        group, seed_index = groups[row], place
        while not (group.failures and plan.on_failure is OnFailure.DROP):
            result = await rollout(row, place, seed_index)
            if grade is not None and not isinstance(result.outputs, Failure):
                result = await grade(result)
            if not isinstance(result.outputs, Failure):
                group.ended[place] = result.outputs
                break
            group.failures.append(result.outputs)
            if plan.on_failure is not OnFailure.REFILL or not group.num_refills:
                break
            group.num_refills -= 1
            seed_index, group.num_started = group.num_started, group.num_started + 1
        return row

    places = (fill(row, place) for row in range(num_rows) for place in range(size))
    async with aclosing(as_finished(places, max_concurrent)) as finished:
        async for row in finished:
            num_left[row] -= 1
            if not num_left[row]:
                yield _result(row, groups[row], plan)


def _result(row: int, group: _Group, plan: GroupPlan) -> GroupResult:
    needed = plan.min_group_size if plan.on_failure is OnFailure.MASK else plan.group_size
    is_enough = len(group.ended) >= needed
    rollouts = tuple(group.ended[place] for place in sorted(group.ended)) if is_enough else ()
    return GroupResult(row_index=row, rollouts=rollouts, failures=tuple(group.failures))
