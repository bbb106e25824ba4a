"""Slices between processes: over shm here; on GPUs by CUDA IPC in one, by NCCL between several, by NIXL's pull."""

import asyncio
import multiprocessing
from importlib.util import find_spec

import pytest
import torch

import rl_ckpt
from rl_ckpt import ShardSpec
from rl_ckpt.testing import new_name

pytestmark = pytest.mark.process

SHAPES, TIMEOUT_S, TOKEN = {"up": (512, 1024), "down": (1024, 512), "norm": (512,)}, 60.0, "known to all"

NEEDS_NIXL = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed: pip install 'rl-ckpt[nixl]'")


def gpus(count):
    missing = f"needs {count} GPUs; torch sees {torch.cuda.device_count()}"
    return [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < count, reason=missing)]


def model(version, device):
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator).to(device) for name, shape in SHAPES.items()}


def rows(rank):
    return [ShardSpec.on_mesh(n, s, mesh=(2,), placements=(0,), coordinate=(rank,)) for n, s in SHAPES.items()]


def part(tensor, spec):
    return tensor[tuple(slice(a, a + n) for a, n in zip(spec.offsets, spec.sizes, strict=True))]


def send(pipe, scheme, rank, device, name):
    """A rank of a trainer, which does what it is told."""
    token = TOKEN if scheme in ("nccl", "nixl") else None
    url = f"{scheme}://127.0.0.1:0" if token else f"{scheme}://{name}-{rank}"
    if device != "cpu":
        torch.cuda.set_device(device)

    async def main():
        plan = rl_ckpt.ShardPlan([rows(0), rows(1)])
        sender = rl_ckpt.ShardedSender(plan, rank, lambda target: url, timeout_s=TIMEOUT_S, token=token)
        pipe.send((await sender.prepare())[0])
        for version in (1, 2):
            weights = model(version, device)
            shards = [(spec, part(weights[spec.name], spec).contiguous()) for spec in rows(rank)]
            pipe.send(await sender.stage(lambda own=shards: own, version=version))
            report = await sender.commit(await asyncio.to_thread(pipe.recv), version)
            pipe.send(report.digest)
        await sender.close()

    asyncio.run(main())


def receive(pipe, addresses, device):
    """A server of one rank; it tells what it holds after each version."""
    token = TOKEN if addresses[0].startswith(("nccl", "nixl")) else None
    if device != "cpu":
        torch.cuda.set_device(device)

    async def main():
        held = {name: torch.zeros(shape, device=device) for name, shape in SHAPES.items()}
        async with rl_ckpt.ShardedReceiver(addresses, timeout_s=TIMEOUT_S, token=token) as receiver:
            for version in (1, 2):
                assert await receiver.receive_into(held) == version
                pipe.send(rl_ckpt.tree_digest(held))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("scheme", "devices"),
    [
        pytest.param("shm", ["cpu"] * 3, marks=pytest.mark.slow),  # spawned: to be run alone, by this file's path
        pytest.param("cuda-ipc", ["cuda:0"] * 3, marks=gpus(1)),
        pytest.param("nixl", ["cuda:0"] * 3, marks=[*gpus(1), NEEDS_NIXL]),
        pytest.param("nccl", ["cuda:0", "cuda:1", "cuda:2"], marks=gpus(3)),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0].partition(":")[0],
)
def test_slices_of_two_ranks_reach_a_server_of_another_process(scheme, devices):
    context, processes = multiprocessing.get_context("spawn"), []

    def start(function, *arguments):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=function, args=(theirs, *arguments), daemon=True))
        processes[-1].start()
        theirs.close()
        return mine

    def hear(pipe):
        assert pipe.poll(TIMEOUT_S), "it says nothing"
        return pipe.recv()

    try:
        name = new_name()
        ranks = [start(send, scheme, rank, devices[rank], name) for rank in (0, 1)]
        server = start(receive, [hear(rank) for rank in ranks], devices[2])
        for version in (1, 2):
            digest = rl_ckpt.join_digest([hear(rank) for rank in ranks])
            for rank in ranks:
                rank.send(digest)
            wanted = rl_ckpt.tree_digest(model(version, "cpu"))
            assert {digest, *(hear(rank) for rank in ranks), hear(server)} == {wanted}
    finally:
        for process in processes:
            process.join(10)
            process.kill()
