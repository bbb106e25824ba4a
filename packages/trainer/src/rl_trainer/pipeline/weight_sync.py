"""Weight sync: sends every version to all replicas, and goes on without a replica that dies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar

from rl_rollout.errors import ServerLostError
from rl_trainer.errors import StaleWeightsError, WorkerDiedError
from rl_trainer.workers.rollout import RolloutWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rl_ckpt.types import SyncReport
    from rl_rollout.types import ServerAddress
    from rl_trainer.pipeline.replicas import AgentReplicas
    from rl_trainer.pipeline.weight_transfer import WeightTransfer
    from rl_trainer.runtime.base import ReplicaSet
    from rl_trainer.workers.engine import EngineWorker
    from rl_trainer.workers.reward_server import RewardServers

R = TypeVar("R")

_SYNC_ATTEMPTS = 4
"""Attempts per version, each without the replicas that died during the last."""
_GONE_CHECK_S = 0.1
_LENT = 1_000_000
"""The numbers of lent replicas begin here, above those that a run's own ones get."""


class _Members:
    """The run's own replicas and, while they are awake, those on the engine's GPUs, as one set of other numbers."""

    def __init__(self, own: ReplicaSet[RolloutWorker], lent: ReplicaSet[RolloutWorker] | None) -> None:
        self._own, self._lent = own, lent
        self.has_lent = False
        """Whether the lent ones are awake."""

    @property
    def lent(self) -> tuple[int, ...]:
        """Numbers of the lent replicas that are awake."""
        return tuple(_LENT + m for m in self._lent.members) if self._lent is not None and self.has_lent else ()

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of all that are there."""
        return (*self._own.members, *self.lent)

    def wait(self) -> tuple[int, ...]:
        """See `ReplicaSet.wait`."""
        return (*self._own.wait(), *self.lent)

    def call(self, method: Callable[..., R], arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, R | Exception]:
        """See `ReplicaSet.call`; both sets at once."""
        lent = {member - _LENT: each for member, each in arguments.items() if member >= _LENT}
        if self._lent is None or not lent:
            return self._own.call(method, arguments)
        own = {member: each for member, each in arguments.items() if member < _LENT}
        with ThreadPoolExecutor(1, thread_name_prefix="lent-replicas") as thread:
            called = thread.submit(self._lent.call, method, lent)
            answers = self._own.call(method, own)
            return answers | {_LENT + member: answer for member, answer in called.result().items()}

    def lose(self, member: int, error: Exception) -> None:
        """See `ReplicaSet.lose`. The process of a lent one is the engine's: the run ends with it."""
        if member >= _LENT:
            raise WorkerDiedError(f"a replica on the engine's GPUs is gone: {error}") from error
        self._own.lose(member, error)


