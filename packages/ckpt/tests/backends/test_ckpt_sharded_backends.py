"""Slices over every backend with votes: GPUs, NCCL and NIXL by their stand-ins, as they run where those are."""

import asyncio
import importlib.util
from contextlib import AsyncExitStack, nullcontext

import pytest
import torch
from ckpt_gpu import fake_gpu, fake_nccl
from ckpt_ranks import decide

import rl_ckpt
from rl_ckpt import ShardSpec
from rl_ckpt.errors import SyncAbortedError
from rl_ckpt.sharded import ShardedReceiver, ShardedSender, ShardPlan
from rl_ckpt.testing import new_name
from rl_ckpt.types import join_addresses

pytestmark = pytest.mark.process

SHAPES = {"up": (64, 96), "down": (96, 64), "norm": (64,), "embed": (1024, 1030)}
TIMEOUT_S, TOKEN = 30.0, "known to all"
NEEDS_NIXL = pytest.mark.skipif(not importlib.util.find_spec("nixl"), reason="nixl is not installed: it is for Linux")
LOCAL = ("shm", "uds", "cuda-ipc")
STAND_INS = {"cuda-ipc": fake_gpu, "nccl": fake_nccl}
SCHEMES = [*LOCAL, "tcp", "gloo", "nccl", pytest.param("nixl", marks=[NEEDS_NIXL, pytest.mark.slow])]


def model(version):
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def cut(axis_of, rank):
    return [
        ShardSpec.on_mesh(name, shape, mesh=(2,), placements=(axis_of(shape),), coordinate=(rank,))
        for name, shape in SHAPES.items()
    ]


SOURCES = [cut(lambda shape: 0, rank) for rank in (0, 1)]
TARGETS = [cut(lambda shape: 1 if len(shape) > 1 else None, rank) for rank in (0, 1)]


def part(tensor, spec):
    return tensor[tuple(slice(a, a + n) for a, n in zip(spec.offsets, spec.sizes, strict=True))].contiguous()


@pytest.fixture(params=SCHEMES)
def scheme(request):
    with STAND_INS.get(request.param, nullcontext)():
        yield request.param


class Pairs:
    """Rows of two ranks to columns of two, in two replicas."""

    def __init__(self, scheme):
        self.scheme, self.name = scheme, new_name()
        self.token = None if scheme in LOCAL else TOKEN
        self.plan, self.stack = ShardPlan(SOURCES, TARGETS), AsyncExitStack()

    def url(self, rank):
        if self.token:
            return lambda target: f"{self.scheme}://127.0.0.1:0"
        return lambda target: f"{self.scheme}://{self.name}-{rank}-{target}"

    async def __aenter__(self):
        self.senders = [
            ShardedSender(self.plan, rank, self.url(rank), timeout_s=TIMEOUT_S, token=self.token) for rank in (0, 1)
        ]
        for sender in self.senders:
            self.stack.push_async_callback(sender.close)
        told = join_addresses([await sender.prepare() for sender in self.senders], 2)
        self.receivers = [
            (target, ShardedReceiver(told.of(target), timeout_s=TIMEOUT_S, token=self.token))
            for target in (0, 1)
            for _ in (0, 1)
        ]
        for _, receiver in self.receivers:
            self.stack.push_async_callback(receiver.close)
        self.held = [{spec.name: torch.zeros(spec.sizes) for spec in TARGETS[target]} for target, _ in self.receivers]
        return self

    async def __aexit__(self, *details):
        await self.stack.aclose()

    async def sync(self, weights, version, damage=lambda rank, tensor: tensor):
        """What the ranks and the receivers say of it."""
        receiving = [
            asyncio.ensure_future(receiver.receive_into(held, {spec.name: spec for spec in TARGETS[target]}))
            for (target, receiver), held in zip(self.receivers, self.held, strict=True)
        ]
        staged = await asyncio.gather(
            *(
                sender.stage(
                    lambda r=rank: [(spec, damage(r, part(weights[spec.name], spec))) for spec in SOURCES[r]],
                    version=version,
                    num_replicas=2,
                )
                for rank, sender in enumerate(self.senders)
            ),
            return_exceptions=True,
        )
        reports = await decide(self.senders, staged, version)
        return reports, await asyncio.gather(*receiving, return_exceptions=True)

    def require(self, weights):
        for (target, _), held in zip(self.receivers, self.held, strict=True):
            for spec in TARGETS[target]:
                assert torch.equal(held[spec.name], part(weights[spec.name], spec)), spec


def test_every_replica_has_slices_under_the_whole_model_digest(scheme):
    async def main():
        async with Pairs(scheme) as pairs:
            for version in (1, 2):
                weights = model(version)
                reports, versions = await pairs.sync(weights, version)
                assert versions == [version] * 4, versions
                assert {report.digest for report in reports} == {rl_ckpt.tree_digest(weights)}
                assert all(receipt.is_attested for report in reports for receipt in report.receipts)
                pairs.require(weights)

    asyncio.run(main())


def test_a_failing_rank_commits_nothing_and_the_next_sync_works(scheme):
    def fail(rank, tensor):
        if rank == 1 and tensor.shape == (512, 1030):  # the last one: both ranks are in the middle of it
            raise RuntimeError("the export fails")
        return tensor

    async def main():
        async with Pairs(scheme) as pairs:
            await pairs.sync(model(1), 1)
            errors, answers = await pairs.sync(model(2), 2, damage=fail)
            assert any("the export fails" in str(error) for error in errors), errors
            assert all(isinstance(answer, (SyncAbortedError, rl_ckpt.CkptError)) for answer in answers), answers
            assert {receiver.version for _, receiver in pairs.receivers} == {1}
            weights = model(3)
            _, versions = await pairs.sync(weights, 3)
            assert versions == [3] * 4
            pairs.require(weights)

    asyncio.run(main())
