"""Rollout source: draws prompts, submits them to agent workers, and claims complete groups from the queue.

One source serves every schedule. Agent workers put a group into the queue when its last rollout is scored; the source
claims what is there, and the rows are acknowledged once they were learned from. A group that fails, has no signal or
comes too late is replaced by another prompt at once; what was released and not learned from yet is known at any moment,
so that a run can be resumed.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from rl_tq.errors import WaitTimeoutError
from rl_tq.registry import create_policy
from rl_trainer.data.datasets import location
from rl_trainer.errors import InputError, RolloutFailedError, TrainerError
from rl_trainer.metrics import Evaluation, HeldGroup
from rl_trainer.pipeline.staleness import Span
from rl_trainer.plugins import Filter, filter_named
from rl_trainer.workers.agent import Job
from rl_trainer.workers.columns import GIVEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rl_tq.base import TransferQueue
    from rl_tq.types import BatchMeta
    from rl_trainer.config import Config
    from rl_trainer.data import Order, Row
    from rl_trainer.data.sampler import StreamOrder
    from rl_trainer.metrics import PhaseTimer
    from rl_trainer.pipeline.replay_buffer import Replay
    from rl_trainer.pipeline.replicas import AgentReplicas
    from rl_trainer.pipeline.staleness import Schedule, StalenessPolicy
    from rl_trainer.workers.agent import FailureReport

T = TypeVar("T")

PARTITION = "train"
"""Partition of the queue that agent workers put groups into."""
_TASK = "train"
_FRESH = create_policy("where", tag="is_copy", op="==", value=False, then=create_policy("all_ready"))
_RESUME_WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Batch of rollouts that `take` gave, with its counts of failed, dropped and stopped groups."""

    batch: BatchMeta
    """Rows of the batch's groups: ids and tags."""
    claimed: BatchMeta | None = None
    """The rows that were claimed, with their leases; None with a fake queue."""
    reward: float
    """Mean over all completions that were scored since the batch before, those of dropped groups too."""
    failures: dict[str, int]
    """Failed rollouts per kind; their prompts were replaced by others."""
    last_failure: str = ""
    """The sentence of the last of them."""
    dropped_groups: int
    """Groups that were replaced because of their rewards (`batch.dynamic_sampling`, `batch.filter`)."""
    stopped_groups: int = 0
    """Groups that were not waited for (`batch.over_sampling`); their prompts come next."""
    late_groups: int = 0
    """Groups thrown away because their weights had become too old (`staleness.policy`)."""
    groups: tuple[HeldGroup, ...] = ()
    """The groups in `batch` that were generated for it."""
    reused: tuple[HeldGroup, ...] = ()
    """The groups in `batch` that an earlier step has learned from (`batch.replay`)."""
    is_last: bool = True
    """Whether no other part of the step's batch follows."""

    @classmethod
    def joined(cls, parts: Sequence[Generated]) -> Generated:
        """Join the parts of a batch."""
        if len(parts) == 1:
            return parts[0]
        failures = Counter[str]()
        for part in parts:
            failures.update(part.failures)
        sizes = [len(part.batch) for part in parts]
        return cls(
            batch=type(parts[0].batch).concat([part.batch for part in parts]),
            reward=sum(part.reward * size for part, size in zip(parts, sizes, strict=True)) / sum(sizes),
            failures=dict(failures),
            last_failure=next((part.last_failure for part in reversed(parts) if part.last_failure), ""),
            dropped_groups=sum(part.dropped_groups for part in parts),
            groups=tuple(group for part in parts for group in part.groups),
        )


@dataclass(slots=True)
class _Outcome:
    """Counts since the last batch was taken."""

    failures: Counter[str] = field(default_factory=Counter[str])
    num_failed_groups: int = 0
    num_dropped: int = 0
    num_late: int = 0
    num_stopped: int = 0
    rewards: list[float] = field(default_factory=list[float])
    last_failure: str = ""


