"""Weight receiver of rl-ckpt, opened when it is first needed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from collections.abc import Set as AbstractSet

    from torch import Tensor

    from rl_ckpt import ShardedReceiver
    from rl_ckpt.base import WeightReceiver


class CkptReceiver:
    """A `WeightReceiver` that is known by its address alone.

    Give it to `update_weights` of any server: a server in this process opens the session through it, a client sends
    the address on and the server's own process opens it. One session per object, opened once, used for every sync; of
    an address that `rl_ckpt.sharded.join_addresses` made, one with each rank of the trainer.
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
        """Whether weights come as slices from several senders: `receive_slices` then, and not `receive_weights`."""
        return self.address.startswith("shards:")

    @property
    def takes_differences(self) -> bool:
        """Whether slices may come as differences from the version before, which must stay where it landed."""
        return self.takes_slices and "delta=1" in self.address

    async def receive_slices(self, targets: Mapping[str, Tensor], on_landed: Callable[[AbstractSet[str]], None]) -> int:
        """Receive one sync into these tensors, by Hugging Face name, and return its version.

        Args:
            targets: Where weights land; a call with the same mapping can be sent differences.
            on_landed: Called before the vote, in another thread, with the names of those that came whole; if it raises,
                nothing is committed anywhere.

        Raises:
            rl_ckpt.CkptError: a session could not be opened, or the sync failed.
        """
        if self._shards is None:
            from rl_ckpt import ShardedReceiver, split_address

            self._shards = ShardedReceiver(split_address(self.address) or [], timeout_s=self.timeout_s)
        return await self._shards.receive_into(targets, strict=False, on_landed=on_landed)

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
        shards, self._shards = self._shards, None
        for each in (engine, shards):
            if each is not None:
                await each.close()
