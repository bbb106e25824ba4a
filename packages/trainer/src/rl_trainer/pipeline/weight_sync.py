"""Weight sync: sends every version to all replicas, and goes on without a replica that dies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from rl_rollout.errors import ServerLostError
from rl_trainer.errors import StaleWeightsError, WorkerDiedError
from rl_trainer.pipeline.weight_transfer import CHECK_S
from rl_trainer.workers.rollout import RolloutWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from rl_ckpt.types import SyncReport
    from rl_rollout.types import ServerAddress
    from rl_trainer.pipeline.replicas import AgentReplicas
    from rl_trainer.pipeline.weight_transfer import WeightTransfer
    from rl_trainer.runtime.base import ReplicaSet
    from rl_trainer.workers.engine_worker import EngineWorker
    from rl_trainer.workers.reward_server import RewardServers

R = TypeVar("R")

_SYNC_ATTEMPTS = 4
"""Attempts per version, each without the replicas that died during the last."""


class WeightSync:
    """Weight sync from the actor to every replica; the controller sees only the report.

    A replica that dies is left out, and a version that its death called off is sent again to the others. One that
    joined serves its first request once it has taken part in a sync.

    Where it is offloaded, they have the memory of the GPU in turn: replicas and reward models from the end of a sync to
    `yield_memory`, the actor from there to the end of the next sync. So do `lent` replicas, in addition
    to those with their own GPUs, in the steps for which `lends` is set.

    `policy` is the name of the actor's, where there are several: agents generate on the servers of each.
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
        lent_transfer: WeightTransfer | None = None,
        is_offloaded: bool = False,
        policy: str = "",
    ) -> None:
        self._policy = policy
        self._actor, self.servers, self._agents, self._rewards = actor, servers, agents, rewards
        self._transfer = transfer
        self._is_offloaded = is_offloaded
        self._lent, self._lent_transfer = lent, lent_transfer
        self.lent_in_use: tuple[ServerAddress, ...] = ()
        """Addresses of the lent replicas, while they generate."""
        self.lends = False
        """Whether the next sync gives the actor's GPUs to the lent replicas."""
        self.in_use: dict[int, ServerAddress] = {}
        """Addresses by member of the replicas that the agents generate on."""

    def yield_memory(self) -> None:
        """Put servers to sleep and onload the actor, where they have memory in turn; does nothing otherwise."""
        if self._lent is not None and self.lent_in_use:
            self.lent_in_use = ()
            self._agents.use_servers([*self.in_use.values()], self._policy)  # what is in flight goes on there
            on_all(self._lent, RolloutWorker.sleep)
            self._actor.onload()
        if self._is_offloaded:
            on_all(self.servers, RolloutWorker.sleep)
            if self._rewards is not None:
                self._rewards.sleep()
            self._actor.onload()

    def sync(self, version: int) -> SyncReport:
        """Send and install `version`; returns when every replica serves it.

        Raises:
            Exception: what either side failed with, where nobody died; names both.
        """
        if self.lends:
            assert self._lent is not None, "it is set where there are some"
            return self._sync_and_yield(version, self._lent)
        if not self._is_offloaded:
            return self._sync(version)
        report = self._sync_and_yield(version, self.servers)
        if self._rewards is not None:
            self._agents.use_rewards(self._rewards.wake())
        return report

    def _sync_and_yield(self, version: int, replicas: ReplicaSet[RolloutWorker]) -> SyncReport:
        """Sync, in whose course the actor's memory becomes that of these replicas."""
        self._actor.offload_optimizer()  # before the replicas take the memory of their weights
        on_all(replicas, RolloutWorker.wake, ("weights",))
        report = self._sync(version)
        if replicas is self._lent:
            self._send_lent(version, replicas)
        self._actor.offload()
        on_all(replicas, RolloutWorker.wake, ("kv_cache",))
        return report

    def _send_lent(self, version: int, lent: ReplicaSet[RolloutWorker]) -> None:
        """Send the committed version to the lent replicas, by a session of their own, and have agents use them.

        A sender waits for every receiver of its session, and in most steps these take no weights.
        """
        assert self._lent_transfer is not None, "lent replicas have one"
        members = lent.wait()
        counts = {member: answer.count for member, answer in on_all(lent, RolloutWorker.declare_receivers).items()}
        sessions = self._lent_transfer.addresses(members)
        with ThreadPoolExecutor(1, thread_name_prefix="lent-weights") as thread:
            arguments = {member: (sessions[member], version) for member in members}
            updated = thread.submit(lent.call, RolloutWorker.update_weights, arguments)
            try:
                self._lent_transfer.send(version, counts)
            except Exception as error:
                _dismiss(self._lent_transfer, updated, error)
                raise
            _raise_first(updated.result())
        self.lent_in_use = tuple(on_all(lent, RolloutWorker.address).values())
        self._agents.use_servers([*self.in_use.values(), *self.lent_in_use], self._policy)

    def death(self) -> WorkerDiedError | None:
        """Error that ends generation: no replica is left; None while there is one."""
        if not self.in_use or set(self.in_use) & set(self.servers.members):
            return None
        return WorkerDiedError(f"no replica is left that has the weights; {' '.join(self.servers.take_news())}")

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
            asked = {member: (self._transfer.weights_for(member),) for member in self.servers.wait()}
            declared = self.servers.call(RolloutWorker.declare_receivers, asked)
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
            updated = threads.submit(self.servers.call, RolloutWorker.update_weights, update)
            while not sent.done():
                wait([sent], timeout=CHECK_S)
                if not sent.done() and set(members) - set(self.servers.members):
                    self._transfer.call_off()  # a replica that is gone never joins, and the others wait for the sender
            error = sent.exception()
            if error is not None:
                _dismiss(self._transfer, updated, error)
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
        """Set the replicas that agents generate on."""
        if members == [*self.in_use]:
            return
        unknown = dict.fromkeys([member for member in members if member not in self.in_use], ())
        known = self.in_use | self.servers.call(RolloutWorker.address, unknown)
        found = {member: known[member] for member in members}
        self.in_use = {member: each for member, each in found.items() if not isinstance(each, Exception)}
        self._agents.use_servers([*self.in_use.values()], self._policy)


def _dismiss(transfer: WeightTransfer, updated: Future[Any], error: BaseException) -> None:
    """Notify receivers that come for a failed sync, until all have answered; no-op if the sender is gone."""
    with suppress(WorkerDiedError):
        while not wait([updated], timeout=CHECK_S).done:
            transfer.dismiss(str(error) or repr(error))


def on_all(replicas: ReplicaSet[RolloutWorker], method: Callable[..., R], *arguments: Any) -> dict[int, R]:
    """Call a method of all replicas; raises the first error."""
    return _raise_first(replicas.call(method, dict.fromkeys(replicas.wait(), arguments)))


def _raise_first(answers: Mapping[int, R | Exception]) -> dict[int, R]:
    for answer in answers.values():
        if isinstance(answer, Exception):
            raise answer
    return {member: answer for member, answer in answers.items() if not isinstance(answer, Exception)}
