"""Weight receiver of rl-ckpt, opened when it is first needed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from torch import Tensor

    from rl_ckpt.base import WeightReceiver


class CkptReceiver:
    """A `WeightReceiver` that is known by its address alone.

    Give it to `update_weights` of any server: a server in this process opens the session through it, a client sends
    the address on and the server's own process opens it. One session per object, opened once, used for every sync.
    """

    def __init__(self, address: str, *, timeout_s: float = 60.0) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._engine: WeightReceiver | None = None

    @property
    def version(self) -> int | None:
        """Weight version that landed last or is landing; None before any."""
        return None if self._engine is None else self._engine.version

    async def receive_weights(self) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield names and tensors of one sync. A tensor is valid until the next one is asked for.

        Raises:
            rl_ckpt.CkptError: the session could not be opened, or the sync failed.
        """
        engine = await self._open()
        iterator = engine.receive_weights()
        try:
            async for item in iterator:
                yield item
        finally:
            # A consumer that stops early tells the sender so at once, instead of at the next garbage collection.
            if (aclose := getattr(iterator, "aclose", None)) is not None:
                await aclose()

    async def _open(self) -> WeightReceiver:
        if self._engine is None:
            from rl_ckpt import connect

            engine = connect(self.address, role="receive", timeout_s=self.timeout_s)
            try:
                await engine.prepare()
                await engine.connect()
            except BaseException:
                await asyncio.shield(engine.close())
                raise
            self._engine = engine
        return self._engine

    async def close(self) -> None:
        """Leave the session. The next `receive_weights` opens a new one."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()