class StopRequestedError(Exception):
    """The run was asked to stop while nothing of the step had been learned yet."""


class OutstandingGroups:
    """Groups that were released and not learned from: those that are being generated, and those that are finished."""

    def __init__(self) -> None:
        self.spans: dict[int, Span] = {}
        """Weight versions of each group."""
        self.jobs: dict[int, Job] = {}
        """Prompt and position of each group."""
        self.ready: dict[int, BatchMeta] = {}
        """Rows of the groups that are finished."""

    def add(self, job: Job, version: int) -> None:
        """Add a group that is released while the servers hold weights of `version`."""
        self.spans[job.group_id] = Span(released=version)
        self.jobs[job.group_id] = job

    def finish(self, group: int, meta: BatchMeta) -> None:
        """Enter the rows of a group that is finished."""
        self.ready[group] = meta
        oldest = min([tags["weight_version_min"] for tags in meta.tags])
        newest = max([tags["weight_version_max"] for tags in meta.tags])
        self.spans[group] = Span(released=self.spans[group].released, oldest=oldest, newest=newest)

    def remove(self, group: int) -> None:
        """Remove a group that is learned from, or given up."""
        del self.spans[group], self.jobs[group]
        self.ready.pop(group, None)

    @property
    def pending(self) -> tuple[int, ...]:
        """Row numbers of the groups that are being generated, in order of release."""
        return tuple(self.jobs[group].row_index for group in sorted(self.spans) if group not in self.ready)

    def record_of(self, group: int) -> HeldGroup:
        """Record of a finished group, for a checkpoint."""
        job, attempt, released = self.jobs[group], self.ready[group].tags[0]["attempt"], self.spans[group].released
        return HeldGroup(group_id=group, row_index=job.row_index, place=job.place, released=released, attempt=attempt)


