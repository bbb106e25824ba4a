"""Prompts become batches: drawn, rolled out by the agent workers, and replaced where groups fail or teach nothing."""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rl_trainer.errors import InputError, RolloutFailedError
from rl_trainer.metrics import HeldGroup
from rl_trainer.staleness import Span
from rl_trainer.workers.agent import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from rl_tq.base import TransferQueue
    from rl_tq.types import BatchMeta
    from rl_trainer.config import Config
    from rl_trainer.data import Order, Row
    from rl_trainer.data.sampler import StreamOrder
    from rl_trainer.replicas import AgentReplicas
    from rl_trainer.staleness import StalenessPolicy
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
        agents: AgentReplicas,
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
        agents: AgentReplicas,
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


COLUMNS = ("prompt_token_ids", "completion_token_ids", "loss_mask", "rollout_logprobs", "rewards", "group_id")
"""What every pipeline reads of a group."""
_WAIT_S = 10.0


def claim_held(
    queue: TransferQueue, partition: str, groups: Sequence[HeldGroup], columns: Sequence[str] = COLUMNS
) -> dict[int, BatchMeta]:
    """The rows of each of `groups` in a queue that began with a checkpoint's snapshot; all other rows are cleared.

    What else is there was written after the step that the checkpoint is of, and will be generated again. The references
    are to `columns`.

    Raises:
        InputError: a group is not there, so the snapshot is not this checkpoint's.
    """
    if not groups:
        return {}
    num_rows = queue.stats()["partitions"].get(partition, {}).get("rows", 0)
    found: dict[int, BatchMeta] = {}
    if num_rows:
        rows = queue.get_meta(
            partition=partition, columns=columns, batch_size=num_rows, task="resume", timeout_s=_WAIT_S
        )
        rows = replace(rows, task="", leases=())
        wanted = {(group.group_id, group.attempt) for group in groups}
        left = rows.filter(lambda tags: (tags["group_id"], tags["attempt"]) not in wanted)
        kept = rows.filter(lambda tags: (tags["group_id"], tags["attempt"]) in wanted)
        found = {int(str(group)): meta for group, meta in kept.groupby("group_id").items()} if len(kept) else {}
        if len(left):
            queue.clear(left)
    if lost := [group.group_id for group in groups if group.group_id not in found]:
        raise InputError(f"the checkpoint's queue has no rows of the groups {lost}; resume from another checkpoint")
    return found


def num_begun(num_needed: int, over_sampling: float) -> int:
    """Groups to begin for so many."""
    return num_needed + math.ceil(num_needed * over_sampling)


def first_finished(
    agents: AgentReplicas,
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
        sampling_params: As of `AgentReplicas.submit`.
        partition: As of `AgentReplicas.submit`.
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
