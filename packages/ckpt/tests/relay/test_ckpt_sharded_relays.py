"""Slices that receivers send on: one copy to a node, one transaction over all receivers of all nodes."""

import asyncio
import math
from contextlib import AsyncExitStack
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from ckpt_ranks import decide

import rl_ckpt
from rl_ckpt import Address, Addresses, ShardSpec
from rl_ckpt.errors import AddressError, SyncAbortedError, UsageError
from rl_ckpt.relay.pipe import RelayPipe
from rl_ckpt.sharded import ShardedReceiver, ShardedSender, ShardPlan
from rl_ckpt.testing import new_name
from rl_ckpt.types import join_addresses, relay_address

SHAPES = {"up": (700, 300), "down": (300, 700), "norm": (300,), "embed": (2048, 1030)}
TIMEOUT_S = 20.0
BUCKET = "bucket_bytes=65536"


def model(version):
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def rows(rank):
    return [ShardSpec.on_mesh(n, s, mesh=(2,), placements=(0,), coordinate=(rank,)) for n, s in SHAPES.items()]


def part(tensor, spec):
    return tensor[tuple(slice(a, a + n) for a, n in zip(spec.offsets, spec.sizes, strict=True))].contiguous()


class Nodes:
    """Two ranks of a trainer; receivers 0 to 2 of one node, where each session has another one as its relay."""

    def __init__(self, option=""):
        self.plan, self.name, self.option = ShardPlan([rows(0), rows(1)]), new_name(), option
        self.stack = AsyncExitStack()

    async def __aenter__(self):
        self.senders = [
            ShardedSender(self.plan, rank, lambda _, rank=rank: f"shm://{self.name}-{rank}?{BUCKET}{self.option}")
            for rank in (0, 1)
        ]
        for sender in self.senders:
            self.stack.push_async_callback(sender.close)
        above = [(await sender.prepare())[0] for sender in self.senders]
        self.receivers = []
        for number in range(3):
            addresses = []
            for rank, address in enumerate(above):
                below = f"shm://{self.name}-below-{rank}"
                addresses.append(relay_address(address, below, 2) if number == rank else below)
            self.receivers.append(ShardedReceiver(addresses, timeout_s=TIMEOUT_S))
            self.stack.push_async_callback(self.receivers[-1].close)
        self.held = [{name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in self.receivers]
        return self

    async def __aexit__(self, *details):
        await self.stack.aclose()

    async def sync(self, weights, version, **options):
        """Reports or errors of the ranks, and what each receiver answered."""
        receiving = [
            asyncio.ensure_future(receiver.receive_into(held, **options.get(str(number), {})))
            for number, (receiver, held) in enumerate(zip(self.receivers, self.held, strict=True))
        ]
        staged = await asyncio.gather(
            *(
                sender.stage(lambda r=rank: [(s, part(weights[s.name], s)) for s in rows(r)], version=version)
                for rank, sender in enumerate(self.senders)
            ),
            return_exceptions=True,
        )
        reports = await decide(self.senders, staged, version)
        return reports, await asyncio.gather(*receiving, return_exceptions=True)


@pytest.mark.promise(
    "Receivers of slices that send them on are one transaction with those behind them, and the trainer sends once "
    "to a node"
)
@pytest.mark.process
@pytest.mark.parametrize("option", ["", "&delta=1"], ids=["whole", "differences"])
def test_a_node_s_receivers_share_one_copy_from_the_trainer(option):
    async def main():
        async with Nodes(option) as nodes:
            for version in (1, 2, 3):
                weights = model(1)
                weights["embed"][version, :40] += version
                reports, versions = await nodes.sync(weights, version)
                assert versions == [version] * 3
                for held in nodes.held:
                    assert all(torch.equal(held[name], weights[name]) for name in weights)
                assert {report.digest for report in reports} == {rl_ckpt.tree_digest(weights)}
                assert [len(report.receipts) for report in reports] == [1, 1]
                assert sum(report.num_bytes for report in reports) == sum(4 * math.prod(s) for s in SHAPES.values())
            if option:
                assert sum(report.num_wire_bytes for report in reports) < 0.1 * reports[0].num_bytes

    asyncio.run(main())


@pytest.mark.process
@pytest.mark.parametrize("who", [0, 1, 2], ids=["relay of one", "relay of the other", "of none"])
def test_a_refusing_receiver_cancels_the_sync_for_all(who):
    def refuse(names):
        raise RuntimeError("the loader has no room")

    async def main():
        async with Nodes() as nodes:
            await nodes.sync(model(1), 1)
            errors, answers = await nodes.sync(model(2), 2, **{str(who): {"on_landed": refuse}})
            assert any("no room" in str(error) for error in errors), errors
            assert all(isinstance(answer, Exception) for answer in answers), answers
            assert {receiver.version for receiver in nodes.receivers} == {1}
            _, versions = await nodes.sync(model(3), 3)
            assert versions == [3] * 3
            for held in nodes.held:
                assert all(torch.equal(held[name], tensor) for name, tensor in model(3).items())

    asyncio.run(main())


@pytest.mark.process
def test_a_chain_of_relays_takes_a_version_to_its_end():
    """Each session is sent on to the next receiver; the trainer sends to the first alone."""

    async def main():
        async with AsyncExitStack() as stack:
            whole = [ShardSpec(name=n, shape=s, offsets=(0,) * len(s), sizes=s) for n, s in SHAPES.items()]
            name, plan = new_name(), ShardPlan([whole])
            sender = ShardedSender(plan, 0, lambda _: f"shm://{name}-0?{BUCKET}", timeout_s=TIMEOUT_S)
            stack.push_async_callback(sender.close)
            await sender.prepare()
            urls = [f"shm://{name}-{level}" for level in range(4)]
            chain = [*(relay_address(*pair, 1) for pair in pairwise(urls)), urls[-1]]
            receivers = [
                await stack.enter_async_context(ShardedReceiver([each], timeout_s=TIMEOUT_S)) for each in chain
            ]
            weights = model(1)
            held = [{name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in receivers]
            taking = [
                asyncio.ensure_future(each.receive_into(into)) for each, into in zip(receivers, held, strict=True)
            ]
            shards = [(spec, weights[spec.name]) for spec in whole]
            shares = await sender.stage(lambda: shards, version=1)
            report = await sender.commit(rl_ckpt.join_digest([shares]), version=1)
            assert await asyncio.gather(*taking) == [1] * 4
            assert len(report.receipts) == 1
            for each in held:
                assert all(torch.equal(each[name], weights[name]) for name in weights)

    asyncio.run(main())


def test_the_address_of_a_relay_is_refused_where_it_is_none():
    for below, count in (("shm://b", 0), ("shm://b", -1), ("", 2)):
        with pytest.raises(AddressError, match="is not an address of a relay"):
            relay_address("shm://a", below, count)
    address = relay_address("tcp://host:1?delta=1", "shm://below", 3)
    assert address == Address("tcp://host:1?delta=1", "shm://below", 3)
    joined = join_addresses([{0: address}, {0: "shm://b"}], 1)
    assert Addresses.from_json(joined.to_json()) == joined


def test_what_sends_on_needs_votes(tmp_path):
    with pytest.raises(UsageError, match="has none: send whole tensors"):
        ShardedReceiver([relay_address(f"file://{tmp_path}", "shm://below", 1)])


def test_what_was_called_off_to_the_receivers_below_is_no_vote():
    """A thread that was waiting for them goes on then, and must not vote for what they have not got."""

    async def main():
        pipe, preparing = RelayPipe(SimpleNamespace(version=3)), asyncio.get_running_loop().create_future()
        preparing.cancel()
        pipe.set_result(preparing)
        with pytest.raises(SyncAbortedError, match="version 3 was called off to the receivers below"):
            pipe.require_votes(0)
        pipe.close()

    asyncio.run(main())
