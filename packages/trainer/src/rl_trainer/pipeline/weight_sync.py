"""Weight sync: sends every version to all replicas, and goes on without a replica that dies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar

from rl_rollout.errors import ServerLostError
from rl_trainer.errors import StaleWeightsError, WorkerDiedError
from rl_trainer.workers.rollout import RolloutWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


class WeightSync:
    """Weight sync from the actor to every replica; the controller sees only the report.

    A replica that dies is left out, and a version that its death called off is sent again to the others. One that
    joined serves its first request once it has taken part in a sync.

    Colocated with the actor, they have the GPU in turn: replicas and reward models from the end of a sync to
    `yield_memory`, the actor from there to the end of the next sync.
    """

    def __init__(
        self,
        actor: EngineWorker,
        servers: ReplicaSet[RolloutWorker],
        agents: AgentReplicas,
        transfer: WeightTransfer,
        *,
        rewards: RewardServers | None = None,
        is_colocated: bool = False,
    ) -> None:
        self._actor, self.servers, self._agents, self._rewards = actor, servers, agents, rewards
        self._transfer = transfer
        self._is_colocated = is_colocated
        self.in_use: dict[int, ServerAddress] = {}
        """Addresses by member of the replicas that the agents generate on."""

    def yield_memory(self) -> None:
        """Put servers to sleep and onload the actor, where they share GPUs; does nothing otherwise."""
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
        self._actor.offload_optimizer()  # before the replicas take the memory of their weights
        self._on_all(RolloutWorker.wake, ("weights",))
        report = self._sync(version)
        self._actor.offload()
        self._on_all(RolloutWorker.wake, ("kv_cache",))
        if self._rewards is not None:
            self._agents.use_rewards(self._rewards.wake())
        return report

    def death(self) -> WorkerDiedError | None:
        """Error that ends generation: no replica is left; None while there is one."""
        if not self.in_use or set(self.in_use) & set(self.servers.members):
            return None
        return WorkerDiedError(f"no replica is left that has the weights; {' '.join(self.servers.take_news())}")

    def _on_all(self, method: Callable[..., None], *arguments: Any) -> None:
        for answer in self.servers.call(method, dict.fromkeys(self.servers.wait(), arguments)).values():
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
        update = dict.fromkeys(members, (self._transfer.address(), version))
        with ThreadPoolExecutor(2, thread_name_prefix="weight-sync") as threads:
            sent = threads.submit(self._transfer.send, version, members)
            updated = threads.submit(self.servers.call, RolloutWorker.update_weights, update)
            while not sent.done():
                wait([sent], timeout=_GONE_CHECK_S)
                if not sent.done() and set(members) - set(self.servers.members):
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
        self._agents.use_servers([*self.in_use.values()])
