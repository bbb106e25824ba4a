"""The rollout servers that an agent worker generates on."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import rl_rollout
from rl_rollout.errors import ServerLostError
from rl_trainer.secrets import server_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_agent.base import Generator
    from rl_rollout.base import RolloutServer
    from rl_rollout.types import GenerateRequest, ServerAddress, TokenOutput


class ExpertAsking:
    """Has a server tell the experts that every token was routed to, whatever loop asks."""

    def __init__(self, server: Generator) -> None:
        self._server = server

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """As the server's."""
        return await self._server.generate(replace(request, returns_routed_experts=True))


class Replicas:
    """Connections to replicas behind one router, by address: a port that is used again is another server's."""

    def __init__(self, addresses: Sequence[ServerAddress]) -> None:
        self._servers = {address: _connected(address) for address in addresses}
        self.router = rl_rollout.Router([*self._servers.values()])

    async def use(self, addresses: Sequence[ServerAddress]) -> None:
        """Generate on these, and on no others; what runs on one that is left out goes on elsewhere.

        One that is gone already is passed over: the next sync of weights finds it too, and names those that are left.
        Should all be gone, the last replica that was in use stays, and its loss is what the next request is told.
        """
        for address in addresses:
            if address not in self._servers:
                server = _connected(address)
                with suppress(ServerLostError):
                    await self.router.add(server)
                    self._servers[address] = server
        for address in [address for address in self._servers if address not in addresses]:
            server = self._servers[address]
            if self.router.servers == (server,):
                continue
            del self._servers[address]
            if server in self.router.servers:
                with suppress(ServerLostError):  # it is left out because it is lost
                    await self.router.remove(server)


def _connected(address: ServerAddress) -> RolloutServer:
    return rl_rollout.connect_server(address, api_token=server_token())
