"""A stream of rollouts: prompts are released ahead of the trainer, and groups are taken as they finish."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING

from rl_trainer.errors import RolloutFailedError
from rl_trainer.pipelines.held import claim_held
from rl_trainer.pipelines.rollouts import Generated, held_group, rows_with_signal
from rl_trainer.pipelines.staleness import Span
from rl_trainer.workers.agent import Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_tq.base import TransferQueue
    from rl_tq.types import BatchMeta
    from rl_trainer.config import Config
    from rl_trainer.metrics import HeldGroup
    from rl_trainer.pipelines.fleets import AgentFleet
    from rl_trainer.pipelines.rollouts import RolloutManager
    from rl_trainer.pipelines.staleness import StalenessPolicy
    from rl_trainer.workers.agent import GenerateReport

PARTITION = "train"
_POLL_S = 0.02


@dataclass(slots=True)
class _Outcome:
    """What happened since the last batch was taken."""

    failures: Counter[str] = field(default_factory=Counter[str])
    num_failed_groups: int = 0
    num_without_signal: int = 0
    num_late: int = 0
    rewards: list[float] = field(default_factory=list[float])
    last_failure: str = ""


class RolloutStream:
    """Keeps the agent workers busy, up to what the staleness policy admits, and hands out whole batches of groups.

    A group that fails, has no signal, or comes too late is replaced by another prompt, released at once.
    """

    def __init__(
        self,
        agents: AgentFleet,
        manager: RolloutManager,
        queue: TransferQueue,
        config: Config,
        policy: StalenessPolicy,
        first_step: int,
    ) -> None:
        self._agents, self._manager, self._queue = agents, manager, queue
        self._config, self._policy = config, policy
        self._version = first_step
        self._num_released = (first_step - 1) * config.batch.batch_size
        self._num_wanted = config.steps * config.batch.batch_size
        self._outstanding: dict[int, Span] = {}
        self._jobs: dict[int, Job] = {}
        self._ready: dict[int, BatchMeta] = {}
        self._late: set[int] = set()
        self._outcome = _Outcome()

    @property
    def pending(self) -> tuple[int, ...]:
        """Row numbers of the groups that are being generated, in order of release."""
        return tuple(self._jobs[group].row_index for group in sorted(self._outstanding) if group not in self._ready)

    @property
    def held(self) -> tuple[HeldGroup, ...]:
        """The groups that are finished and wait to be learned from, in order of release."""
        return tuple(self._held(group) for group in sorted(self._ready))

    def _held(self, group: int) -> HeldGroup:
        attempt = self._ready[group].tags[0]["attempt"]
        return held_group(self._jobs[group], released=self._outstanding[group].released, attempt=attempt)

    def take_over(self, groups: Sequence[HeldGroup]) -> None:
        """Count groups of an earlier process, which are in the queue, as released by this one."""
        metas = claim_held(self._queue, PARTITION, groups)
        for group in groups:
            index, place = group.row_index, group.place  # it is not generated again: nothing reads its row
            self._jobs[group.group_id] = Job(row={}, row_index=index, group_id=group.group_id, place=place)
            self._outstanding[group.group_id] = Span(released=group.released)
            self._keep(group.group_id, metas[group.group_id])
        self._num_released += len(groups)

    def release(self, version: int) -> None:
        """The servers hold `version`: submit what may be submitted."""
        self._version = version
        sizes = self._config.batch
        room = min(self._policy.admit(len(self._outstanding)), self._num_wanted - self._num_released)
        while room > 0:
            step, place = divmod(self._num_released, sizes.batch_size)
            count = min(room, sizes.batch_size - place)
            self._submit(self._manager.draw(count, place), salt=f"{step + 1}/0")
            self._num_released += count
            room -= count

    def take(self, version: int) -> Generated:
        """Wait for a batch that may be learned from by weights of `version`.

        Raises:
            RolloutFailedError: more than `batch.max_refills` batches of groups had to be replaced, or nothing came
                within `timeout_s`.
        """
        sizes = self._config.batch
        deadline = time.monotonic() + self._config.timeout_s
        while True:
            self._collect()
            self._give_up_late(version)
            chosen = self._policy.select(self._ready, self._outstanding, version)
            if chosen is not None:
                return self._taken(chosen)
            outcome = self._outcome
            num_replaced = outcome.num_failed_groups + outcome.num_without_signal
            if num_replaced > sizes.max_refills * sizes.batch_size or time.monotonic() > deadline:
                raise RolloutFailedError(
                    f"step {version}: {len(self._ready)} of {len(self._outstanding)} groups that were released are "
                    f"there, {sizes.batch_size} are needed; failed rollouts {dict(outcome.failures)}, groups dropped "
                    f"because all their rewards are equal {outcome.num_without_signal}, groups replaced {num_replaced} "
                    f"(at most batch.max_refills x batch.batch_size = {sizes.max_refills * sizes.batch_size}); the "
                    f"last failure: {outcome.last_failure or 'none'}; deadline timeout_s={self._config.timeout_s:g}"
                )
            time.sleep(_POLL_S)

    def _taken(self, groups: list[int]) -> Generated:
        learned = tuple(self._held(group) for group in groups)
        batch = type(self._ready[groups[0]]).concat([self._ready.pop(group) for group in groups])
        for group in groups:
            del self._outstanding[group], self._jobs[group]
        outcome, self._outcome = self._outcome, _Outcome()
        return Generated(
            batch=batch,
            groups=learned,
            reward=fmean([*outcome.rewards, *(tags["reward"] for tags in batch.tags)]),
            failures=dict(outcome.failures),
            dropped_groups=outcome.num_without_signal,
            late_groups=outcome.num_late,
            position=self._manager.position,
        )

    def _collect(self) -> None:
        for report in self._agents.poll():
            self._outcome.failures.update(report.failures)
            self._outcome.last_failure = report.last_failure or self._outcome.last_failure
            for group in report.failed_groups:
                if group in self._late:
                    self._late.remove(group)
                else:
                    self._outcome.num_failed_groups += 1
                    self._replace(group)
            if report.batch is not None:
                self._manager.observe(report.batch)
                self._sort(report.batch, report)

    def _sort(self, batch: BatchMeta, report: GenerateReport) -> None:
        rows: dict[int, list[int]] = {}
        for row, tags in enumerate(batch.tags):
            rows.setdefault(tags["group_id"], []).append(row)
        wanted = set(rows_with_signal(batch)) if self._config.batch.dynamic_sampling else set(range(len(batch)))
        for group in report.complete_groups:
            meta = batch.reorder(rows[group])
            if group in self._late:
                self._late.remove(group)
                self._queue.clear(meta)
            elif rows[group][0] not in wanted:
                self._outcome.num_without_signal += 1
                self._outcome.rewards += [tags["reward"] for tags in meta.tags]
                self._queue.clear(meta)
                self._replace(group)
            else:
                self._keep(group, meta)

    def _keep(self, group: int, meta: BatchMeta) -> None:
        self._ready[group] = meta
        oldest = min(tags["weight_version_min"] for tags in meta.tags)
        newest = max(tags["weight_version_max"] for tags in meta.tags)
        self._outstanding[group] = replace(self._outstanding[group], oldest=oldest, newest=newest)

    def _give_up_late(self, version: int) -> None:
        for group in self._policy.expire(self._outstanding, version):
            self._outcome.num_late += 1
            if group in self._ready:
                self._queue.clear(self._ready.pop(group))
            else:
                self._late.add(group)
            self._replace(group)

    def _replace(self, group: int) -> None:
        """Another prompt in the place of this group's."""
        place = self._jobs[group].place
        del self._outstanding[group], self._jobs[group]
        self._submit(self._manager.draw(1, place), salt=f"instead of {group}")

    def _submit(self, jobs: list[Job], salt: str) -> None:
        for job in jobs:
            self._outstanding[job.group_id] = Span(released=self._version)
            self._jobs[job.group_id] = job
        self._agents.submit(jobs, self._manager.sampling(salt), PARTITION, self._config.batch.group_size)
