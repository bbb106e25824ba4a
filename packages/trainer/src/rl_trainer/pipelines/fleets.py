"""Agent workers and rollout replicas as fleets: what was asked of one that died is asked of another."""

from __future__ import annotations

import heapq
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from rl_rollout.errors import ServerLostError
from rl_trainer.dispatch import cut
from rl_trainer.errors import StaleWeightsError, WorkerDiedError
from rl_trainer.workers.agent import AgentWorker
from rl_trainer.workers.services import RolloutWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_ckpt.types import SyncReport
    from rl_rollout.types import ServerAddress
    from rl_trainer.base import Fleet
    from rl_trainer.data import Row
    from rl_trainer.workers.agent import EvalReport, GenerateReport, Job
    from rl_trainer.workers.engine import EngineWorker
    from rl_trainer.workers.reward_server import RewardServers

R = TypeVar("R")

_SYNC_ATTEMPTS = 4
"""Of one version, each without the replicas that died during the last."""
_GONE_CHECK_S = 0.1


@dataclass(frozen=True, slots=True)
class _Submission:
    job: Job
    sampling_params: dict[str, Any]
    partition: str
    group_size: int


class AgentFleet:
    """The agent workers behind the methods of one.

    Jobs are dealt over those that are there. Those of one that died are dealt again, as another attempt: what it may
    have written of them is never taken for theirs. A new member is given the servers in use before any work.
    """

    def __init__(self, fleet: Fleet[AgentWorker], servers: Sequence[ServerAddress]) -> None:
        self.fleet = fleet
        self._servers, self._reward_urls = tuple(servers), dict[str, str]()
        self._connected = dict.fromkeys(fleet.members, (self._servers, self._reward_urls))
        self._running: dict[int, dict[int, _Submission]] = {}

    def use_servers(self, servers: Sequence[ServerAddress]) -> None:
        """Have all members generate on these servers, and on no others, from now on."""
        self._servers = tuple(servers)
        self._members()

    def use_rewards(self, urls: dict[str, str]) -> None:
        """Have all members ask the reward models that the run serves at these places from now on."""
        self._reward_urls = urls
        self._members()

    def prompt_lengths(self, rows: list[Row]) -> list[int]:
        """Tokens of each prompt as the chat template renders it."""
        return self._map(AgentWorker.prompt_lengths, rows)

    def evaluate(self, rows: list[Row], sampling_params: dict[str, Any]) -> list[EvalReport]:
        """Score one completion per row; nothing enters the queue."""
        return self._map(AgentWorker.evaluate, rows, sampling_params)

    def generate(
        self, jobs: list[Job], sampling_params: dict[str, Any], partition: str, group_size: int
    ) -> list[GenerateReport]:
        """Roll every job out `group_size` times and put the complete groups into `partition`."""
        return self._map(AgentWorker.generate, jobs, sampling_params, partition, group_size)

    def _map(self, method: Callable[..., list[R]], items: list[Any], *rest: Any) -> list[R]:
        """What the members make of a list that is cut over them, in its order."""
        members = self._members()
        parts = {member: part for member, part in zip(members, cut(items, len(members)), strict=True) if part}
        answers = self.fleet.call(method, {member: (part, *rest) for member, part in parts.items()})
        joined: list[R] = []
        for member, part in parts.items():
            answer = answers[member]
            if isinstance(answer, WorkerDiedError):
                again = [_again(item) for item in part] if method is AgentWorker.generate else part
                joined += self._map(method, again, *rest)
            elif isinstance(answer, Exception):
                raise answer
            else:
                joined += answer
        return joined

    def submit(
        self, jobs: list[Job], sampling_params: dict[str, Any], partition: str, group_size: int
    ) -> list[GenerateReport]:
        """As `generate`, in the background, beside what is running already; `poll` tells what came of it."""
        self._deal([_Submission(job, sampling_params, partition, group_size) for job in jobs])
        return []

    def _deal(self, submissions: list[_Submission]) -> None:
        """Give each to the member with the fewest groups in hand."""
        members = self._members()
        dealt: dict[tuple[int, int], list[_Submission]] = {}
        loads = [(len(self._running.setdefault(member, {})), member) for member in members]
        heapq.heapify(loads)
        for submission in submissions:
            load, member = loads[0]
            heapq.heapreplace(loads, (load + 1, member))
            self._running[member][submission.job.group_id] = submission
            dealt.setdefault((member, id(submission.sampling_params)), []).append(submission)
        for (member, _), some in dealt.items():
            first = some[0]
            arguments = ([each.job for each in some], first.sampling_params, first.partition, first.group_size)
            self._raise_unless_dead(self.fleet.call(AgentWorker.submit, {member: arguments}))

    def poll(self) -> list[GenerateReport]:
        """What has become of submitted groups since the last call; those of members that died are dealt again."""
        members = self._members()
        lost = [self._running.pop(member) for member in [*self._running] if member not in members]
        if again := [_once_more(each) for groups in lost for each in groups.values()]:
            self._deal(again)
        answers = self.fleet.call(AgentWorker.poll, dict.fromkeys(members, ()))
        self._raise_unless_dead(answers)
        reports: list[GenerateReport] = []
        for member, answer in answers.items():
            for report in answer if isinstance(answer, list) else ():
                for group in (*report.complete_groups, *report.failed_groups):
                    del self._running[member][group]
                reports.append(report)
        return reports

    def stop_running(self) -> list[GenerateReport]:
        """Stop every submitted group that is not complete; what became complete meanwhile, and was not polled yet."""
        self._raise_unless_dead(self.fleet.call(AgentWorker.stop_running, dict.fromkeys(self._running, ())))
        members = [member for member in self._running if member in self.fleet.members]
        answers = self.fleet.call(AgentWorker.poll, dict.fromkeys(members, ()))
        self._raise_unless_dead(answers)
        self._running.clear()
        return [report for answer in answers.values() if isinstance(answer, list) for report in answer]

    def _members(self) -> tuple[int, ...]:
        """Those that are there, each with the servers in use."""
        members, wanted = self.fleet.wait(), (self._servers, self._reward_urls)
        behind = [member for member in members if self._connected.get(member) != wanted]
        if behind:
            told = dict.fromkeys(behind, (list(self._servers), self._reward_urls))
            self._raise_unless_dead(self.fleet.call(AgentWorker.use_servers, told))
            self._connected |= dict.fromkeys(behind, wanted)
        return members

    def _raise_unless_dead(self, answers: dict[int, Any]) -> None:
        """The dead are noticed by the next poll; any other error ends the run."""
        for answer in answers.values():
            if isinstance(answer, Exception) and not isinstance(answer, WorkerDiedError):
                raise answer


