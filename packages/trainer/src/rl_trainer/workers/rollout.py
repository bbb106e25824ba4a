"""Rollout worker: supervises one replica of a rollout server."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import rl_rollout.registry
from rl_rollout.errors import ServerLostError
from rl_trainer.runtime.network import server_token
from rl_trainer.runtime.processes import DUMP_SIGNAL, DUMP_WAIT_S, describe, is_stopped
from rl_trainer.runtime.profiling import profile_process
from rl_trainer.workers.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_rollout.base import ReceiverSession
    from rl_rollout.types import Capabilities, ServerAddress, ServerConfig, TensorPart
    from rl_trainer.runtime.base import WorkerContext


_HEALTH_CHECK_S = 1.0

WeightShapes: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype (`bfloat16`) and shape of every tensor of the weights, by Hugging Face name."""


@dataclass(frozen=True, slots=True)
class Receivers:
    """Receivers of weights that a replica declares."""

    count: int
    layout: list[list[TensorPart]] | None
    """Slices that each receiver takes; None: one takes all, or they were not asked for."""
    host: str = ""


class RolloutWorker:
    """Supervisor of one rollout replica: starts its server, has it receive weights, ends it.

    With `task="score"` the server is that of a reward model, always a process of its own, which receives no weights.

    Where the server is a process of its own and ends, this worker ends at once too, so that its watchers notice.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        backend: str,
        config: ServerConfig,
        is_own_process: bool,
        timeout_s: float,
        heartbeat_s: float = 30.0,
        task: str = "generate",
        name: str = "the rollout server",
    ) -> None:
        make = rl_rollout.registry.launch_server if is_own_process else rl_rollout.registry.create_server
        self._name = name
        self._timeout_s, self._heartbeat_s = timeout_s, heartbeat_s
        self._loop = LoopThread("rollout")
        self._host = context.host
        config = replace(config, host=context.host, api_token=server_token())
        if config.parallel.num_ranks > 1 and context.devices:  # a colocated one's process sees only its own GPU
            variables = {"CUDA_VISIBLE_DEVICES": ",".join(context.devices), **config.options.get("env", {})}
            config = replace(config, options={**config.options, "env": variables})
        self._server = rl_rollout.registry.launch_scorer(config) if task == "score" else make(backend, config)
        self._address = self._loop.run(self._server.start(), timeout_s)
        self._receiver: ReceiverSession | None = None
        self._watch = self._loop.start(self._end_with_the_server()) if is_own_process else None

    async def _end_with_the_server(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_CHECK_S)
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._server.check_health()
            except (ServerLostError, TimeoutError) as error:
                reason = str(error) if isinstance(error, ServerLostError) else await self._end_hung_server()
                first, _, lines = reason.partition("\n")  # the reason comes last: the end of this output is shown
                print(f"{lines}\n{self._name} is gone: {first}", file=sys.stderr, flush=True)  # noqa: T201
                os._exit(1)

    async def _end_hung_server(self) -> str:
        """End a server that is stopped or stuck, with all that it started: it does not notice that this process ends.

        Returns:
            How it was found.
        """
        pid = self._address.pid
        reason = (
            f"{self._address.url} gave no sign of life for heartbeat_s={self._heartbeat_s:g} s; {describe(pid, None)}"
        )
        with suppress(ProcessLookupError):
            if not is_stopped(pid):
                os.kill(pid, DUMP_SIGNAL)  # it writes its stack, or ends here
                await asyncio.sleep(DUMP_WAIT_S)
            if (group := os.getpgid(pid)) != os.getpgid(0):
                os.killpg(group, signal.SIGKILL)
        if lines := getattr(self._server, "last_lines", ()):
            reason = "\n".join([f"{reason}; its last lines:", *lines])
        return reason

    def address(self) -> ServerAddress:
        """Address of the replica."""
        return self._address

    def capabilities(self) -> Capabilities:
        """Capabilities of the replica."""
        return self._server.capabilities

    def profile(self, tools: Sequence[str], stem: str) -> list[str]:
        """See `EngineRank.profile`; of a server in this process."""
        return profile_process(tools, stem)

    def declare_receivers(self, weights: WeightShapes | None = None) -> Receivers:
        """Weight receivers of the replica; raises `ServerLostError` if its server is gone.

        With `weights`, the tensors that updates will bring, also which slices each receiver takes of them.
        """
        self._loop.run(self._server.check_health(), self._timeout_s)
        layout = None
        if weights is not None:
            layout = self._loop.run(self._server.weight_layout(weights), self._timeout_s)
        return Receivers(self._server.capabilities.num_receivers, layout, self._host)

    def update_weights(self, address: str, version: int) -> int:
        """Install a version that is being sent from `address`."""
        if self._receiver is None or self._receiver.address != address:
            self._leave_session()
            self._receiver = rl_rollout.registry.create_receiver(address, timeout_s=self._timeout_s)
        self._loop.run(self._server.update_weights(self._receiver, version), self._timeout_s)
        return version

    def _leave_session(self) -> None:
        if self._receiver is not None:
            self._loop.run(self._receiver.close(), 30.0)

    def sleep(self, level: int = 2) -> None:
        """Give the memory of weights and cached keys back; after level 2 an update follows `wake`."""
        self._loop.run(self._server.sleep(level), self._timeout_s)

    def wake(self, tags: tuple[str, ...]) -> None:
        """Take the memory of `weights` or of the `kv_cache` again."""
        self._loop.run(self._server.wake(tags), self._timeout_s)

    def close(self) -> None:
        """End the server's process, and leave the session that its weights came by."""
        if self._watch is not None:
            self._watch.cancel()
        try:
            self._loop.run(self._server.stop(), 30.0)
            self._leave_session()
        finally:
            self._loop.close()
