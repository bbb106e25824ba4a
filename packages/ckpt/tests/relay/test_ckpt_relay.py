"""Chains and trees of receivers: one transaction over all levels."""

import asyncio
import importlib.util
import os
import subprocess
import sys
import textwrap
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import ckpt_nodes
import pytest
import torch
from ckpt_nodes import Relay

import rl_ckpt
from rl_bench.waiting import until
from rl_ckpt import ReceiverState, SyncAbortedError
from rl_ckpt.relay.pipe import Forwarding
from rl_ckpt.tensors.spec import spec_of
from rl_ckpt.testing import assert_same, failure, new_name, new_port, receive_all
from rl_csrc.ipc import Waker

TOKEN = "known to all"
needs_nixl = pytest.mark.skipif(not importlib.util.find_spec("nixl"), reason="nixl is not installed: it is for Linux")


def address(scheme):
    if scheme in {"tcp", "nixl", "gloo"}:
        return f"{scheme}://127.0.0.1:{new_port()}"
    return f"{scheme}://{new_name()}"


def weights_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return {f"t{i}": torch.randn(300, 40 + i, generator=generator) for i in range(5)}


def blank():
    return {name: torch.zeros_like(tensor) for name, tensor in weights_of(0).items()}


class Tree:
    """A sender, a relay and a receiver below it, another relay below the first, a receiver below each of the two."""

    def __init__(self, stack, schemes):
        self.stack = stack
        self.urls = [address(scheme) for scheme in schemes]
        self.mine = [blank() for _ in range(5)]

    def token(self, url):
        return TOKEN if "127.0.0.1" in url else None

    async def open(self, **sending):
        top, middle, bottom = self.urls
        enter = self.stack.enter_async_context
        options = {"timeout_s": 60, "token": self.token(top)}
        self.sender = await enter(rl_ckpt.connect(top, role="send", bucket_bytes=16 << 10, **options, **sending))
        await self.sender.prepare()
        cuts = ((top, middle, 20 << 10), (middle, bottom, 8 << 20))  # of tensors of about 50 kB
        self.relays = [await enter(Relay(one, two, bucket_bytes=cut, **options)) for one, two, cut in cuts]
        for relay in self.relays:
            await relay.prepare()
        self.leaves = [await enter(rl_ckpt.connect(url, role="receive", **options)) for url in self.urls]
        return self

    async def sync(self, weights, version, *, staged=False):
        """The outcome of every node: sender, relays, leaves; errors as values."""
        one, two, *others = self.mine
        return await asyncio.gather(
            self.sender.send_weights(weights.items(), version=version, num_peers=2),
            self.relays[0].receive_into(one, num_peers=2, staged=staged),
            self.relays[1].receive_into(two, num_peers=1, staged=staged),
            *(leaf.receive_into(into, staged=staged) for leaf, into in zip(self.leaves, others, strict=True)),
            return_exceptions=True,
        )

    @property
    def nodes(self):
        return [*self.relays, *self.leaves]


def run(work, schemes=("shm", "uds", "inproc"), **sending):
    async def main():
        async with AsyncExitStack() as stack:
            return await work(await Tree(stack, schemes).open(**sending))

    return asyncio.run(main())


@pytest.mark.process
@pytest.mark.parametrize(
    "schemes", [("shm", "uds", "inproc"), ("tcp",) * 3, pytest.param(("nixl",) * 3, marks=needs_nixl)], ids=str
)
def test_a_version_reaches_all_levels(schemes):
    """The sender sends it once; every node has the bits, the version, and says which digest it holds."""

    async def work(tree):
        for version in (1, 2):
            weights = weights_of(version)
            report, first, second, *versions = await tree.sync(weights, version)
            assert versions == [version] * 3, (report, first, second, versions)
            assert [len(each.receipts) for each in (report, first, second)] == [2, 2, 1]
            assert {each.digest for each in (report, first, second)} == {rl_ckpt.tree_digest(weights)}
            for mine in tree.mine:
                assert_same(mine, weights)
            assert {(node.version, node.state) for node in tree.nodes} == {(version, ReceiverState.COMMITTED)}

    run(work, schemes)


@pytest.mark.process
@pytest.mark.parametrize("schemes", [("shm", "uds", "inproc"), ("tcp",) * 3], ids=str)
def test_what_has_landed_is_passed_on_at_once(schemes):
    """The last level has a tensor before the source yields the next one."""

    async def work(tree):
        weights = weights_of(1)
        arrived = asyncio.Semaphore(0)

        async def source():
            for i, item in enumerate(weights.items()):
                yield item
                yield f"filling{i}", torch.full((6 << 20,), i, dtype=torch.uint8)  # so that no bucket waits to be full
                async with asyncio.timeout(60):
                    await arrived.acquire()

        async def take():
            got = {}
            async for name, tensor in tree.leaves[2].receive_weights():
                got[name] = tensor.clone()
                if name in weights:
                    arrived.release()
            return got

        for mine in tree.mine[:2]:
            mine.update({f"filling{i}": torch.zeros(6 << 20, dtype=torch.uint8) for i in range(5)})
        report, _, _, got, *rest = await asyncio.gather(
            tree.sender.send_weights(source(), version=1, num_peers=2),
            tree.relays[0].receive_into(tree.mine[0], num_peers=2),
            tree.relays[1].receive_into(tree.mine[1]),
            take(),
            *map(receive_all, tree.leaves[:2]),
        )
        for each in (got, *rest, *tree.mine[:2]):
            assert rl_ckpt.tree_digest(each) == report.digest

    run(work, schemes)