def _again(job: Job) -> Job:
    return replace(job, attempt=job.attempt + 1)


def _once_more(submission: _Submission) -> _Submission:
    return replace(submission, job=_again(submission.job))


class WeightSync:
    """Moves the actor's weights to every replica. The controller sees only the report.

    A replica that dies is left out, and a version that its death called off is sent again to the others. One that
    joined serves its first request once it has taken part in a sync.

    Colocated with the actor, they have the GPU in turn: replicas and reward models from the end of a sync to
    `yield_memory`, the actor from there to the end of the next sync.
    """

    def __init__(
        self,
        actor: EngineWorker,
        servers: Fleet[RolloutWorker],
        agents: AgentFleet,
        *,
        rewards: RewardServers | None = None,
        is_colocated: bool = False,
    ) -> None:
        self._actor, self.servers, self._agents, self._rewards = actor, servers, agents, rewards
        self._is_colocated = is_colocated
        self.in_use: dict[int, ServerAddress] = {}
        """By member, the replicas that the agents generate on."""

    def yield_memory(self) -> None:
        """The actor's turn, where it shares a GPU with the replicas; nothing where it does not."""
        if self._is_colocated:
            self._on_all(RolloutWorker.sleep)
            if self._rewards is not None:
                self._rewards.sleep()
            self._actor.onload()

    def sync(self, version: int) -> SyncReport:
        """Send and install `version`; returns when every replica serves it.

        Raises:
            Exception: what either side failed with, where nobody died; both are told.
        """
        if not self._is_colocated:
            return self._sync(version)
        self._on_all(RolloutWorker.wake, ("weights",))
        report = self._sync(version)
        self._actor.offload()
        self._on_all(RolloutWorker.wake, ("kv_cache",))
        if self._rewards is not None:
            self._agents.use_rewards(self._rewards.wake())
        return report

    def death(self) -> WorkerDiedError | None:
        """What ends generation: none of the replicas that the agents generate on is there any more."""
        if not self.in_use or set(self.in_use) & set(self.servers.members):
            return None
        return WorkerDiedError(f"no replica is left that has the weights; {' '.join(self.servers.take_news())}")

    def _on_all(self, method: Callable[..., None], *arguments: Any) -> None:
        for answer in self.servers.call(method, dict.fromkeys(self.servers.wait(), arguments)).values():
            if isinstance(answer, Exception):
                raise answer

    def _sync(self, version: int) -> SyncReport:
        for attempt in range(_SYNC_ATTEMPTS):
            self._find_lost(self.servers.call(RolloutWorker.check_health, dict.fromkeys(self.servers.wait(), ())))
            members = self.servers.wait()
            report, error, installed = self._send(version, members)
            lost = self._find_lost(installed)
            if report is not None and len(lost) < len(members):
                if report.lost and not lost:
                    raise StaleWeightsError(
                        f"weights version {version} was committed, but {', '.join(report.lost)} did not confirm it"
                    )
                self._serve([member for member in members if member not in lost])
                return report
            if not lost or attempt + 1 == _SYNC_ATTEMPTS:
                raise self._reason(error, installed)
        raise AssertionError("the last attempt returned or raised")

    def _send(
        self, version: int, members: tuple[int, ...]
    ) -> tuple[SyncReport | None, BaseException | None, dict[int, Any]]:
        """One attempt: what the sender reports or fails with, and what each replica answered."""
        with ThreadPoolExecutor(2, thread_name_prefix="weight-sync") as threads:
            sent = threads.submit(self._actor.send_weights, version, len(members))
            update = threads.submit(self.servers.call, RolloutWorker.update_weights, dict.fromkeys(members, (version,)))
            while not sent.done():
                wait([sent], timeout=_GONE_CHECK_S)
                if not sent.done() and set(members) - set(self.servers.members):
                    self._actor.call_off()  # a replica that is gone never joins, and the others wait for the sender
            error = sent.exception()
            installed = update.result()
        failed = [answer for answer in installed.values() if isinstance(answer, Exception)]
        if error is None and all(isinstance(answer, (WorkerDiedError, ServerLostError)) for answer in failed):
            return sent.result(), None, installed
        return None, error, installed

    def _find_lost(self, answers: dict[int, Any]) -> list[int]:
        """The replicas that are gone; one whose server is gone goes with it."""
        lost = [m for m, answer in answers.items() if isinstance(answer, (WorkerDiedError, ServerLostError))]
        for member in lost:
            if isinstance(answers[member], ServerLostError):
                self.servers.lose(member, answers[member])
        return lost

    def _reason(self, error: BaseException | None, installed: dict[int, Any]) -> BaseException:
        failed = [answer for answer in installed.values() if isinstance(answer, Exception)]
        reason = error or failed[0]
        for answer in failed:
            if answer is not reason:
                reason.add_note(f"the receiving side: {answer}")
        return reason

    def _serve(self, members: list[int]) -> None:
        """Have the agents use exactly these replicas."""
        if members == [*self.in_use]:
            return
        unknown = dict.fromkeys([member for member in members if member not in self.in_use], ())
        known = self.in_use | self.servers.call(RolloutWorker.address, unknown)
        found = {member: known[member] for member in members}
        self.in_use = {member: each for member, each in found.items() if not isinstance(each, Exception)}
        self._agents.use_servers([*self.in_use.values()])
