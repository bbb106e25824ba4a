"""Rollout source: draws prompts, submits them to agent workers, and claims complete groups from the queue.

One source serves every schedule. The queue decides, by the partition's staleness policy, how many groups may be
outstanding, which of them a batch gets and which are too old. The source asks it for a credit per group, which travels
with the job; the agent worker spends it when it puts the group, and the rows are acknowledged once they were learned
from. A group that fails, has no signal or comes too late is replaced by another prompt. Which prompts were released and
not learned from yet is known at any moment, so that a run can be resumed.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rl_tq.errors import WaitTimeoutError
from rl_tq.registry import create_policy
from rl_tq.types import BatchMeta
from rl_tq.types.staleness import ADMITTED
from rl_trainer.data.datasets import location
from rl_trainer.errors import InputError, RolloutFailedError
from rl_trainer.metrics import Evaluation, HeldGroup
from rl_trainer.workers.agent import GroupReport, Job
from rl_trainer.workers.grading import GradedGroup, sampled_rewards

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

    from rl_tq.base import TransferQueue
    from rl_tq.types import Credit, StalenessPolicy
    from rl_trainer.config import Config
    from rl_trainer.data import Order, Row
    from rl_trainer.data.sampler import StreamOrder
    from rl_trainer.metrics import PhaseTimer
    from rl_trainer.pipeline.replay_buffer import Replay
    from rl_trainer.pipeline.replicas import AgentReplicas
    from rl_trainer.pipeline.staleness import Schedule

PARTITION = "train"
"""Partition of the queue that agent workers put groups into."""
_TASK = "train"
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
    """Groups that were not waited for (`batch.over_sampling`): they continue in the next step."""
    late_groups: int = 0
    """Groups thrown away because their weights had become too old (`staleness.policy`)."""
    groups: tuple[HeldGroup, ...] = ()
    """The groups in `batch` that were generated for it."""
    reused: tuple[HeldGroup, ...] = ()
    """The groups in `batch` that an earlier step has learned from (`batch.replay`)."""
    is_last: bool = True
    """Whether no other part of the step's batch follows."""

    def of_policy(self, name: str) -> BatchMeta:
        """Rows that a policy has generated, of several; of the only one all of them, under an empty name."""
        return self.batch.filter(lambda tags: tags["policy"] == name) if name else self.batch

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


