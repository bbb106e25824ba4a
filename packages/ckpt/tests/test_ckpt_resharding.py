"""Resharding: every element that is wanted moves once, bit for bit, whatever the two meshes are."""

import asyncio
import itertools
import math
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_ckpt
from rl_ckpt import Resharding, ShardSpec, TensorError
from rl_ckpt.testing import new_name

NUM_LAYERS = 3


def ranks_of(mesh):
    return list(itertools.product(*map(range, mesh)))


def shard(whole, spec):
    return whole[tuple(slice(start, start + size) for start, size in zip(spec.offsets, spec.sizes, strict=True))]


def specs_on(mesh, shapes, placements):
    """For each rank in row-major order, the shard of every tensor."""
    return [
        [ShardSpec.on_mesh(n, s, mesh=mesh, placements=placements[n], coordinate=at) for n, s in shapes.items()]
        for at in ranks_of(mesh)
    ]


def moved(plan, sources, targets, weights):
    """The target's shards after every move, and how many elements moved."""
    held = [{spec.name: shard(weights[spec.name], spec).clone() for spec in specs} for specs in sources]
    got = [{s.name: torch.full(s.sizes, -1, dtype=weights[s.name].dtype) for s in specs} for specs in targets]
    num_moved = 0
    for source, target in itertools.product(range(len(sources)), range(len(targets))):
        into = plan.incoming(source, target, got[target])
        for name, tensor in plan.outgoing(source, target, held[source]):
            assert (into[name] == -1).all()  # never twice
            into[name].copy_(tensor)
            num_moved += tensor.numel()
    return got, num_moved


@st.composite
def shardings(draw):
    """Shapes, and two meshes that cut them in whatever way: uneven, replicated, one axis twice, empty shards."""
    shapes = {
        f"t{i}": tuple(shape)
        for i, shape in enumerate(draw(st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=3)))
    }

    def side():
        mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
        axes = {n: [None, *range(len(s))] for n, s in shapes.items()}
        placements = {n: tuple(draw(st.sampled_from(axes[n])) for _ in mesh) for n in shapes}
        return specs_on(mesh, shapes, placements)

    return shapes, side(), side()


@settings(max_examples=60, deadline=None)
@given(shardings())
def test_wanted_tensors_move_once_and_equal_gathered_ones(case):
    shapes, sources, targets = case
    weights = {name: torch.arange(math.prod(shape)).reshape(shape) for name, shape in shapes.items()}
    got, num_moved = moved(Resharding(sources, targets), sources, targets, weights)
    for specs, tensors in zip(targets, got, strict=True):
        for spec in specs:
            assert torch.equal(tensors[spec.name], shard(weights[spec.name], spec)), spec
    assert num_moved == sum(math.prod(spec.sizes) for specs in targets for spec in specs)


@pytest.mark.process
@settings(max_examples=50, deadline=None)
@given(shardings())
def test_a_mesh_cuts_as_torch_does(case):
    utils = pytest.importorskip("torch.distributed.tensor._utils")
    from torch.distributed.tensor import Replicate, Shard

    shapes, _, _ = case
    for mesh in ((3,), (2, 3), (3, 2, 2)):
        for name, shape in shapes.items():
            for axes in itertools.product([None, *range(len(shape))], repeat=len(mesh)):
                torchs = [Replicate() if axis is None else Shard(axis) for axis in axes]
                for at in ranks_of(mesh):
                    spec = ShardSpec.on_mesh(name, shape, mesh=mesh, placements=axes, coordinate=at)
                    sizes, offsets = utils._compute_local_shape_and_global_offset(shape, mesh, list(at), torchs)
                    assert tuple(sizes) == spec.sizes
                    assert 0 in sizes or tuple(offsets) == spec.offsets


def test_fsdp_to_tensor_parallel_by_hand():
    """Rows over 2 ranks, to columns over 2: each rank of the source sends each half of its rows to one target."""
    shapes = {"w": (4, 6)}
    plan = Resharding(specs_on((2,), shapes, {"w": (0,)}), specs_on((2,), shapes, {"w": (1,)}))
    assert [[move.name for move in plan.moves(0, target)] for target in (0, 1)] == [["w[0:2,0:3]"], ["w[0:2,3:6]"]]
    assert [[move.name for move in plan.moves(1, target)] for target in (0, 1)] == [["w[2:4,0:3]"], ["w[2:4,3:6]"]]
    assert [plan.targets_of(rank) for rank in (0, 1)] == [[0, 1], [0, 1]]
    same = Resharding(specs_on((2,), shapes, {"w": (0,)}), specs_on((2,), shapes, {"w": (0,)}))
    assert [same.targets_of(rank) for rank in (0, 1)] == [[0], [1]]  # what only touches is not sent


def test_replicas_share_the_sending():
    """HSDP of 2 replicas over 2 shards to 2 whole copies: every element goes once to each, a quarter from each rank."""
    shapes = {f"w{i}": (4, 2) for i in range(4)}
    sources = specs_on((2, 2), shapes, dict.fromkeys(shapes, (None, 0)))
    plan = Resharding(sources, specs_on((2,), shapes, dict.fromkeys(shapes, (None,))))
    sent = [sum(move.num_elements for target in (0, 1) for move in plan.moves(source, target)) for source in range(4)]
    assert sent == [16, 16, 16, 16]


