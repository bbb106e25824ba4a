"""Weight receiver over rl-ckpt, whose session is opened when it is first needed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from collections.abc import Set as AbstractSet

    from torch import Tensor

    from rl_ckpt import ShardedReceiver
    from rl_ckpt.base import WeightReceiver

SLICES = "{"
"""Beginning of the JSON that `rl_ckpt.Addresses` writes, which no URL begins with."""


class CkptReceiver:
    """Weight receiver that is described by its address alone.

    Pass it to `update_weights` of any server: a server in this process opens the session through it; a client sends the
    address on, and the server's own process opens it. An object opens one session and uses it for every sync. For an
    address that is the JSON of `rl_ckpt.Addresses`, it opens one with every rank of the trainer.
    """

    def __init__(self, address: str, *, timeout_s: float = 60.0) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._engine: WeightReceiver | None = None
        self._shards: ShardedReceiver | None = None

    @property
    def version(self) -> int | None:
        """Weight version that landed last or is landing; None before any."""
        engine = self._engine or self._shards
        return None if engine is None else engine.version

    @property
    def takes_slices(self) -> bool:
        """Whether weights come as slices from several senders, by `receive_slices` instead of `receive_weights`."""
        return self.address.startswith(SLICES)

    @property
    def takes_differences(self) -> bool:
        """Whether slices may come as differences from the previous version, which must stay in its targets."""
        return self.takes_slices and "delta=1" in self.address

    async def receive_slices(self, targets: Mapping[str, Tensor], on_landed: Callable[[AbstractSet[str]], None]) -> int:
        """Receive one sync of slices; returns its weight version.

        Args:
            targets: Destination of each weight, by Hugging Face name. With the same mapping object as in the last call,
                differences may be sent.
            on_landed: Called in another thread with the names of the weights that are complete, before this receiver
                votes; if it raises, no receiver commits.

        Raises:
            rl_ckpt.CkptError: a session could not be opened, or the sync failed.
        """
        if self._shards is None:
            from rl_ckpt import Addresses, ShardedReceiver

            addresses = Addresses.from_json(self.address)
            self._shards = ShardedReceiver([] if addresses is None else addresses.of(0), timeout_s=self.timeout_s)
        return await self._shards.receive_into(targets, strict=False, on_landed=on_landed)

    async def receive_weights(self) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of one sync; a tensor is valid until the next one is asked for.

        Raises:
            rl_ckpt.CkptError: the session could not be opened, or the sync failed.
        """
        engine = await self._open()
        iterator = engine.receive_weights()
        try:
            async for item in iterator:
                yield item
        finally:
            # Closed at once, so that the sender learns of a consumer that stops early.
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
        shards, self._shards = self._shards, None
        for each in (engine, shards):
            if each is not None:
                await each.close()
