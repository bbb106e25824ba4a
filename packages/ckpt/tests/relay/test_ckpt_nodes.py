"""Relays and holders in processes of their own: killed at every message, and serving when the trainer is gone."""

import asyncio
import itertools
from contextlib import AsyncExitStack

import pytest
from ckpt_nodes import NodeProcess

from rl_ckpt import CkptError, DigestError, ReceiverState, Role, SyncAbortedError, UsageError, connect
from rl_ckpt.relay import Holder, Relay
from rl_ckpt.testing import assert_same, failure, new_name, new_port, receive_all, until
from rl_ckpt.testing.ends import BUCKET_BYTES, TIMEOUT_S, EndProcess, weights_of

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

    def process(self, kind, **options):
        process = NodeProcess(kind, self.above, self.below, token=self.token, **options)
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
        killed = nodes.process("relay", die_at=tuple(moment))
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


@pytest.mark.process
@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_a_receiver_serves_a_late_comer_when_the_trainer_is_dead(scheme):
    """A plain one, in a process of its own; then a receiver that was served serves the next."""

    async def work(nodes):
        trainer = EndProcess(nodes.above, Role.SEND, version=5, token=nodes.token)
        nodes.stack.callback(trainer.close)
        holder = nodes.process("holder")
        assert [await trainer.says(), await trainer.says()] == ["open", 1]
        assert [await holder.says(), await holder.says()] == ["open", 5]
        await until(lambda: not trainer.is_alive())
        late = await nodes.end(nodes.below, Role.RECEIVE)
        mine = {name: tensor.clone() for name, tensor in weights_of(0).items()}
        assert await late.receive_into(mine) == 5
        assert await holder.says() == 5
        assert_same(mine, weights_of(5))
        holder.kill()
        async with Holder(late, f"shm://{new_name()}", lambda: mine, timeout_s=TIMEOUT_S) as next_holder:
            assert await next_holder.resend_current() is None
            later = await nodes.stack.enter_async_context(
                connect(next_holder.address, role="receive", timeout_s=TIMEOUT_S)
            )
            receiving = asyncio.ensure_future(receive_all(later))
            report = await served(next_holder)
            assert_same(await receiving, mine)
            assert (report.version, later.digest) == (5, late.digest)
            waiting = asyncio.ensure_future(receive_all(later))
            await asyncio.sleep(0.05)
            assert await next_holder.resend_current() is None  # it has it
            waiting.cancel()
            await asyncio.wait([waiting])

    run(work, scheme)


async def served(node):
    """Serve until somebody was."""
    async with asyncio.timeout(TIMEOUT_S):
        while (report := await node.resend_current()) is None:  # noqa: ASYNC110  # it is the poll that is tested
            await asyncio.sleep(0.02)
    return report


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    list(itertools.product(("Session", "Begin", "Manifest", "Buckets", "Seal", "Commit"), MOMENTS)),
    ids="-".join,
)
def test_a_holder_is_killed_at_every_message_and_another_takes_over(moment):
    """The late comer has nothing, or refuses, and gets the version from the next holder of that name."""

    async def work(nodes):
        sender = await nodes.end(nodes.above, Role.SEND)
        holder = nodes.process("holder", die_at=moment)
        other = await nodes.end(nodes.above, Role.RECEIVE)
        mine = {name: tensor.clone() for name, tensor in weights_of(0).items()}
        taking = asyncio.ensure_future(other.receive_into(mine))
        sending = asyncio.ensure_future(sender.send_weights(weights_of(1).items(), version=1, num_peers=2))
        assert (await sending).version == await taking == 1
        late = await nodes.end(nodes.below, Role.RECEIVE)
        receiving = asyncio.ensure_future(receive_all(late))
        await holder.dies()
        async with Holder(other, nodes.below, lambda: mine, timeout_s=TIMEOUT_S) as successor:
            serving = asyncio.ensure_future(served(successor))
            await asyncio.wait([receiving])
            if late.version is None:
                assert isinstance(receiving.exception(), CkptError)
                assert late.state in {ReceiverState.IDLE, ReceiverState.POISONED}
                receiving = asyncio.ensure_future(receive_all(late))
            elif not serving.done() and moment == ("Commit", "after"):  # it has it from the one that died
                serving.cancel()
            assert_same(await receiving, mine)
            assert (late.version, late.digest, late.state) == (1, other.digest, ReceiverState.COMMITTED)
            await asyncio.wait([serving])

    run(work, "shm")


def test_a_holder_gives_nothing_that_its_receiver_was_not_given(tmp_path):
    """Neither before a version is in force, nor what has changed since; and it needs a transaction."""

    async def work(nodes):
        sender, receiver = await nodes.end(nodes.above, Role.SEND), await nodes.end(nodes.above, Role.RECEIVE)
        mine = {name: tensor.clone() for name, tensor in weights_of(0).items()}
        async with Holder(receiver, nodes.below, lambda: mine, timeout_s=TIMEOUT_S) as holder:
            assert "no version to give" in str(await failure(UsageError, holder.resend_current()))
            await asyncio.gather(sender.send_weights(weights_of(1).items(), version=1), receiver.receive_into(mine))
            mine["t3"][7] ^= 1
            late = await nodes.end(nodes.below, Role.RECEIVE)
            receiving = asyncio.ensure_future(receive_all(late))
            error = await failure(SyncAbortedError, served(holder))
            assert isinstance(error.__cause__, DigestError)
            await failure(SyncAbortedError, receiving)
            assert (late.version, late.state) == (None, ReceiverState.POISONED)
        async with Holder(receiver, f"file://{tmp_path}", lambda: mine) as folder:
            assert "file:// has none" in str(await failure(UsageError, folder.prepare()))

    run(work, "inproc")
