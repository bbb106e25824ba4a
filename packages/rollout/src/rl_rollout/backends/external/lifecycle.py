"""`Lifecycle`: subprocess and HTTP endpoint of a third-party server, from start to stop."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from rl_rollout.errors import ServerLostError
from rl_rollout.process import STOP_TIMEOUT_S
from rl_rollout.types import ServerAddress

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rl_rollout.backends.external.upstream import Upstream
    from rl_rollout.http.endpoint import Endpoint

WORKERS_S = 0.5
"""Seconds between two looks whether the server's worker processes live."""
READY_S = 0.2
"""Seconds between two checks whether a starting server is ready."""


class Lifecycle:
    """Subprocess and HTTP endpoint of a server.

    Args:
        upstream: HTTP client of the subprocess.
        endpoint: Endpoint in front of it.
        model_name: Name of the model.
        watches_workers: Whether to end the server when one of its worker processes is gone.
        timeout_s: Deadline of the start, seconds.
    """

    def __init__(
        self, upstream: Upstream, endpoint: Endpoint, *, model_name: str, watches_workers: bool, timeout_s: float
    ) -> None:
        self._upstream, self._process, self._endpoint = upstream, upstream.process, endpoint
        self._model_name, self._watches_workers, self._timeout_s = model_name, watches_workers, timeout_s
        self._address: ServerAddress | None = None
        self._watch: asyncio.Task[None] | None = None
        self.is_stopped = False
        """Whether `stop` was called."""

    async def start(
        self, after_start: Callable[[], Awaitable[None]], stop: Callable[[], Awaitable[None]]
    ) -> ServerAddress:
        """Start the subprocess, wait until it answers, call `after_start`, and bind the endpoint. Idempotent.

        If that fails, `stop` is called.
        """
        if self._address is not None:
            return self._address
        if self.is_stopped:
            raise ServerLostError("this server was stopped; create another")
        await self._endpoint.check_port()
        self._process.start()
        try:
            await self._process.wait_until(self._upstream.is_ready, timeout_s=self._timeout_s, check_s=READY_S)
            await after_start()
            url = await self._endpoint.start()
        except BaseException:
            await stop()
            raise
        if self._watches_workers:
            self._watch = asyncio.create_task(self._end_without_workers())
        self._address = ServerAddress(url=url, model=self._model_name, pid=os.getpid())
        return self._address

    async def stop(self) -> None:
        """End the subprocess and close the endpoint. Idempotent."""
        if self.is_stopped:
            return
        self.is_stopped = True
        if self._watch is not None:
            self._watch.cancel()
        await self._endpoint.stop()
        await self._upstream.close()
        await self._process.end(grace_s=STOP_TIMEOUT_S)

    async def check_health(self) -> None:
        """Raise `ServerLostError` if the subprocess has ended, or has been stopped for 10 s."""
        if self._process.returncode is not None:
            raise ServerLostError(self._process.why_ended())
        if (reason := self._process.why_stopped()) is not None:
            raise ServerLostError(reason)

    def require_running(self) -> None:
        """Raise `ServerLostError` unless the server was started and not stopped."""
        if self._address is None or self.is_stopped:
            raise ServerLostError(
                f"the {self._upstream.name} server of {self._model_name!r} is not running; call start()"
            )

    async def _end_without_workers(self) -> None:
        """End the server, and with it every request in flight, once one of its worker processes is gone."""
        while not self._process.end_without_workers():  # noqa: ASYNC110  there is no event for the end of a grandchild
            await asyncio.sleep(WORKERS_S)
