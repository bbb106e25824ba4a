"""Agent workers as a replica set: groups are balanced over the members, and assigned again when one dies."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from rl_trainer.errors import WorkerDiedError
from rl_trainer.runtime.dispatch import cut
from rl_trainer.workers.agent import AgentWorker, EvalReport, GroupReport, Job, Stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from rl_rollout.types import ServerAddress
    from rl_tq.types import BatchMeta
    from rl_trainer.data.rows import Row
    from rl_trainer.runtime.base import ReplicaSet


R = TypeVar("R")
_MAX_ATTEMPTS = 3
"""Agent workers that may die while they generate a group, before another prompt replaces it."""
_GROUPS_KEPT, _STEPS_KEPT = 8, 100
"""Groups and steps that `tracking.keep_samples=some` keeps; the second step and the last one are kept in addition."""


@dataclass(frozen=True, slots=True)
class _Submission:
    job: Job
    sampling_params: dict[str, Any]
    partition: str
    group_size: int


class AgentReplicas:
    """Agent workers as a replica set, with the methods of one.

    Jobs are dealt over those that are there. Those of one that died are dealt again, as another attempt: what it may
    have written of them is never taken for theirs. A new member is given the servers in use before any work.
    """

    def __init__(self, replica_set: ReplicaSet[AgentWorker], servers: Mapping[str, tuple[ServerAddress, ...]]) -> None:
        self.replica_set = replica_set
        self._servers = {**servers}
        self._rewards: dict[str, list[ServerAddress]] = {}
        self._connected = dict.fromkeys(replica_set.members, (self._servers, self._rewards))
        self.is_held = False
        """Whether rollouts are stopped."""
        self._running: dict[int, dict[int, _Submission]] = {}
        self._member_of: dict[int, int] = {}

    def use_servers(self, servers: Sequence[ServerAddress], policy: str = "") -> None:
        """Set the servers of a policy, on which all members generate."""
        self._servers = {**self._servers, policy: tuple(servers)}
        self._members()

    def use_rewards(self, servers: Sequence[tuple[str, ServerAddress]]) -> None:
        """Set the servers of the reward models, each with its part of the reward, on all members."""
        self._rewards = {name: [each for part, each in servers if part == name] for name, _ in servers}
        self._members()

    def prompt_lengths(self, rows: list[Row]) -> list[int | str]:
        """Tokens of each prompt as it is sent, or why a row cannot be used."""
        return self._map(AgentWorker.prompt_lengths, rows)

    def evaluate(self, jobs: list[Job], sampling_params: dict[str, Any]) -> list[EvalReport]:
        """Score one completion per row; nothing enters the queue."""
        return self._map(AgentWorker.evaluate, jobs, sampling_params)

    def num_evaluated(self) -> int:
        """Completions that the evaluation under way has graded, on the members that answer."""
        members = self.replica_set.members
        answers = self.replica_set.call(AgentWorker.num_evaluated, dict.fromkeys(members, ()))
        return sum(answer for answer in answers.values() if isinstance(answer, int))

    def write_samples(self, batch: BatchMeta, step: int, folder: str) -> None:
        """Have one member write these rows of the queue; where it died there are none of this step."""
        first = min(self._members())
        self._raise_unless_dead(self.replica_set.call(AgentWorker.write_samples, {first: (batch, step, folder)}))

    def _map(self, method: Callable[..., list[R]], items: list[Any], *rest: Any) -> list[R]:
        """Map a method over a list that is split over the members, in order."""
        members = self._members()
        parts = {member: part for member, part in zip(members, cut(items, len(members)), strict=True) if part}
        answers = self.replica_set.call(method, {member: (part, *rest) for member, part in parts.items()})
        joined: list[R] = []
        for member, part in parts.items():
            answer = answers[member]
            if isinstance(answer, WorkerDiedError):
                joined += self._map(method, part, *rest)
            elif isinstance(answer, Exception):
                raise answer
            else:
                joined += answer
        return joined

    def submit(self, jobs: list[Job], sampling_params: dict[str, Any], partition: str, group_size: int) -> None:
        """Roll every job out `group_size` times, in the background, and put the complete groups into `partition`."""
        self._deal([_Submission(job, sampling_params, partition, group_size) for job in jobs])

    def finish(self, group: int) -> None:
        """Finish a submitted group: it is not assigned again."""
        member = self._member_of.pop(group, None)
        if member in self._running:
            self._running[member].pop(group, None)

    def _deal(self, submissions: list[_Submission]) -> None:
        """Assign each job to the member with the fewest running groups."""
        members = self._members()
        dealt: dict[int, dict[int, list[_Submission]]] = {}  # by sampling parameters, which a call has one of
        loads = [(len(self._running.setdefault(member, {})), member) for member in members]
        heapq.heapify(loads)
        for submission in submissions:
            load, member = loads[0]
            heapq.heapreplace(loads, (load + 1, member))
            self._running[member][submission.job.group_id] = submission
            self._member_of[submission.job.group_id] = member
            dealt.setdefault(id(submission.sampling_params), {}).setdefault(member, []).append(submission)
        for by_member in dealt.values():
            arguments = {
                member: ([each.job for each in some], some[0].sampling_params, some[0].partition, some[0].group_size)
                for member, some in by_member.items()
            }
            self._raise_unless_dead(self.replica_set.call(AgentWorker.submit, arguments))

    def poll(self) -> list[GroupReport]:
        """Groups that ended since the last call; those of members that died are assigned again, or fail at last."""
        members = self._members()
        lost = [self._running.pop(member) for member in [*self._running] if member not in members]
        again, given_up = list[_Submission](), list[GroupReport]()
        for each in (each for groups in lost for each in groups.values()):
            job = replace(each.job, attempt=each.job.attempt + 1)
            if job.attempt < _MAX_ATTEMPTS:
                again.append(replace(each, job=job))
                continue
            why = f"{job.attempt} agent workers died one after the other while they generated this row's group"
            report = GroupReport(
                failed=(job.group_id,), failures={"worker_died": 1}, last_failure=f"{job.where}: {why}"
            )
            given_up.append(report)
        if again:
            self._deal(again)
        return [*given_up, *self._reports_of(members)]

    def hold(self) -> None:
        """Stop generating on all members: `AgentWorker.hold`."""
        self._raise_unless_dead(self.replica_set.call(AgentWorker.hold, dict.fromkeys(self._running, ())))
        self.is_held = True

    def stopped(self) -> list[Stopped]:
        """Completions of running groups that the last `hold` has stopped: `AgentWorker.stopped`."""
        answers = self.replica_set.call(AgentWorker.stopped, dict.fromkeys(self.replica_set.members, ()))
        self._raise_unless_dead(answers)
        found = [each for answer in answers.values() if isinstance(answer, list) for each in answer]
        running = {None, *(group for groups in self._running.values() for group in groups)}
        return [each for each in found if each.group_id in running]

    def restore(self, stopped: list[Stopped]) -> None:
        """Have rollouts go on with completions of an earlier process, whichever member has their row."""
        arguments = dict.fromkeys(self._members(), (stopped,))
        self._raise_unless_dead(self.replica_set.call(AgentWorker.restore, arguments))

    def release(self) -> None:
        """Continue what `hold` has stopped, if anything."""
        if not self.is_held:
            return
        self.is_held = False
        self._raise_unless_dead(self.replica_set.call(AgentWorker.release, dict.fromkeys(self._running, ())))

    def _reports_of(self, members: Sequence[int]) -> list[GroupReport]:
        answers = self.replica_set.call(AgentWorker.poll, dict.fromkeys(members, ()))
        self._raise_unless_dead(answers)
        reports = [report for answer in answers.values() if isinstance(answer, list) for report in answer]
        for report in reports:
            for group in (*report.failed, *report.late, *(each.group_id for each in report.dropped)):
                self.finish(group)
        return reports

    def _members(self) -> tuple[int, ...]:
        """Present members, each with the list of servers in use."""
        members, wanted = self.replica_set.wait(), (self._servers, self._rewards)
        behind = [member for member in members if self._connected.get(member) != wanted]
        if behind:
            addresses = dict.fromkeys(behind, wanted)
            self._raise_unless_dead(self.replica_set.call(AgentWorker.use_servers, addresses))
            self._connected |= dict.fromkeys(behind, wanted)
        return members

    def _raise_unless_dead(self, answers: dict[int, Any]) -> None:
        """Raise errors other than deaths, which the next poll handles."""
        for answer in answers.values():
            if isinstance(answer, Exception) and not isinstance(answer, WorkerDiedError):
                raise answer


class SomeSamples:
    """Keeps a few groups of a few steps. An agent worker writes them, so that it takes no process."""

    def __init__(self, agents: AgentReplicas, folder: Path, num_steps: int) -> None:
        self._agents, self._folder = agents, folder
        self._num_steps, self._every = num_steps, math.ceil(num_steps / _STEPS_KEPT)

    def write(self, batch: BatchMeta, step: int) -> None:
        """Keep the first groups of a step that is one of those to keep."""
        is_chosen = step in (2, self._num_steps) or (step > 1 and step % self._every == 0)
        if not is_chosen:  # the first step never is: what writing imports would delay the first reward by seconds
            return
        chosen = list(dict.fromkeys(tags["group_id"] for tags in batch.tags))[:_GROUPS_KEPT]
        rows = [index for index, tags in enumerate(batch.tags) if tags["group_id"] in chosen]
        self._agents.write_samples(batch.reorder(rows), step, str(self._folder))