class RolloutSource:
    """Rollout source: releases prompts as the staleness policy admits, and gives batches of complete groups.

    Args:
        agents: Roll prompts out, and put complete groups into `PARTITION`.
        rows: Prompts by number.
        order: Sampler of the prompts.
        queue: Has the rollouts.
        config: Configuration of the run.
        policy: How many groups may be outstanding, and which to learn from next.
        replay: Groups that may be learned from again; a step draws so many fewer prompts.
        first_step: The step that the first batch is for.
        num_groups: Highest group id that was given before.
        is_seeded: Whether the servers take a seed per request.
        poll_s: Seconds between two questions to the agent workers about failures; groups that are complete come
            without one.
    """

    def __init__(
        self,
        agents: AgentReplicas,
        rows: Sequence[Row] | StreamOrder,
        order: Order,
        queue: TransferQueue,
        config: Config,
        policy: StalenessPolicy,
        *,
        replay: Replay | None = None,
        first_step: int = 1,
        num_groups: int = 0,
        is_seeded: bool = True,
        poll_s: float = 0.25,
    ) -> None:
        self._agents, self._rows, self.order, self._queue = agents, rows, order, queue
        self._config, self._policy, self._replay = config, policy, replay
        self._num_groups, self._is_seeded, self._poll_s = num_groups, is_seeded, poll_s
        self._version = first_step
        self._step, self._position, self._size = first_step - 1, 0, 0
        """The next slot to release: its step, its position in that step's batch, and the size of that batch."""
        self._groups = OutstandingGroups()
        self._polled_at = -math.inf
        self._num_asked = 0
        self._awaited = set(order.returned) if config.batch.over_sampling else set[int]()
        """Prompts whose groups are waited for: they were stopped once."""
        self.should_stop: Callable[[], bool] = lambda: False
        """Whether a wait for rollouts is to end, asked while nothing of the step has been learned."""
        self._num_taken = 0
        self._outcome = _Outcome()
        self._is_kept = group_filter(config.batch.filter)

    @property
    def is_at_step_start(self) -> bool:
        """Whether nothing was taken since the last `finish`: the weights are those of the last step."""
        return self._num_taken == 0

    @property
    def position(self) -> int:
        """Prompts taken from the data so far."""
        return self.order.position

    @property
    def progress(self) -> tuple[int, int]:
        """Numbers of groups that are finished and wait to be learned from, and of all that were released."""
        return len(self._groups.ready), len(self._groups.spans)

    @property
    def evaluated(self) -> tuple[int, int]:
        """Numbers of completions of the evaluation under way that are graded, and of all; asks the agent workers."""
        return self._agents.num_evaluated(), self._num_asked

    @property
    def num_too_long(self) -> int:
        """Rows of a stream that were passed over so far because their prompts are too long."""
        return self.order.num_too_long

    @property
    def pending(self) -> tuple[int, ...]:
        """Row numbers of the groups that are being generated, in order of release."""
        return self._groups.pending

    @property
    def held(self) -> tuple[HeldGroup, ...]:
        """The groups that are finished and wait to be learned from, in order of release."""
        return tuple(self._groups.record_of(group) for group in sorted(self._groups.ready))

    def resume(self, groups: Sequence[HeldGroup]) -> None:
        """Resume with finished groups of an earlier process: restore and claim their rows, clear all others.

        Other rows were put after the checkpoint's step, and their prompts are generated again.

        Raises:
            InputError: a group is not in the queue, so that its snapshot is not this checkpoint's.
        """
        if not groups:
            return
        self._queue.restore(PARTITION, self._step, task=_TASK)
        found = claim_groups(self._queue, _RESUME_WAIT_S)
        for group in groups:
            meta = found.pop((group.group_id, group.attempt), None)
            if meta is None:
                raise InputError(
                    f"the checkpoint's queue has no rows of group {group.group_id}; resume from another checkpoint"
                )
            index, place = group.row_index, group.place  # it is not generated again: nothing reads its row
            self._groups.add(Job(row={}, row_index=index, group_id=group.group_id, place=place), group.released)
            self._groups.finish(group.group_id, meta)
        for meta in found.values():
            self._queue.clear(meta)
        self._size = self._config.batch.batch_size if self._replay is None else len(groups)
        steps, last = divmod(len(groups) - 1, self._size)
        self._step, self._position = self._step + steps + 1, last + 1

    def release(self, version: int) -> None:
        """Release prompts, as many as the policy admits, now that the servers hold weights of `version`."""
        self._version = version
        if self._replay is not None and self._groups.spans:
            return  # with replay a release is one step's
        room = self._policy.admit(len(self._groups.spans))
        while room > 0:
            if self._position == self._size:
                if self._step == self._config.steps:
                    return
                self._step, self._position = self._step + 1, 0
                self._size = self._config.batch.batch_size - (len(self._replay.draw(self._step)) if self._replay else 0)
            count = min(room, self._size - self._position)
            extra = math.ceil(count * self._config.batch.over_sampling)
            self._submit(self.draw(count + extra, self._position), salt=f"{self._step}/0")
            self._position += count
            room = 0 if self._replay is not None else room - count

    def take(self, version: int, num_groups: int | None = None) -> Generated:
        """Take a batch that weights of `version` may learn from, waiting for it; replayed groups come last.

        Args:
            version: Version of the weights that learn.
            num_groups: A part of a batch; None: all of it.

        Raises:
            RolloutFailedError: more than `batch.max_refills` batches of groups had to be replaced, or nothing came
                within `timeout_s`.
            StopRequestedError: `should_stop` says so, and this is the first batch of its step.
        """
        groups = self._wait(lambda: self._choose(version, num_groups))
        claimed = type(self._groups.ready[groups[0]]).concat([self._groups.ready[group] for group in groups])
        batch = replace(claimed, task="", leases=())
        learned = tuple(self._groups.record_of(group) for group in groups)
        self._num_taken += 1
        outcome, self._outcome = self._outcome, _Outcome()
        generated = Generated(
            batch=batch,
            claimed=claimed,
            groups=learned,
            reward=fmean([*outcome.rewards, *_sampled_rewards(batch)]),
            failures=dict(outcome.failures),
            last_failure=outcome.last_failure,
            dropped_groups=outcome.num_dropped,
            stopped_groups=outcome.num_stopped,
            late_groups=outcome.num_late,
        )
        for group in groups:
            self._groups.remove(group)
        if self._replay is None:
            return generated
        again = self._replay.drawn
        batch = type(batch).concat([batch, *self._replay.rows_of(again, PARTITION)])
        return replace(generated, batch=batch, reused=tuple(used.group for used in again))

    def finish(self, generated: Generated, step: int) -> None:
        """Acknowledge and free the rows that step `step` has learned from."""
        self._num_taken = 0
        if generated.claimed is not None:
            self._queue.ack(generated.claimed, step=step)
        self._queue.clear(generated.batch)

    def settle(self) -> None:
        """Wait until the next batch is complete and nothing is being generated: weights may change then.

        Raises:
            RolloutFailedError: as `take`.
        """
        if self._groups.spans:
            self._wait(lambda: True if self._stop_stragglers() and not self.pending else None)

    def collect(self, wait_s: float = 0.0) -> None:
        """Collect finished groups from the queue; groups that failed or have no signal are replaced.

        Args:
            wait_s: How long to wait for a group where none is there.
        """
        if not self._groups.spans:
            time.sleep(wait_s)
            return
        for (group, _), meta in claim_groups(self._queue, wait_s).items():
            self._take_in(group, meta)
        if time.monotonic() - self._polled_at >= self._poll_s:
            for report in self._agents.poll():
                self._replace_failed(report)
            self._polled_at = time.monotonic()

    def evaluate(self, rows: Sequence[Row]) -> Evaluation:
        """Evaluate `rollout.eval_samples` completions per held-out row, at `eval_temperature`.

        Raises:
            RolloutFailedError: more than one in ten failed, so that a mean would say little.
        """
        sampling = self.sampling("eval", temperature=self._config.rollout.eval_temperature)
        each = range(self._config.rollout.eval_samples * len(rows))
        asked = [
            Job(row=rows[i], row_index=i, group_id=n, place=n, where=location(rows, i, kind="held-out row"))
            for n, i in ((n, n % len(rows)) for n in each)
        ]
        self._num_asked = len(asked)
        reports = self._agents.evaluate(asked, sampling)
        rewards = [reward for report in reports for reward in report.rewards]
        num_failed = sum(report.num_failed for report in reports)
        reason = next((report.last_failure for report in reports if report.last_failure), "")
        if num_failed * 10 > len(asked):
            raise RolloutFailedError(f"{num_failed} of {len(asked)} evaluation rollouts failed; one of them: {reason}")
        right = [report.num_right for report in reports if report.rewards]
        return Evaluation(
            reward=sum(rewards) / len(rewards),
            accuracy=None if None in right else sum(filter(None, right)) / len(rewards),
            num_prompts=len(rows),
            num_failed=num_failed,
            last_failure=reason,
        )

    def draw(self, count: int, first_place: int = 0) -> list[Job]:
        """Draw the next `count` prompts as jobs, at positions of a step's batch from `first_place` on."""
        jobs: list[Job] = []
        for place, index in enumerate(self.order.take(count), start=first_place):
            self._num_groups += 1
            row, where = self._rows[index], location(self._rows, index)
            jobs.append(Job(row=row, row_index=index, group_id=self._num_groups, place=place, where=where))
        return jobs

    def sampling(self, salt: str, *, temperature: float | None = None) -> dict[str, Any]:
        """Sampling parameters at `rollout.temperature` by default.

        Seeded by the run's seed and `salt`, where the servers can be.
        """
        rollout = self._config.rollout
        params: dict[str, Any] = {
            "temperature": rollout.temperature if temperature is None else temperature,
            "top_p": rollout.top_p,
            "max_new_tokens": rollout.max_new_tokens,
        }
        return params | ({"seed": hash_seed(f"{self._config.seed}/{salt}")} if self._is_seeded else {})

    def _wait(self, found: Callable[[], T | None]) -> T:
        sizes, deadline = self._config.batch, time.monotonic() + self._config.timeout_s
        self.collect()
        while True:
            if (value := found()) is not None:
                return value
            if self.is_at_step_start and self.should_stop():
                raise StopRequestedError
            outcome = self._outcome
            num_replaced = outcome.num_failed_groups + outcome.num_dropped
            if num_replaced > sizes.max_refills * sizes.batch_size or time.monotonic() > deadline:
                raise RolloutFailedError(
                    f"weights version {self._version}: {len(self._groups.ready)} of {len(self._groups.spans)} groups "
                    f"that were released are complete, {self._size} are needed; failed rollouts "
                    f"{dict(outcome.failures)}, groups dropped because of their rewards {outcome.num_dropped}, groups "
                    f"replaced {num_replaced} (at most batch.max_refills x batch.batch_size = "
                    f"{sizes.max_refills * sizes.batch_size}); the last failure: {outcome.last_failure or 'none'}; "
                    f"deadline timeout_s={self._config.timeout_s:g}; the queue: {explained(self._queue)}"
                )
            self.collect(self._poll_s)

    def _choose(self, version: int, num_groups: int | None) -> list[int] | None:
        self._give_up_late(version)
        if not self._stop_stragglers():
            return None
        size = self._size if self._replay is not None else num_groups
        policy = self._policy if size is None else replace(self._policy, batch_size=size)
        return policy.select(self._groups.ready, self._groups.spans, version)

    def _stop_stragglers(self) -> bool:
        """Abort the slowest groups once a batch is complete (`batch.over_sampling`); whether it is complete.

        Aborted prompts go first in the next step, where they are waited for: none is left out for being long.
        """
        if not self._config.batch.over_sampling:
            return True
        is_awaited = any(
            self._groups.jobs[g].row_index in self._awaited for g in self._groups.spans if g not in self._groups.ready
        )
        if len(self._groups.ready) < self._size or is_awaited:
            return False
        if len(self._groups.spans) > self._size:
            if len(self._groups.spans) > len(self._groups.ready):
                for report in self._agents.stop_running():
                    self._replace_failed(report, replaces=False)
                for (group, _), meta in claim_groups(self._queue, 0.0).items():
                    self._take_in(group, meta, replaces=False)
            best = sorted(self._groups.ready, key=lambda g: (self._groups.jobs[g].row_index not in self._awaited, g))
            rest = [group for group in self._groups.spans if group not in best[: self._size]]
            rows = [self._groups.jobs[group].row_index for group in rest]
            self.order.give_back(rows)
            self._awaited = {*rows}
            for group in rest:
                if group in self._groups.ready:
                    self._queue.clear(self._groups.ready[group])
                self._groups.remove(group)
            self._outcome.num_stopped += len(rest)
        return True

    def _take_in(self, group: int, meta: BatchMeta, *, replaces: bool = True) -> None:
        """Keep a complete group, or clear it if it was given up, came twice, has no signal or fails the filter."""
        self._agents.finish(group)
        if group not in self._groups.spans or group in self._groups.ready:
            self._queue.clear(meta)
            return
        rewards = _sampled_rewards(meta)
        self.order.observe(self._groups.jobs[group].row_index, rewards)
        has_signal = not self._config.batch.dynamic_sampling or len({tags["reward"] for tags in meta.tags}) > 1
        if not has_signal or not self._is_kept(meta.tags):
            self._outcome.num_dropped += 1
            self._outcome.rewards += rewards
            self._queue.clear(meta)
            self._give_up(group, replaces=replaces)
        else:
            self._groups.finish(group, meta)

    def _replace_failed(self, report: FailureReport, *, replaces: bool = True) -> None:
        outcome = self._outcome
        outcome.failures.update(report.failures)
        outcome.last_failure = report.last_failure or outcome.last_failure
        for group in report.groups:
            if group in self._groups.spans and group not in self._groups.ready:
                outcome.num_failed_groups += 1
                self._give_up(group, replaces=replaces)

    def _give_up_late(self, version: int) -> None:
        for group in self._policy.expire(self._groups.spans, version):
            self._outcome.num_late += 1
            if group in self._groups.ready:
                self._queue.clear(self._groups.ready[group])
            self._give_up(group)

    def _give_up(self, group: int, *, replaces: bool = True) -> None:
        """Give a group up, and draw another prompt for its position unless enough groups are under way."""
        place = self._groups.jobs[group].place
        self._groups.remove(group)
        if replaces and (not self._config.batch.over_sampling or len(self._groups.spans) < self._size):
            self._submit(self.draw(1, place), salt=f"instead of {group}")

    def _submit(self, jobs: list[Job], salt: str) -> None:
        for job in jobs:
            self._groups.add(job, self._version)
        self._agents.submit(jobs, self.sampling(salt), PARTITION, self._config.batch.group_size)


