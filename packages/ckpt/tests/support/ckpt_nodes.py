"""Receivers that serve others, in processes of their own that may be killed: a relay, and a holder of a version."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

import torch

from rl_ckpt import connect
from rl_ckpt.errors import CkptError
from rl_ckpt.relay import Holder, Relay
from rl_ckpt.testing.ends import BUCKET_BYTES, TIMEOUT_S, ChildProcess, die_at_message, weights_of

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch import Tensor


class NodeProcess(ChildProcess):
    """A process that receives from one session and sends to another. It says `open`, then each version that it serves.

    Args:
        kind: A `Relay` passes one sync on while it lands. A `Holder` takes one, says so, and serves late receivers.
        above: URL of the session to receive from.
        below: URL of the session to send to.
        die_at: A message of WIRE.md like `Bucket`, and a moment: it kills itself `before` or `after` sending the first.
        token: Of both sessions.
    """

    def __init__(
        self,
        kind: Literal["relay", "holder"],
        above: str,
        below: str,
        *,
        die_at: tuple[str, str] | None = None,
        token: str | None = None,
    ) -> None:
        super().__init__(_main, kind, above, below, token, die_at)


def _main(
    pipe: Connection,
    kind: Literal["relay", "holder"],
    above: str,
    below: str,
    token: str | None,
    die_at: tuple[str, str] | None,
) -> None:
    torch.set_num_threads(1)
    if die_at is not None:
        die_at_message(*die_at)
    try:
        asyncio.run((_relay if kind == "relay" else _hold)(pipe, above, below, token))
    except CkptError as error:
        pipe.send(error)


def _targets() -> dict[str, Tensor]:
    return {name: torch.empty_like(tensor) for name, tensor in weights_of(0).items()}


async def _relay(pipe: Connection, above: str, below: str, token: str | None) -> None:
    async with Relay(above, below, timeout_s=TIMEOUT_S, token=token, bucket_bytes=BUCKET_BYTES) as relay:
        await relay.prepare()
        pipe.send("open")
        report = await relay.receive_into(_targets())
        pipe.send(report.version)


async def _hold(pipe: Connection, above: str, below: str, token: str | None) -> None:
    targets = _targets()
    async with connect(above, role="receive", timeout_s=TIMEOUT_S, token=token) as receiver:
        pipe.send("open")
        pipe.send(await receiver.receive_into(targets))
        node = Holder(receiver, below, lambda: targets, timeout_s=TIMEOUT_S, token=token, bucket_bytes=BUCKET_BYTES)
        async with node as holder:
            while True:  # it is to be killed
                report = await holder.resend_current()
                if report is None:
                    await asyncio.sleep(0.02)
                else:
                    pipe.send(report.version)
