"""Prompts become batches: drawn, rolled out by the agent workers, and replaced where groups fail or teach nothing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rl_trainer.errors import RolloutFailedError
from rl_trainer.metrics import HeldGroup
from rl_trainer.pipelines.oversampling import first_finished, num_begun
from rl_trainer.workers.agent import Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_tq.types import BatchMeta
    from rl_trainer.config import Config
    from rl_trainer.data import Order, Row
    from rl_trainer.data.order import StreamOrder
    from rl_trainer.pipelines.fleets import AgentFleet
    from rl_trainer.workers.agent import GenerateReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A full batch of rollouts and what it cost."""

    batch: BatchMeta
    """batch_size x group_size rows."""
    reward: float
    """Mean over all completions that were scored, those of dropped groups too."""
    failures: dict[str, int]
    """Failed rollouts per kind; their prompts were replaced by others."""
    dropped_groups: int
    """Groups without signal that were replaced (`batch.dynamic_sampling`)."""
    stopped_groups: int = 0
    """Groups that were not waited for (`batch.over_sampling`); their prompts come next."""
    late_groups: int = 0
    """Groups thrown away because their weights had become too old (`staleness.policy`)."""
    position: int
    """Prompts taken from the data up to and including these."""
    groups: tuple[HeldGroup, ...] = ()
    """The groups in `batch` that were generated for it."""
    reused: tuple[HeldGroup, ...] = ()
    """The groups in `batch` that an earlier step has learned from (`batch.replay`)."""


