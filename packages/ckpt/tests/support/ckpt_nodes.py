"""Relays for tests of the pipe: one in this process, and one in a process of its own that may be killed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import torch

from rl_ckpt import connect
from rl_ckpt.errors import CkptError
from rl_ckpt.relay.pipe import Forwarding
from rl_ckpt.testing.ends import BUCKET_BYTES, TIMEOUT_S, ChildProcess, die_at_message, weights_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

    from torch import Tensor

    from rl_ckpt.types import SyncReport


class Relay:
    """One session sent on as another, whole tensors, by the pipe that `ShardedReceiver` uses for slices."""

    def __init__(
        self,
        upstream: str,
        downstream: str,
        *,
        timeout_s: float = 60.0,
        token: str | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        self.receiver = connect(upstream, role="receive", timeout_s=timeout_s, token=token)
        self.sender = connect(downstream, role="send", timeout_s=timeout_s, token=token, bucket_bytes=bucket_bytes)
        self.attest_with = self.receiver.attest_with

    @property
    def version(self):
        return self.receiver.version

    @property
    def state(self):
        return self.receiver.state

    async def prepare(self) -> None:
        await self.sender.prepare()
        await self.receiver.prepare()

    async def receive_into(
        self, targets: Mapping[str, Tensor], *, num_peers: int = 1, staged: bool = False
    ) -> SyncReport:
        """Receive one sync into tensors, and send it on to `num_peers` receivers; their report."""
        await self.prepare()
        unpacker = await self.receiver.begin(targets, staged=staged)
        forwarding = Forwarding(self.sender, unpacker, num_peers)
        try:
            await self.receiver.take(unpacker, strict=True, pipe=forwarding.pipe)
        except BaseException as error:
            await forwarding.call_off(f"its sender has not got the version itself: {error!r}")
            raise
        finally:
            forwarding.close()
        return await forwarding.commit()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.receiver.close()
        finally:
            await self.sender.close()


class RelayProcess(ChildProcess):
    """A process that receives one sync and sends it on. It says `open`, then the version that it served.

    Args:
        above: URL of the session to receive from.
        below: URL of the session to send to.
        die_at: A message of WIRE.md like `Bucket`, and a moment: it kills itself `before` or `after` sending the first.
        token: Of both sessions.
    """

    def __init__(
        self, above: str, below: str, *, die_at: tuple[str, str] | None = None, token: str | None = None
    ) -> None:
        super().__init__(_main, above, below, token, die_at)


def _main(pipe: Connection, above: str, below: str, token: str | None, die_at: tuple[str, str] | None) -> None:
    torch.set_num_threads(1)
    if die_at is not None:
        die_at_message(*die_at)
    try:
        asyncio.run(_relay(pipe, above, below, token))
    except CkptError as error:
        pipe.send(error)


async def _relay(pipe: Connection, above: str, below: str, token: str | None) -> None:
    targets = {name: torch.empty_like(tensor) for name, tensor in weights_of(0).items()}
    async with Relay(above, below, timeout_s=TIMEOUT_S, token=token, bucket_bytes=BUCKET_BYTES) as relay:
        await relay.prepare()
        pipe.send("open")
        report = await relay.receive_into(targets)
        pipe.send(report.version)