class HalfLanded:
    """What has landed at a relay: a whole tensor, and half of the next one until it is told otherwise."""

    def __init__(self, tensors):
        self.news = Waker()
        self.is_whole = False
        self._tensors = tensors
        self._left = [spec_of(name, tensor) for name, tensor in tensors.items()]

    def has_next(self):
        return True

    def take(self):
        if not self._left:
            return None
        spec = self._left.pop(0)
        return spec, self._tensors[spec.name]

    def alias_of(self, name):
        return ()

    def num_landed(self, spec):
        return spec.num_bytes if spec.name == "whole" or self.is_whole else spec.num_bytes // 2


def test_a_whole_tensor_does_not_wait_for_the_next_one():
    weights = {"whole": torch.arange(100), "half": torch.arange(1000)}  # one bucket could hold both
    pipe, url, got = HalfLanded(weights), address("inproc"), {}

    async def main():
        async with (
            rl_ckpt.connect(url, role="send", timeout_s=20) as sender,
            rl_ckpt.connect(url, role="receive", timeout_s=20) as leaf,
        ):

            async def take():
                async for name, tensor in leaf.receive_weights():
                    got[name] = tensor.clone()
                    pipe.is_whole = True
                    pipe.news.wake()

            async def serve():
                prepared = await sender.prepare_version(1, num_peers=1, pipe=pipe)
                await asyncio.to_thread(prepared.commit)

            await asyncio.gather(serve(), take())

    try:
        asyncio.run(main())
    finally:
        pipe.news.close()
    assert_same(got, weights)


@pytest.mark.process
def test_non_plain_memory_is_passed_on_once_it_is_whole():
    async def work(tree):
        tree.mine[0] |= {"t1": torch.zeros(41, 300).t(), "t3": torch.zeros(300, 86)[:, ::2]}
        weights = weights_of(1)
        outcomes = await tree.sync(weights, 1)
        assert not any(isinstance(outcome, Exception) for outcome in outcomes), outcomes
        for mine in tree.mine:
            assert rl_ckpt.tree_digest(mine) == rl_ckpt.tree_digest(weights)

    run(work)


@pytest.mark.process
def test_differences_become_whole_tensors_below_a_relay():
    async def work(tree):
        weights = weights_of(1)
        for version in (1, 2, 3):
            report, *others = await tree.sync(weights, version)
            assert not any(isinstance(outcome, Exception) for outcome in (report, *others)), (report, others)
            assert report.num_deltas == (5 if version > 1 else 0)
            for mine in tree.mine:
                assert_same(mine, weights)
            for tensor in weights.values():
                tensor.view(-1)[version::100] *= -1

    run(work, delta=True)


@pytest.mark.process
@pytest.mark.parametrize("is_cancelled", [False, True], ids=["the source raises", "a relay is cancelled"])
def test_a_sync_that_ends_on_its_way_ends_on_all_levels(is_cancelled):
    """Each hears why; who had staged it is as before; the next sync works."""

    async def work(tree):
        old, new = weights_of(1), weights_of(2)
        await tree.sync(old, 1, staged=True)
        one, two, *others = tree.mine
        relaying = asyncio.ensure_future(tree.relays[0].receive_into(one, num_peers=2, staged=True))

        async def source():
            for item in list(new.items())[:3]:
                yield item
            if not is_cancelled:
                raise RuntimeError("the export fails")
            relaying.cancel()
            yield "t3", new["t3"]

        outcomes = await asyncio.gather(
            tree.sender.send_weights(source(), version=2, num_peers=2),
            relaying,
            tree.relays[1].receive_into(two, num_peers=1, staged=True),
            *(leaf.receive_into(into, staged=True) for leaf, into in zip(tree.leaves, others, strict=True)),
            return_exceptions=True,
        )
        assert all(isinstance(outcome, BaseException) for outcome in outcomes), outcomes
        last = outcomes[-1]
        assert isinstance(last, SyncAbortedError)
        assert "its sender has not got the version itself" in str(last)
        assert ("the export fails" in str(last)) is not is_cancelled
        for node, mine in zip(tree.nodes, tree.mine, strict=True):
            assert (node.version, node.state) == (1, ReceiverState.COMMITTED)
            assert_same(mine, old)
        outcomes = await tree.sync(new, 2, staged=True)
        assert not any(isinstance(outcome, Exception) for outcome in outcomes), outcomes
        for mine in tree.mine:
            assert_same(mine, new)

    run(work)