def take_parts(
    source: RolloutSource, schedule: Schedule, config: Config, step: int, timer: PhaseTimer
) -> Iterator[Generated]:
    """Take the batch of a step: whole, or with `batch.stream` each mini-batch as soon as its groups are complete.

    What the schedule generates while a batch is learned from is released before that batch is given.
    """
    batch = config.batch
    sizes = [batch.mini_batch_size] * (batch.batch_size // batch.mini_batch_size) if batch.stream else [None]
    for number, size in enumerate(sizes, 1):
        with timer.phase("generate" if schedule.is_on_policy else "wait_generate"):
            if number == 1:
                source.release(step)
            part = source.take(step, size)
        if schedule.releases_before_update:
            source.release(step)
        yield replace(part, is_last=number == len(sizes))


def group_filter(name: str | None) -> Filter:
    """The filter of `batch.filter`, whose errors end the run; without a name all groups pass."""
    if name is None:
        return lambda tags: True
    keeps = filter_named(name)

    def checked(tags: Sequence[Mapping[str, Any]]) -> bool:
        try:
            return bool(keeps(tags))
        except Exception as error:
            raise TrainerError(f"batch.filter={name} raised {type(error).__name__}: {error}") from error

    return checked


def claim_groups(queue: TransferQueue, wait_s: float) -> dict[tuple[int, int], BatchMeta]:
    """Claim all groups in the queue, by group and attempt; waits up to `wait_s` for the first."""
    try:
        rows = queue.get_meta(
            partition=PARTITION,
            columns=("group_id",),
            batch_size=1,
            task=_TASK,
            sampler=_FRESH,
            timeout_s=wait_s,
        )
    except WaitTimeoutError:
        return {}
    rows = replace(rows, columns=tuple(rows.tags[0]["columns"]))  # of every put of a run
    found: dict[tuple[int, int], BatchMeta] = {}
    for group in rows.groupby("group_id").values():
        attempts = group.groupby("attempt") if group.tags[0]["attempt"] != group.tags[-1]["attempt"] else {0: group}
        for meta in attempts.values():
            found[meta.tags[0]["group_id"], meta.tags[0]["attempt"]] = meta
    return found


def explained(queue: TransferQueue) -> str:
    """Why no further group can be claimed: rows that are ready, leases and their holders, missing columns."""
    return queue.explain(partition=PARTITION, columns=("group_id",), batch_size=1, task=_TASK, sampler=_FRESH)


def _sampled_rewards(meta: BatchMeta) -> list[float]:
    """Rewards of the policy's own samples."""
    return [tags["reward"] for tags in meta.tags if not tags.get(GIVEN)]


def hash_seed(text: str) -> int:
    """31-bit seed of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1
