"""Relays in processes of their own, killed at every message."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from ckpt_nodes import Relay, RelayProcess

from rl_ckpt import CkptError, ReceiverState, Role, SyncAbortedError, connect
from rl_ckpt.testing import assert_same, new_name, new_port, receive_all
from rl_ckpt.testing.ends import BUCKET_BYTES, TIMEOUT_S, weights_of

pytestmark = pytest.mark.process

TOKEN = "known to all"
MOMENTS = ("before", "after")
MESSAGES = {
    "shm": (
        "Hello",
        "Ready",
        "Session",
        "Begin",
        "Manifest",
        "Buckets",
        "Free",
        "Seal",
        "Staged",
        "Committed",
        "Commit",
    ),
    "tcp": ("Proof", "Buckets", "Staged", "Commit"),
}
KILLS = [(scheme, kind, moment) for scheme in MESSAGES for kind in MESSAGES[scheme] for moment in MOMENTS]


class Nodes:
    """Two sessions, one above and one below a node, and what is opened of them."""

    def __init__(self, stack, scheme):
        self.stack = stack
        self.token = TOKEN if scheme == "tcp" else None
        self.above, self.below = (
            f"tcp://127.0.0.1:{new_port()}" if scheme == "tcp" else f"{scheme}://{new_name()}" for _ in range(2)
        )

    async def end(self, url, role):
        end = connect(url, role=role, timeout_s=TIMEOUT_S, token=self.token, bucket_bytes=BUCKET_BYTES)
        await self.stack.enter_async_context(end)
        await end.prepare()
        return end

    def process(self, **options):
        process = RelayProcess(self.above, self.below, token=self.token, **options)
        self.stack.callback(process.close)
        return process


def run(work, scheme):
    async def main():
        async with AsyncExitStack() as stack:
            await work(Nodes(stack, scheme))

    asyncio.run(main())


def is_mixed(receiver):
    """Whether it would serve something that it was never given whole."""
    return receiver.version is None and receiver.state not in {ReceiverState.IDLE, ReceiverState.POISONED}


@pytest.mark.slow
@pytest.mark.parametrize("at", KILLS, ids="-".join)
def test_a_relay_is_killed_at_every_message(at):
    """Nobody below has a version that is not in force above; nobody is mixed; the next sync goes by its successor."""
    scheme, *moment = at

    async def work(nodes):
        sender, beside = await nodes.end(nodes.above, Role.SEND), await nodes.end(nodes.above, Role.RECEIVE)
        leaf = await nodes.end(nodes.below, Role.RECEIVE)
        killed = nodes.process(die_at=tuple(moment))
        assert await killed.says() == "open"
        takes_part = moment[0] not in {"Hello", "Proof", "Ready"}  # or it may be gone before
        taking = [asyncio.ensure_future(receive_all(end)) for end in (beside, leaf)]
        sending = asyncio.ensure_future(
            sender.send_weights(weights_of(1).items(), version=1, num_peers=2 if takes_part else 1)
        )
        await asyncio.wait([sending, taking[0]])
        assert beside.version == sender.version == (None if sending.exception() else 1), (at, sending)
        assert isinstance(sending.exception(), SyncAbortedError | None), at
        version = 1
        while not takes_part and killed.is_alive():  # a sender answers greetings during syncs, and these are short
            version += 1
            sending = sender.send_weights(weights_of(version).items(), version=version)
            await asyncio.gather(sending, receive_all(beside), return_exceptions=True)  # it may die in this one
        await killed.dies()
        successor = Relay(nodes.above, nodes.below, timeout_s=TIMEOUT_S, token=nodes.token, bucket_bytes=BUCKET_BYTES)
        await nodes.stack.enter_async_context(successor)
        await successor.prepare()
        weights = weights_of(version + 1)
        mine = {name: tensor.clone() for name, tensor in weights_of(0).items()}
        report, _, theirs, below = await asyncio.gather(
            sender.send_weights(weights.items(), version=version + 1, num_peers=2),
            successor.receive_into(mine),
            receive_all(beside),
            _take_from_successor(leaf, taking[1], sender, version + 1),
        )
        assert len(report.receipts) == 2
        for got in (mine, theirs, below):
            assert_same(got, weights)

    run(work, scheme)


async def _take_from_successor(leaf, first, sender, version):
    """What a receiver below gets next, after what it has heard of the sync in which its relay died."""
    await asyncio.wait([first])
    if leaf.version == version:  # it was not in that sync, and has waited on
        return first.result()
    assert not is_mixed(leaf)
    if first.exception() is None:
        assert (leaf.version, leaf.state) == (1, ReceiverState.COMMITTED)
        assert sender.version is not None
        assert_same(first.result(), weights_of(1))
    else:
        assert isinstance(first.exception(), CkptError)
        assert leaf.version is None
    return await receive_all(leaf)