def test_votes_during_a_relay_s_cancel_get_their_verdict(monkeypatch):
    """The receiver below has voted, and the relay hears of it only after it has begun to call the sync off."""
    has_landed, is_calling_off = threading.Event(), threading.Event()
    call_off, relays = Forwarding.call_off, []

    def stand_still_until_the_vote(relay):  # the event loop, which would hear of it
        is_calling_off.set()
        until(lambda: not relay.sender._worker._lock.locked())

    async def call_off_late(forwarding, text):
        stand_still_until_the_vote(relays[0])
        await call_off(forwarding, text)

    def veto():
        assert has_landed.wait(60)
        raise RuntimeError("no")

    def vote_late():
        has_landed.set()
        assert is_calling_off.wait(60)

    monkeypatch.setattr(Forwarding, "call_off", call_off_late)
    weights, mine = weights_of(2), [blank() for _ in range(3)]

    async def main():
        top, bottom = address("shm"), address("uds")
        async with (
            rl_ckpt.connect(top, role="send", timeout_s=60) as sender,
            Relay(top, bottom, timeout_s=60) as relay,
            rl_ckpt.connect(top, role="receive", timeout_s=60) as beside,
            rl_ckpt.connect(bottom, role="receive", timeout_s=60) as below,
        ):
            relays.append(relay)
            beside.attest_with(veto)
            below.attest_with(vote_late)
            outcomes = await asyncio.gather(
                sender.send_weights(weights.items(), version=2, num_peers=2),
                relay.receive_into(mine[0], staged=True),
                beside.receive_into(mine[1], staged=True),
                below.receive_into(mine[2], staged=True),
                return_exceptions=True,
            )
            assert [type(outcome) for outcome in outcomes].count(RuntimeError) == 1, outcomes
            assert isinstance(outcomes[3], SyncAbortedError), outcomes
            assert {node.state for node in (relay, beside, below)} == {ReceiverState.IDLE}

    asyncio.run(main())
    for each in mine:
        assert_same(each, blank())


@pytest.mark.process
@pytest.mark.parametrize("who", ["leaf", "relay", "beside"])
def test_whoever_says_no_says_it_for_the_whole_tree(who):
    """Nothing is committed on any level; who staged it is as before; and the next sync works."""

    async def work(tree):
        old, new = weights_of(1), weights_of(2)
        await tree.sync(old, 1, staged=True)
        voter = {"leaf": tree.leaves[2], "relay": tree.relays[0], "beside": tree.leaves[0]}[who]

        def veto():
            raise RuntimeError("no")

        voter.attest_with(veto)
        outcomes = await tree.sync(new, 2, staged=True)
        assert all(isinstance(outcome, Exception) for outcome in outcomes), outcomes
        assert isinstance(outcomes[0], SyncAbortedError)
        for node, mine in zip(tree.nodes, tree.mine, strict=True):
            assert (node.version, node.state) == (1, ReceiverState.COMMITTED)
            assert_same(mine, old)
        voter.attest_with(None)
        outcomes = await tree.sync(new, 2, staged=True)
        assert not any(isinstance(outcome, Exception) for outcome in outcomes), outcomes
        for mine in tree.mine:
            assert_same(mine, new)

    run(work)


RELAY = """
    import asyncio, sys, torch
    from ckpt_nodes import Relay

    async def main():
        targets = {f"t{i}": torch.zeros(300, 40 + i) for i in range(5)}
        async with Relay(sys.argv[1], sys.argv[2], timeout_s=60) as relay:
            await relay.prepare()
            print("open", flush=True)
            await relay.receive_into(targets)

    asyncio.run(main())
"""


@pytest.mark.process
def test_a_relay_that_is_killed_takes_nobody_with_it():
    """Above it the sync is called off, below it the receiver refuses; its successor serves both."""

    top, below = address("shm"), address("shm")
    relay = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RELAY), top, below],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(ckpt_nodes.__file__).parent)},
    )

    async def main():
        async with AsyncExitStack() as stack:
            sender = await stack.enter_async_context(rl_ckpt.connect(top, role="send", timeout_s=60))
            await sender.prepare()
            leaf = await stack.enter_async_context(rl_ckpt.connect(below, role="receive", timeout_s=60))
            assert await asyncio.to_thread(relay.stdout.readline) == "open\n"
            sending = asyncio.ensure_future(sender.send_weights(weights_of(1).items(), version=1))
            waiting = leaf.receive_weights()
            await anext(waiting)
            relay.kill()
            assert f"pid {relay.pid}" in str(await failure(SyncAbortedError, sending))
            with pytest.raises(rl_ckpt.PeerLostError):
                async for _ in waiting:
                    pass
            assert leaf.state is ReceiverState.POISONED
            await asyncio.to_thread(relay.wait)  # until then the kernel may not have given its address back
            successor = await stack.enter_async_context(Relay(top, below, timeout_s=60))
            await successor.prepare()
            mine = blank()
            _, report, got = await asyncio.gather(
                sender.send_weights(weights_of(1).items(), version=1), successor.receive_into(mine), receive_all(leaf)
            )
            assert_same(mine, weights_of(1))
            assert_same(got, weights_of(1))
            assert len(report.receipts) == 1

    try:
        asyncio.run(main())
    finally:
        relay.kill()
        relay.communicate()