class WeightSync:
    """Weight sync from the actor to every replica; the controller sees only the report.

    A replica that dies is left out, and a version that its death called off is sent again to the others. One that
    joined serves its first request once it has taken part in a sync.

    Colocated with the actor, they have the GPU in turn: replicas and reward models from the end of a sync to
    `yield_memory`, the actor from there to the end of the next sync. So have `lent` replicas, beside those that have
    GPUs of their own, in the steps for which `lends` is set.
    """

    def __init__(
        self,
        actor: EngineWorker,
        servers: ReplicaSet[RolloutWorker],
        agents: AgentReplicas,
        transfer: WeightTransfer,
        *,
        rewards: RewardServers | None = None,
        lent: ReplicaSet[RolloutWorker] | None = None,
        is_colocated: bool = False,
    ) -> None:
        self._actor, self.servers, self._agents, self._rewards = actor, servers, agents, rewards
        self._transfer = transfer
        self._is_colocated = is_colocated
        self._all = _Members(servers, lent)
        self.lends = False
        """Whether the next sync gives the actor's GPUs to the lent replicas."""
        self.in_use: dict[int, ServerAddress] = {}
        """Addresses by member of the replicas that the agents generate on."""

    def yield_memory(self) -> None:
        """Put servers to sleep and onload the actor, where they share GPUs; does nothing otherwise."""
        if lent := self._all.lent:
            self._serve([member for member in self.in_use if member not in lent])  # what is in flight goes on there
            self._on(lent, RolloutWorker.sleep)
            self._all.has_lent = False
            self._actor.onload()
        if self._is_colocated:
            self._on(self.servers.wait(), RolloutWorker.sleep)
            if self._rewards is not None:
                self._rewards.sleep()
            self._actor.onload()

    def sync(self, version: int) -> SyncReport:
        """Send and install `version`; returns when every replica serves it.

        Raises:
            Exception: what either side failed with, where nobody died; both are told.
        """
        if not self._is_colocated and not self.lends:
            return self._sync(version)
        if self.lends:
            self._all.has_lent = True
            return self._sync_and_yield(version, self._all.lent)
        report = self._sync_and_yield(version, self.servers.wait())
        if self._rewards is not None:
            self._agents.use_rewards(self._rewards.wake())
        return report

    def _sync_and_yield(self, version: int, members: Sequence[int]) -> SyncReport:
        """Sync, in whose course the actor's memory becomes that of `members`."""
        self._actor.offload_optimizer()  # before the replicas take the memory of their weights
        self._on(members, RolloutWorker.wake, ("weights",))
        report = self._sync(version)
        self._actor.offload()
        self._on(members, RolloutWorker.wake, ("kv_cache",))
        return report

    def death(self) -> WorkerDiedError | None:
        """Error that ends generation: no replica is left; None while there is one."""
        if not self.in_use or set(self.in_use) & set(self._all.members):
            return None
        return WorkerDiedError(f"no replica is left that has the weights; {' '.join(self.servers.take_news())}")

    def _on(self, members: Sequence[int], method: Callable[..., None], *arguments: Any) -> None:
        for answer in self._all.call(method, dict.fromkeys(members, arguments)).values():
            if isinstance(answer, Exception):
                raise answer

    def _sync(self, version: int) -> SyncReport:
        for attempt in range(_SYNC_ATTEMPTS):
            members = self._declared_receivers()
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

    def _declared_receivers(self) -> dict[int, int]:
        """Number of weight receivers that each present replica declares."""
        while True:
            asked = {member: (self._transfer.weights_for(member),) for member in self._all.wait()}
            declared = self._all.call(RolloutWorker.declare_receivers, asked)
            if not self._find_lost(declared):
                break
        counts: dict[int, int] = {}
        for member, answer in declared.items():
            if isinstance(answer, Exception):
                raise answer
            self._transfer.join(member, answer)
            counts[member] = answer.count
        return counts

    def _send(
        self, version: int, members: Mapping[int, int]
    ) -> tuple[SyncReport | None, BaseException | None, dict[int, Any]]:
        """Send once: the sender's report or error, and each replica's answer.

        `members` are the replicas with the receivers that each declares: the sync waits for all of them.
        """
        addresses = self._transfer.addresses([*members])
        update = {member: (addresses[member], version) for member in members}
        with ThreadPoolExecutor(2, thread_name_prefix="weight-sync") as threads:
            sent = threads.submit(self._transfer.send, version, members)
            updated = threads.submit(self._all.call, RolloutWorker.update_weights, update)
            while not sent.done():
                wait([sent], timeout=_GONE_CHECK_S)
                if not sent.done() and set(members) - set(self._all.members):
                    self._transfer.call_off()  # a replica that is gone never joins, and the others wait for the sender
            error = sent.exception()
            installed = updated.result()
        failed = [answer for answer in installed.values() if isinstance(answer, Exception)]
        if error is None and all(isinstance(answer, (WorkerDiedError, ServerLostError)) for answer in failed):
            return sent.result(), None, installed
        return None, error, installed

    def _find_lost(self, answers: dict[int, Any]) -> list[int]:
        """Lost replicas; one whose server is gone is ended."""
        lost = [m for m, answer in answers.items() if isinstance(answer, (WorkerDiedError, ServerLostError))]
        for member in lost:
            if isinstance(answers[member], ServerLostError):
                self._all.lose(member, answers[member])
        return lost

    def _reason(self, error: BaseException | None, installed: dict[int, Any]) -> BaseException:
        failed = [answer for answer in installed.values() if isinstance(answer, Exception)]
        reason = error or failed[0]
        for answer in failed:
            if answer is not reason:
                reason.add_note(f"the receiving side: {answer}")
        return reason

    def _serve(self, members: list[int]) -> None:
        """Set the replicas that agents generate on."""
        if members == [*self.in_use]:
            return
        unknown = dict.fromkeys([member for member in members if member not in self.in_use], ())
        known = self.in_use | self._all.call(RolloutWorker.address, unknown)
        found = {member: known[member] for member in members}
        self.in_use = {member: each for member, each in found.items() if not isinstance(each, Exception)}
        self._agents.use_servers([*self.in_use.values()])