def test_of_equal_replicas_the_lowest_rank_sends():
    whole = ShardSpec(name="w", shape=(4,), offsets=(0,), sizes=(4,))
    apart = ShardSpec(name="v", shape=(2,), offsets=(0,), sizes=(2,))
    plan = Resharding([[whole], [whole, apart], [apart]], [[whole], [apart]])
    assert [plan.targets_of(source) for source in (0, 1, 2)] == [[0], [1], []]


def test_shards_that_overlap_in_part_are_joined_all_the_same():
    def rows(first, end):
        return ShardSpec(name="w", shape=(10,), offsets=(first,), sizes=(end - first,))

    plan = Resharding([[rows(0, 6)], [rows(4, 10)]], [[rows(2, 9)]])
    assert [move.name for source in (0, 1) for move in plan.moves(source, 0)] == ["w[2:6]", "w[6:9]"]


def test_what_cannot_be_joined_is_refused_before_anything_moves():
    half = ShardSpec(name="w", shape=(4,), offsets=(0,), sizes=(2,))
    whole = ShardSpec(name="w", shape=(4,), offsets=(0,), sizes=(4,))
    with pytest.raises(TensorError, match=r"no rank of the source holds 'w' at \(\(2, 4\),\), which target 0 wants"):
        Resharding([[half]], [[whole]])
    other = ShardSpec(name="w", shape=(5,), offsets=(0,), sizes=(2,))
    with pytest.raises(TensorError, match=r"\(5,\) for rank 0 of the target and \(4,\) for rank 0 of the source"):
        Resharding([[half]], [[other]])
    with pytest.raises(TensorError, match=r"has shape \(3,\); its ShardSpec says \(2,\)"):
        list(Resharding([[half]], [[half]]).outgoing(0, 0, {"w": torch.ones(3)}))
    with pytest.raises(ValueError, match="starts at"):
        ShardSpec(name="w", shape=(4,), offsets=(3,), sizes=(2,))
    with pytest.raises(ValueError, match="cuts axis 1"):
        ShardSpec.on_mesh("w", (4,), mesh=(2,), placements=(1,), coordinate=(0,))


SHAPES = {
    f"layers.{i}.{name}": shape for i in range(NUM_LAYERS) for name, shape in {"up": (7, 4), "down": (4, 7)}.items()
}
FSDP = specs_on((2,), SHAPES, dict.fromkeys(SHAPES, (0,)))
TENSOR_PARALLEL = specs_on((2,), SHAPES, {name: (0 if name.endswith("up") else 1,) for name in SHAPES})


def weights_of(version):
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def take(name, rank, folder):
    """One rank of the target: takes two versions from every rank of the source that has something for it."""
    plan = Resharding(FSDP, TENSOR_PARALLEL)
    shards = {spec.name: torch.zeros(spec.sizes) for spec in TENSOR_PARALLEL[rank]}

    async def main():
        async with AsyncExitStack() as stack:
            engines = {
                source: await stack.enter_async_context(
                    rl_ckpt.connect(f"shm://{name}-{source}-{rank}", role="receive")
                )
                for source in (0, 1)
                if rank in plan.targets_of(source)
            }
            into = {source: plan.incoming(source, rank, shards) for source in engines}
            for version in (1, 2):
                await asyncio.gather(*(engine.receive_into(into[source]) for source, engine in engines.items()))
                torch.save(shards, folder / f"{rank}-{version}.pt")

    asyncio.run(main())


@pytest.mark.process
def test_over_sessions_from_two_ranks_to_two_processes(tmp_path):
    """FSDP to tensor parallel, each pair over its own shm session; the second version as well, and no byte more."""
    name, plan = new_name(), Resharding(FSDP, TENSOR_PARALLEL)
    processes = [subprocess.Popen([sys.executable, __file__, name, str(rank), str(tmp_path)]) for rank in (0, 1)]

    async def main():
        async with AsyncExitStack() as stack:
            engines = {
                (source, target): await stack.enter_async_context(
                    rl_ckpt.connect(f"shm://{name}-{source}-{target}", role="send")
                )
                for source in (0, 1)
                for target in plan.targets_of(source)
            }
            for version in (1, 2):
                weights = weights_of(version)
                held = [{spec.name: shard(weights[spec.name], spec) for spec in specs} for specs in FSDP]
                reports = await asyncio.gather(
                    *(
                        engine.send_weights(plan.outgoing(source, target, held[source]), version=version)
                        for (source, target), engine in engines.items()
                    )
                )
                assert sum(report.num_bytes for report in reports) == 4 * sum(map(torch.numel, weights.values()))

    try:
        asyncio.run(main())
        assert [process.wait(60) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for version, rank in itertools.product((1, 2), (0, 1)):
        got = torch.load(tmp_path / f"{rank}-{version}.pt")
        for spec in TENSOR_PARALLEL[rank]:
            assert torch.equal(got[spec.name], shard(weights_of(version)[spec.name], spec))


if __name__ == "__main__":
    take(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
