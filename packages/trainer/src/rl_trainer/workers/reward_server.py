"""Reward servers: judges and classifiers that the run serves itself, by rl-rollout."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from rl_rollout.errors import RolloutError
from rl_rollout.types import ServerConfig
from rl_trainer.errors import RewardError
from rl_trainer.runtime.base import Dispatch, WorkerContext, register
from rl_trainer.workers.rollout import RolloutWorker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_rollout.types import ServerAddress
    from rl_trainer.config.schema import ServedModel


class RewardServers:
    """Servers of the reward models, whose replicas are spread over the ranks of a pool in turn.

    They keep their weights from one step to the next: `sleep` frees the GPU and leaves them in host memory. A server
    in a process of its own that ends takes this process along, as a rollout server does.

    Args:
        context: The rank that serves every `world_size`-th replica.
        models: By part of the reward: its task, `generate` or `score`, and its model.
        is_own_process: Whether servers are processes of their own.
        timeout_s: Deadline of start-up and of commands, seconds.
        heartbeat_s: Seconds without a sign of life after which a server counts as lost.

    Raises:
        RewardError: a model cannot be served, or was not ready in time; has the last lines of the server.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        models: Mapping[str, tuple[str, ServedModel]],
        is_own_process: bool,
        timeout_s: float,
        heartbeat_s: float,
    ) -> None:
        self._servers: list[tuple[str, RolloutWorker]] = []
        replicas = [name for name, (_, model) in models.items() for _ in range(model.num_replicas)]
        for name in replicas[context.rank :: context.world_size]:
            task, model = models[name]
            config = ServerConfig(
                model_path=model.path,
                max_model_len=model.max_model_len,
                kv_cache_bytes=model.kv_cache_bytes,
                options=model.options,
                timeout_s=timeout_s,
            )
            where = f"the server of reward.parts.{name} ({model.path})"
            try:
                server = RolloutWorker(
                    context,
                    backend=model.backend,
                    config=config,
                    is_own_process=is_own_process,
                    timeout_s=timeout_s,
                    heartbeat_s=heartbeat_s,
                    task=task,
                    name=where,
                )
            except RolloutError as error:
                self.close()
                raise RewardError(f"{where} did not start: {error}") from error
            self._servers.append((name, server))

    @register(Dispatch.GATHER)
    def wake(self) -> list[tuple[str, ServerAddress]]:
        """Have every server answer, from sleep or as it is; returns part of the reward and address of each."""
        for _, server in self._servers:
            server.wake(("weights", "kv_cache"))
        return [(name, server.address()) for name, server in self._servers]

    @register(Dispatch.GATHER)
    def sleep(self) -> list[None]:
        """Free the GPUs; requests wait until `wake`."""
        for _, server in self._servers:
            server.sleep(1)
        return []

    def close(self) -> None:
        """End the servers."""
        while self._servers:
            with suppress(RolloutError):
                self._servers.pop()[1].close()