class RolloutSource:
    """Rollout source: releases prompts as the queue admits, and gives batches of complete groups.

    `num_groups` is the highest group id that was given before. `poll_s` are the seconds between two questions to the
    agent workers; a batch that is complete comes without one.
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
        self._version = -1
        """Weight version that the queue was advanced to."""
        self._step, self._position, self._size = first_step - 1, 0, 0
        """The next slot to release: its step, its position in that step's batch, and the size of that batch."""
        self._running: dict[int, Job] = {}
        """Groups that are being generated, each with its credit."""
        self._finished: dict[int, HeldGroup] = {}
        """Groups that wait in the queue to be learned from."""
        self._claimed: list[BatchMeta] = []
        """Parts of the next batch that were claimed before the weights changed."""
        self._polled_at = -math.inf
        self._num_asked = 0
        self._awaited = set(order.returned) if config.batch.over_sampling else set[int]()
        """Prompts whose groups are waited for: they were stopped once."""
        self._left = set[int]()
        """Groups that an earlier batch has left over (`batch.over_sampling`)."""
        self.should_stop: Callable[[], bool] = lambda: False
        """Whether a wait for rollouts is to end, asked while nothing of the step has been learned."""
        self.sleep: Callable[[float], None] = time.sleep
        """Lets time pass until agent workers are asked again."""
        self._num_taken = 0
        self._outcome = _Outcome()

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
        return len(self._finished), len(self._finished) + len(self._running)

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
        return tuple(job.row_index for _, job in sorted(self._running.items()))

    @property
    def held(self) -> tuple[HeldGroup, ...]:
        """The groups that are finished and wait to be learned from, in order of release."""
        return tuple(group for _, group in sorted(self._finished.items()))

    def resume(self, groups: Sequence[HeldGroup]) -> None:
        """Resume with finished groups of an earlier process: restore their rows, and clear all others.

        Other rows were put after the checkpoint's step, and their prompts are generated again.

        Raises:
            InputError: a group is not in the queue, so that its snapshot is not this checkpoint's.
        """
        if not groups:
            return
        self._queue.restore(PARTITION, self._step, task=_TASK)
        num_rows = self._queue.stats()["partitions"].get(PARTITION, {}).get("rows", 0)
        known = {(group.group_id, group.attempt) for group in groups}
        if num_rows:
            claim: dict[str, Any] = {
                "partition": PARTITION,
                "columns": ("group_id",),
                "task": _TASK,
                "timeout_s": _RESUME_WAIT_S,
            }
            rows = self._queue.get_meta(**claim, batch_size=num_rows, sampler=create_policy("all_ready"))
            self._queue.clear(rows.filter(lambda tags: (tags["group_id"], tags["attempt"]) not in known))
            known -= {(tags["group_id"], tags["attempt"]) for tags in rows.tags if ADMITTED in tags}
            self._queue.restore(PARTITION, self._step, task=_TASK)
        if known:
            raise InputError(
                f"the checkpoint's queue has no rows of group {min(known)[0]}; resume from another checkpoint"
            )
        self._finished = {group.group_id: group for group in groups}
        self._size = self._config.batch.batch_size if self._replay is None else len(groups)
        steps, last = divmod(len(groups) - 1, self._size)
        self._step, self._position = self._step + steps + 1, last + 1

    def release(self, version: int) -> None:
        """Release prompts, as many as the queue admits, now that the servers hold weights of `version`."""
        self._advance(version)
        while True:
            if self._replay is not None and {*self._running, *self._finished} - self._left:
                return  # with replay a release is one step's
            is_new = self._position == self._size
            if (is_new and self._step == self._config.steps) or (self._claimed and self.is_at_step_start):
                return
            try:
                first = self._admit()
            except WaitTimeoutError:
                return
            if is_new:
                self._step, self._position = self._step + 1, 0
                self._size = self._config.batch.batch_size - (len(self._replay.draw(self._step)) if self._replay else 0)
            wanted = self._size - self._position
            admitted = [first]
            with suppress(WaitTimeoutError):
                extra = math.ceil(wanted * self._config.batch.over_sampling)
                admitted.extend(self._admit() for _ in range(wanted - 1 + extra))
            self._submit(admitted, self._position, salt=f"{self._step}/0")
            self._position += min(len(admitted), wanted)

    def take(self, version: int, num_groups: int | None = None) -> Generated:
        """Take a batch that weights of `version` may learn from, waiting for it; replayed groups come last.

        With `num_groups` a part of a batch.

        Raises:
            RolloutFailedError: more than `batch.max_refills` batches of groups had to be replaced, or nothing came
                within `timeout_s`.
            StopRequestedError: `should_stop` says so, and this is the first batch of its step.
        """
        self._advance(version)
        claimed = self._claimed.pop(0) if self._claimed else self._claim(num_groups)
        groups = dict.fromkeys(tags["group_id"] for tags in claimed.tags)
        batch = replace(claimed, task="", leases=())
        self._num_taken += 1
        outcome, self._outcome = self._outcome, _Outcome()
        generated = Generated(
            batch=batch,
            claimed=claimed,
            groups=tuple(self._finished.pop(group) for group in groups),
            reward=fmean([*outcome.rewards, *sampled_rewards(batch.tags)]),
            failures=dict(outcome.failures),
            last_failure=outcome.last_failure,
            dropped_groups=outcome.num_dropped,
            stopped_groups=outcome.num_stopped,
            late_groups=outcome.num_late,
        )
        if self._replay is None:
            return generated
        again = self._replay.drawn
        batch = type(batch).concat([batch, *self._replay.rows_of(again, PARTITION)])
        return replace(generated, batch=batch, reused=tuple(used.group for used in again))

    def finish(self, generated: Generated, step: int) -> None:
        """Acknowledge the rows that step `step` has learned from, which frees them, and clear replayed copies."""
        self._num_taken = 0
        if generated.claimed is not None:
            self._queue.ack(generated.claimed, step=step)
            if copies := range(len(generated.claimed), len(generated.batch)):
                self._queue.clear(generated.batch.reorder(copies))

    def settle(self) -> None:
        """Wait until the next batch is complete and nothing is being generated: weights may change then.

        Raises:
            RolloutFailedError: as `take`.
        """
        if self._agents.is_held or not (self._running or self._finished):
            return
        batch = self._config.batch
        num_parts = batch.batch_size // batch.mini_batch_size if batch.stream else 1
        while len(self._claimed) < num_parts:
            self._claimed.append(self._claim(batch.mini_batch_size if batch.stream else None))
        waited = self._waiting()
        while self._running and not self._agents.is_held:
            next(waited)
            self.sleep(self._poll_s)

    def collect(self) -> None:
        """Take in what agent workers report: groups that failed, have no signal or come too late are replaced."""
        if self._running and not self._agents.is_held and time.monotonic() - self._polled_at >= self._poll_s:
            for report in self._agents.poll():
                self._take_in(report)
            self._polled_at = time.monotonic()

    def evaluate(self, rows: Sequence[Row]) -> Evaluation:
        """Evaluate `rollout.eval_samples` completions per held-out row, at `eval_temperature`.

        Raises:
            RolloutFailedError: more than one in ten failed, so that a mean would say little.
        """
        sampling = self.sampling("eval", temperature=self._config.rollout.eval_temperature)
        each = range(self._config.rollout.eval_samples * len(rows))
        self._agents.release()
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
        by_policy: dict[str, list[float]] = {}
        for report in reports:
            for policy, reward in zip(report.policies, report.rewards, strict=False):  # none for one policy
                by_policy.setdefault(policy, []).append(reward)
        right = [report.num_right for report in reports if report.rewards]
        return Evaluation(
            reward=sum(rewards) / len(rewards),
            accuracy=None if None in right else sum(filter(None, right)) / len(rewards),
            num_prompts=len(rows),
            num_failed=num_failed,
            last_failure=reason,
            policy_rewards={f"{name}/eval_reward": fmean(own) for name, own in by_policy.items() if name},
        )

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

    def _advance(self, version: int) -> None:
        """Report the weights on the servers to the queue, and replace the groups that it gives up as too old."""
        if self._version == -1:
            self._queue.configure(PARTITION, staleness=self._policy, tasks=(_TASK,))
        if version <= self._version:
            return
        self._version = version
        for group in self._queue.advance(PARTITION, version).groups:
            self._outcome.num_late += 1
            self._give_up(group)

    def _admit(self) -> Credit:
        """Credit of another group.

        Raises:
            WaitTimeoutError: the queue admits none; says why.
        """
        num_rows, group = self._config.batch.group_size, self._num_groups + 1
        credit = self._queue.admit(partition=PARTITION, num_rows=num_rows, group_id=group, timeout_s=0.0)
        self._num_groups = group
        return credit

    def _waiting(self) -> Iterator[None]:
        """Collect at every turn of a wait for rollouts, until it cannot succeed any more or its deadline passes."""
        sizes, deadline = self._config.batch, time.monotonic() + self._config.timeout_s
        self.collect()
        while True:
            yield
            if self.is_at_step_start and self.should_stop():
                raise StopRequestedError
            outcome = self._outcome
            num_replaced = outcome.num_failed_groups + outcome.num_dropped
            if num_replaced > sizes.max_refills * sizes.batch_size or time.monotonic() > deadline:
                done, released = self.progress
                why = self._queue.explain(partition=PARTITION, columns=("group_id",), batch_size=self._size, task=_TASK)
                raise RolloutFailedError(
                    f"weights version {self._version}: {done} of {released} groups that were released are complete, "
                    f"{self._size} are needed; failed rollouts {dict(outcome.failures)}, groups dropped because of "
                    f"their rewards {outcome.num_dropped}, groups replaced {num_replaced} (at most batch.max_refills x "
                    f"batch.batch_size = {sizes.max_refills * sizes.batch_size}); the last failure: "
                    f"{outcome.last_failure or 'none'}; deadline timeout_s={self._config.timeout_s:g}; the queue: {why}"
                )
            self.collect()

    def _claim(self, num_groups: int | None) -> BatchMeta:
        """Claim groups that the queue chooses, waiting for them: those of a batch, or `num_groups`."""
        count = self._size if self._replay is not None else num_groups or self._config.batch.batch_size
        claimed: dict[Hashable, BatchMeta] = {}
        wait_s = 0.0
        for _ in self._waiting():
            if any(job.row_index in self._awaited for job in self._running.values()):
                self.sleep(wait_s)
            else:
                with suppress(WaitTimeoutError):
                    claimed |= self._claim_now(count - len(claimed), wait_s)
            if len(claimed) == count:
                break
            wait_s = self._poll_s
        if self._config.batch.over_sampling:
            self._hold_stragglers(claimed.keys())
        rows = BatchMeta.concat([*claimed.values()])
        return replace(rows, columns=tuple(rows.tags[0]["columns"]))  # of every put of a run

    def _claim_now(self, count: int, wait_s: float) -> dict[Hashable, BatchMeta]:
        """Claim `count` groups, and clear those among them that were put by a worker which died and given up since.

        Raises:
            WaitTimeoutError: the queue does not give as many within `wait_s`.
        """
        claim: dict[str, Any] = {"partition": PARTITION, "columns": ("group_id",), "task": _TASK}
        groups = self._queue.get_meta(**claim, batch_size=count, timeout_s=wait_s).groupby("group_id")
        for group in [group for group in groups if group not in self._running and group not in self._finished]:
            self._queue.clear(groups.pop(group))
        self._take_in(GroupReport(finished=tuple(GradedGroup.of(rows.tags) for rows in groups.values())))
        return groups

    def _hold_stragglers(self, claimed: Collection[Hashable]) -> None:
        """Stop what the batch does not need (`batch.over_sampling`), until the next prompts are released.

        Every completion keeps its tokens and continues under the new weights. The next step waits for these groups:
        none is left out for being long.
        """
        if self._running:
            self._agents.hold()
        late = [group for group in self._finished if group not in claimed]
        self._left = {*self._running, *late}
        rows = {group: job.row_index for group, job in self._running.items()}
        self._awaited = {*rows.values()} | {self._finished[group].row_index for group in late}
        self._outcome.num_stopped += len(self._left)

    def _take_in(self, report: GroupReport) -> None:
        """Count what a worker reports, and give up the groups that will not come."""
        outcome = self._outcome
        outcome.failures.update(report.failures)
        outcome.last_failure = report.last_failure or outcome.last_failure
        for graded in report.finished:
            job = self._running.pop(graded.group_id, None)
            if job is not None:  # neither known to be in the queue, nor given up
                self._agents.finish(graded.group_id)
                self.order.observe(job.row_index, graded.rewards)
                self._finished[graded.group_id] = HeldGroup(
                    group_id=graded.group_id,
                    row_index=job.row_index,
                    place=job.place,
                    released=_credit_of(job).weight_version,
                    attempt=graded.attempt,
                )
        for graded in report.dropped:
            if (job := self._running.get(graded.group_id)) is not None:
                self.order.observe(job.row_index, graded.rewards)
                outcome.num_dropped += 1
                outcome.rewards += graded.rewards
                self._give_up(graded.group_id)
        for group in report.late:
            if group in self._running:
                outcome.num_late += 1
                self._give_up(group)
        for group in report.failed:
            if group in self._running:
                outcome.num_failed_groups += 1
                self._give_up(group)

    def _give_up(self, group: int) -> None:
        """Give a group up, and draw another prompt for its position unless enough groups are under way."""
        job = self._running.pop(group, None)
        if job is not None:
            self._agents.finish(group)
            self._queue.release(_credit_of(job))
        place = job.place if job is not None else self._finished.pop(group).place
        if not self._config.batch.over_sampling or self.progress[1] < self._size:
            self._submit([self._admit()], place, salt=f"instead of {group}")

    def _submit(self, admitted: Sequence[Credit], first_place: int, salt: str) -> None:
        """Draw a prompt for each credit, at positions of a step's batch from `first_place` on, and roll them out."""
        self._agents.release()
        indexes = self.order.take(len(admitted))
        jobs = [
            Job(
                row=self._rows[index],
                row_index=index,
                group_id=credit.group_id,
                place=first_place + number,
                where=location(self._rows, index),
                credit=credit,
            )
            for number, (index, credit) in enumerate(zip(indexes, admitted, strict=True))
        ]
        self._running |= {job.group_id: job for job in jobs}
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


def _credit_of(job: Job) -> Credit:
    assert job.credit is not None, "it was released with one"
    return job.credit


def hash_seed(text: str) -> int:
    """31-bit seed of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1