class RolloutManager:
    """Turns prompts into a batch: splits them over the agent workers, and replaces groups that failed."""

    def __init__(
        self,
        agents: AgentFleet,
        rows: Sequence[Row] | StreamOrder,
        order: Order,
        config: Config,
        *,
        num_groups: int = 0,
        is_seeded: bool = True,
    ) -> None:
        self._agents, self._rows, self.order, self._config = agents, rows, order, config
        self._num_groups, self._is_seeded = num_groups, is_seeded
        self._row_of: dict[int, int] = {}
        self._given_back = set(order.returned)

    @property
    def position(self) -> int:
        """Prompts taken from the data so far."""
        return self.order.position

    @property
    def num_too_long(self) -> int:
        """Rows of a stream that were passed over so far because their prompts are too long."""
        return self.order.num_too_long

    def generate_sequences(self, partition: str, step: int, *, num_groups: int | None = None) -> Generated:
        """Roll out `num_groups` (None: `batch_size`) fresh prompts; groups that fail or have no signal are replaced.

        Raises:
            RolloutFailedError: groups are still missing after `batch.max_refills`; carries the counts.
        """
        sizes = self._config.batch
        batches: list[BatchMeta] = []
        failures: dict[str, int] = {}
        rewards: list[float] = []
        drawn: dict[int, Job] = {}
        wanted = sizes.batch_size if num_groups is None else num_groups
        missing, dropped, stopped, reason = wanted, 0, 0, ""
        for attempt in range(1 + sizes.max_refills):
            jobs, sampling = self.draw(num_begun(missing, sizes.over_sampling)), self.sampling(f"{step}/{attempt}")
            drawn.update((job.group_id, job) for job in jobs)
            unused = {job.group_id for job in jobs}
            awaited = {job.group_id for job in jobs if job.row_index in self._given_back}
            reports = self._roll_out(jobs, sampling, partition, missing, awaited)
            useful = [{} if report.batch is None else self._useful_groups(report.batch) for report in reports]
            chosen = sorted((group for groups in useful for group in groups), key=lambda group: group not in awaited)
            kept = set(chosen[:missing])
            missing -= len(kept)
            for report, groups in zip(reports, useful, strict=True):
                reason = report.last_failure or reason
                for kind, count in report.failures.items():
                    failures[kind] = failures.get(kind, 0) + count
                unused -= {*report.failed_groups}
                if report.batch is None:
                    continue
                self.observe(report.batch)
                rewards += [tags["reward"] for tags in report.batch.tags]
                dropped += len(report.complete_groups) - len(groups)
                unused -= kept | (set(report.complete_groups) - set(groups))
                if rows := [row for group, some in groups.items() if group in kept for row in some]:
                    batches.append(report.batch.reorder(rows))
            if sizes.over_sampling:
                stopped += self._give_back([job for job in jobs if job.group_id in unused])
            if missing == 0:
                batch = type(batches[0]).concat(batches)
                attempts = {tags["group_id"]: tags["attempt"] for tags in batch.tags}
                return Generated(
                    batch=batch,
                    groups=tuple(held_group(drawn[group], released=step, attempt=n) for group, n in attempts.items()),
                    reward=fmean(rewards),
                    failures=failures,
                    dropped_groups=dropped,
                    stopped_groups=stopped,
                    position=self.position,
                )
        raise RolloutFailedError(
            f"step {step}: {missing} of {wanted} groups are missing after batch.max_refills="
            f"{sizes.max_refills}: failed rollouts {failures}, groups dropped because all their rewards are equal "
            f"{dropped}; the last failure: {reason or 'none'}"
        )

    def _roll_out(
        self, jobs: list[Job], sampling: dict[str, Any], partition: str, num_needed: int, awaited: set[int]
    ) -> list[GenerateReport]:
        sizes = self._config.batch
        if not sizes.over_sampling:
            return self._agents.generate(jobs, sampling, partition, sizes.group_size)
        self._given_back -= {job.row_index for job in jobs}
        return first_finished(
            self._agents,
            jobs,
            sampling,
            partition,
            sizes.group_size,
            num_needed=num_needed,
            awaited=awaited,
            count_useful=lambda report: 0 if report.batch is None else len(self._useful_groups(report.batch)),
            timeout_s=self._config.timeout_s,
        )

    def _useful_groups(self, batch: BatchMeta) -> dict[int, list[int]]:
        """Rows of each complete group that may be learned from."""
        rows = rows_with_signal(batch) if self._config.batch.dynamic_sampling else range(len(batch))
        groups: dict[int, list[int]] = {}
        for row in rows:
            groups.setdefault(batch.tags[row]["group_id"], []).append(row)
        return groups

    def _give_back(self, jobs: Sequence[Job]) -> int:
        """Have the prompts of groups that were not used drawn first, and waited for."""
        rows = [job.row_index for job in jobs]
        self.order.give_back(rows)
        self._given_back |= set(rows)
        for job in jobs:
            self._row_of.pop(job.group_id, None)  # nobody will observe it; a complete one has been
        return len(rows)

    def evaluate(self, rows: Sequence[Row]) -> float:
        """Mean reward of one completion per held-out row, at `rollout.eval_temperature`.

        Raises:
            RolloutFailedError: more than one in ten failed, so the mean would say little.
        """
        sampling = self.sampling("eval", temperature=self._config.rollout.eval_temperature)
        reports = self._agents.evaluate(list(rows), sampling)
        rewards = [reward for report in reports for reward in report.rewards]
        num_failed = sum(report.num_failed for report in reports)
        if num_failed * 10 > len(rows):
            reason = next(report.last_failure for report in reports if report.last_failure)
            raise RolloutFailedError(f"{num_failed} of {len(rows)} evaluation rollouts failed; one of them: {reason}")
        return sum(rewards) / len(rewards)

    def draw(self, count: int, first_place: int = 0) -> list[Job]:
        """The next `count` prompts, each to become a group, in places of a step's batch from `first_place` on."""
        jobs: list[Job] = []
        for place, index in enumerate(self.order.take(count), start=first_place):
            self._num_groups += 1
            self._row_of[self._num_groups] = index
            jobs.append(Job(row=self._rows[index], row_index=index, group_id=self._num_groups, place=place))
        return jobs

    def observe(self, batch: BatchMeta) -> None:
        """Tell the order what the groups of a batch were worth: a curriculum goes by it."""
        rewards: dict[int, list[float]] = {}
        for tags in batch.tags:
            rewards.setdefault(tags["group_id"], []).append(tags["reward"])
        for group, given in rewards.items():
            self.order.observe(self._row_of.pop(group), given)

    def sampling(self, salt: str, *, temperature: float | None = None) -> dict[str, Any]:
        """Sampling parameters at `rollout.temperature` unless told otherwise.

        Seeded by the run's seed and `salt`, where the servers can be.
        """
        rollout = self._config.rollout
        params: dict[str, Any] = {
            "temperature": rollout.temperature if temperature is None else temperature,
            "top_p": rollout.top_p,
            "max_new_tokens": rollout.max_new_tokens,
        }
        return params | ({"seed": hash_seed(f"{self._config.seed}/{salt}")} if self._is_seeded else {})


def held_group(job: Job, *, released: int, attempt: int) -> HeldGroup:
    """A job's group, for the record."""
    return HeldGroup(
        group_id=job.group_id, row_index=job.row_index, place=job.place, released=released, attempt=attempt
    )


def rows_with_signal(batch: BatchMeta) -> list[int]:
    """Rows of the groups whose rewards differ: of the others every group-relative advantage is 0 (arXiv 2503.14476)."""
    rewards: dict[int, set[float]] = {}
    for tags in batch.tags:
        rewards.setdefault(tags["group_id"], set()).add(tags["reward"])
    return [index for index, tags in enumerate(batch.tags) if len(rewards[tags["group_id"]]) > 1]


def hash_seed(text: str) -> int:
    """A 31-bit seed that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1
