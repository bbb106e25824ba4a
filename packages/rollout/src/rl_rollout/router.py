"""Many replicas behind the interface of one."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from rl_rollout.base import RolloutServer
from rl_rollout.errors import ConfigError, ServerLostError, WeightUpdateError
from rl_rollout.receiver import CkptReceiver
from rl_rollout.types import ServerAddress

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from rl_rollout.base import PauseMode, WeightReceiver
    from rl_rollout.types import GenerateRequest, TokenOutput

MAX_SESSIONS = 65_536
"""Conversations whose replica is remembered; the least recently used is forgotten first."""


class Router(RolloutServer):
    """Spreads requests over replicas: the least loaded one, or the one that holds the request's session.

    A replica whose connection is lost is left out from then on, and what it had not answered is sent to another.
    Everything else (pause, update_weights, ...) goes to all replicas at once.
    """

    def __init__(self, servers: Sequence[RolloutServer]) -> None:
        if not servers:
            raise ConfigError("a router needs at least one server")
        self._servers = list(servers)
        self._loads: dict[RolloutServer, int] = dict.fromkeys(self._servers, 0)
        self._sessions: OrderedDict[str, RolloutServer] = OrderedDict()
        self._lost: dict[RolloutServer, ServerLostError] = {}
        self._receivers: dict[tuple[int, str], CkptReceiver] = {}

    @property
    def servers(self) -> tuple[RolloutServer, ...]:
        """Replicas that are in use; those that were lost are left out."""
        return tuple(self._servers)

    @property
    def lost(self) -> tuple[ServerLostError, ...]:
        """Why replicas were left out, in the order in which they were lost."""
        return tuple(self._lost.values())

    async def start(self) -> ServerAddress:
        """Start every replica; if one fails, stop the others and raise its error."""
        try:
            addresses = await asyncio.gather(*(server.start() for server in self._servers))
        except BaseException:
            await self.stop()
            raise
        return ServerAddress(url="inproc:router", model=addresses[0].model, pid=os.getpid())

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """Generate on one replica, and on another if that one is lost.

        Raises:
            ServerLostError: every replica is gone; the last loss is chained.
        """
        while True:
            server = self._choose(request.session_id)
            self._loads[server] += 1
            try:
                return await server.generate(request)
            except ServerLostError as error:
                self._leave_out(server, error)
            finally:
                if server in self._loads:
                    self._loads[server] -= 1

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """On all replicas."""
        await self._on_all(lambda server: server.abort(request_ids))

    async def pause(self, mode: PauseMode) -> None:
        """On all replicas."""
        await self._on_all(lambda server: server.pause(mode))

    async def resume(self) -> None:
        """On all replicas."""
        await self._on_all(lambda server: server.resume())

    async def update_weights(self, receive: WeightReceiver, version: int) -> None:
        """On all replicas at the same time, as one sync of the session.

        Several replicas cannot read one receiver, so each opens its own by `receive.address`; one replica is given
        `receive` itself.

        Raises:
            WeightUpdateError: names how many replicas failed; the first failure is chained.
        """
        servers = self.servers
        receivers = [receive] if len(servers) == 1 else [self._receiver(server, receive) for server in servers]
        results = await asyncio.gather(
            *(server.update_weights(each, version) for server, each in zip(servers, receivers, strict=True)),
            return_exceptions=True,
        )
        failed = [result for result in results if isinstance(result, BaseException)]
        if len(servers) == 1 and failed:
            raise failed[0]
        if failed:
            raise WeightUpdateError(
                f"{len(failed)} of {len(servers)} replicas did not install version {version}: {failed[0]}"
            ) from failed[0]

    async def sleep(self, level: int = 1) -> None:
        """On all replicas."""
        await self._on_all(lambda server: server.sleep(level))

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """On all replicas."""
        await self._on_all(lambda server: server.wake(tags))

    async def stop(self) -> None:
        """Stop every replica, those that were lost included."""
        everyone = [*self._servers, *self._lost]
        closing = [receiver.close() for receiver in self._receivers.values()]
        results = await asyncio.gather(*(server.stop() for server in everyone), *closing, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _choose(self, session_id: str | None) -> RolloutServer:
        if not self._servers:
            last = next(reversed(self._lost.values()))
            raise ServerLostError(f"all {len(self._lost)} replicas are lost; the last one: {last}") from last
        server = self._sessions.get(session_id) if session_id is not None else None
        if server is None or server not in self._loads:
            server = min(self._servers, key=lambda each: self._loads[each])
        if session_id is not None:
            self._sessions[session_id] = server
            self._sessions.move_to_end(session_id)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return server

    def _leave_out(self, server: RolloutServer, error: ServerLostError) -> None:
        if server in self._loads:
            del self._loads[server]
            self._servers.remove(server)
            self._lost[server] = error

    def _receiver(self, server: RolloutServer, receive: WeightReceiver) -> WeightReceiver:
        """One session per replica and address, kept for later syncs."""
        key = (id(server), receive.address)
        if key not in self._receivers:
            self._receivers[key] = CkptReceiver(receive.address)
        return self._receivers[key]

    async def _on_all(self, call: Callable[[RolloutServer], Awaitable[Any]]) -> None:
        await asyncio.gather(*(call(server) for server in self._servers))
