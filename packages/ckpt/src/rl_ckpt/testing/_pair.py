"""What the conformance suites inside one process share: fresh sessions, and ends that are closed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from rl_ckpt import connect

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rl_ckpt.base import CheckpointEngine

T = TypeVar("T")


class Suite(ABC):
    """A suite whose ends all run in this process, on one event loop or in threads."""

    short_s = 1.0
    """Timeout of waits that the suite lets pass, seconds."""
    long_s = 120.0
    """Timeout of waits that must not pass, seconds."""
    token: str | None = None
    """Of the sessions, where the backend wants one."""

    @abstractmethod
    def new_address(self) -> str:
        """A URL that nobody else uses."""

    def run(self, work: Callable[[Pair], Awaitable[T]], **options: Any) -> T:
        """Run a coroutine function with a fresh address, and close every end that it opened."""

        async def main() -> T:
            async with AsyncExitStack() as stack:
                return await work(Pair(self.new_address(), self.long_s, self.token, options, stack))

        return asyncio.run(main())


class Pair:
    """Opens ends of one session, which are closed with the stack."""

    def __init__(
        self, address: str, timeout_s: float, token: str | None, options: dict[str, Any], stack: AsyncExitStack
    ) -> None:
        self.address = address
        self._token = token
        self._timeout_s = timeout_s
        self._options = options
        self._stack = stack

    async def send_end(self, *, timeout_s: float | None = None) -> CheckpointEngine:
        """The sender, prepared."""
        timeout_s = timeout_s or self._timeout_s
        engine = connect(self.address, role="send", timeout_s=timeout_s, token=self._token, **self._options)
        await self._stack.enter_async_context(engine)
        await engine.prepare()
        return engine

    async def receive_end(self, *, timeout_s: float | None = None, **options: Any) -> CheckpointEngine:
        """A receiver."""
        timeout_s = timeout_s or self._timeout_s
        engine = connect(self.address, role="receive", timeout_s=timeout_s, token=self._token, **options)
        return await self._stack.enter_async_context(engine)
