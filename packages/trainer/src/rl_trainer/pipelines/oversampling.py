"""Over-sampling: more groups are begun than a step needs, and the last ones are stopped when enough are complete.

What is stopped is not lost: its prompts come first in the next step, where they are waited for, so that no prompt is
left out because its completions are long.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from rl_trainer.errors import RolloutFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from rl_trainer.pipelines.fleets import AgentFleet
    from rl_trainer.workers.agent import GenerateReport, Job

_POLL_S = 0.02


def num_begun(num_needed: int, over_sampling: float) -> int:
    """Groups to begin for so many."""
    return num_needed + math.ceil(num_needed * over_sampling)


def first_finished(
    agents: AgentFleet,
    jobs: list[Job],
    sampling_params: dict[str, Any],
    partition: str,
    group_size: int,
    *,
    num_needed: int,
    awaited: Collection[int],
    count_useful: Callable[[GenerateReport], int],
    timeout_s: float,
) -> list[GenerateReport]:
    """Roll jobs out until enough groups are complete, and stop the others; none of them is in the queue afterwards.

    Args:
        agents: Roll out.
        jobs: The groups to begin.
        sampling_params: As of `AgentFleet.submit`.
        partition: As of `AgentFleet.submit`.
        group_size: Rollouts per group.
        num_needed: Useful groups that are enough.
        awaited: Ids of the groups that are not stopped.
        count_useful: The useful groups of a report.
        timeout_s: Deadline, seconds.

    Raises:
        RolloutFailedError: the deadline passed.
    """
    agents.submit(jobs, sampling_params, partition, group_size)
    reports: list[GenerateReport] = []
    running = {job.group_id for job in jobs}
    num_useful, deadline = 0, time.monotonic() + timeout_s
    while running and (num_useful < num_needed or running & set(awaited)):
        for report in agents.poll():
            reports.append(report)
            running -= {*report.complete_groups, *report.failed_groups}
            num_useful += count_useful(report)
        if time.monotonic() > deadline:
            raise RolloutFailedError(
                f"{num_useful} of {num_needed} groups are complete, and {len(running)} are not done within "
                f"timeout_s={timeout_s:g}"
            )
        time.sleep(_POLL_S)
    return reports + (agents.stop_running() if running else [])
