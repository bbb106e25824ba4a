"""Copies and digests, and what only a GPU can show: graph capture, side streams, the module's own checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from csrc_kit import Implementation, cu_seqlens

import rl_csrc
from rl_csrc.buffers import digest as digests
from rl_csrc.types import LossSpec

if TYPE_CHECKING:
    from collections.abc import Sequence


def copy(kernels: Implementation, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """By the kernel of the device; the CPU's stands behind the public function."""
    if kernels.name == "cpu":
        rl_csrc.bucket_copy(sources, targets)
    else:
        kernels.call("bucket_copy", sources, targets)


def test_bucket_copy_of_many_sizes_and_alignments(kernels: Implementation) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = [*range(70), 8191, 8192, 8193, 100_003, 3_000_001, *([33] * 2100)]
    source = torch.randint(0, 256, (sum(sizes) + 5000 * len(sizes) // 1000,), generator=generator, dtype=torch.uint8)
    source = source.to(kernels.device)
    target = torch.zeros(sum(sizes) + 3 * len(sizes) + 64, dtype=torch.uint8, device=kernels.device)
    sources, targets, a, b = [], [], 0, 3
    for size in sizes:
        sources.append(source[a : a + size])
        targets.append(target[b : b + size])
        a, b = a + size, b + size + 3
    copy(kernels, sources, targets)
    at = 3
    expected = torch.zeros_like(target)
    for size, x in zip(sizes, sources, strict=True):
        expected[at : at + size] = x
        at += size + 3
    assert torch.equal(target, expected)


@pytest.mark.parametrize("shift", [0, 5])
def test_bucket_copy_of_pieces_aligned_alike(kernels: Implementation, shift: int) -> None:
    """Most real ones are. Bytes beside a destination stay as they were."""
    sizes = [16, 500, 512, 529, 1040, 2047, 8191, 8192, 8208, 100_003]
    room = torch.zeros(len(sizes), 100_096, dtype=torch.uint8)
    source = torch.randint(1, 256, room.shape, generator=torch.Generator().manual_seed(5), dtype=torch.uint8)
    wanted, source, target = room.clone(), source.to(kernels.device), room.to(kernels.device)
    pieces = [(row, slice(shift + 16, shift + 16 + size)) for row, size in enumerate(sizes)]
    copy(kernels, [source[piece] for piece in pieces], [target[piece] for piece in pieces])
    for piece in pieces:
        wanted[piece] = source[piece].cpu()
    assert torch.equal(target.cpu(), wanted)


def test_bucket_copy_of_views_that_are_not_dense(kernels: Implementation) -> None:
    x = torch.arange(24, device=kernels.device).reshape(4, 6)
    y = torch.zeros(6, 4, dtype=torch.int64, device=kernels.device)
    copy(kernels, [x.t()], [y])
    assert torch.equal(y, x.t())


@pytest.mark.parametrize("size", [0, 1, 7, 8, 15, 16, 17, 1000, 65_536, 3_000_005])
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_digest_is_the_reference(kernels: Implementation, size: int, shift: int) -> None:
    generator = torch.Generator().manual_seed(2)
    data = torch.randint(0, 256, (size + shift,), generator=generator, dtype=torch.uint8)[shift:]
    on_device = torch.empty(size + shift, dtype=torch.uint8, device=kernels.device)[shift:].copy_(data)
    for offset in (0, 80):
        assert kernels.call("digest_sum", on_device, offset) == digests.reference_sum(data, offset)


@pytest.mark.process
def test_digests_of_many_pieces(kernels: Implementation) -> None:
    """More than fit a launch, of all alignments, some empty and some of several tiles."""
    sizes = [(i * 37) % 500 for i in range(2500)] + [0, 300_000, 1 << 20, 0, 16, 0]
    data = torch.randint(0, 256, (sum(sizes),), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    on_device = data.to(kernels.device)
    sums = kernels.call("digest_many", on_device.split(sizes))
    assert sums == [digests.reference_sum(piece) for piece in data.split(sizes)]


def delta_in_plain_python(fresh: torch.Tensor, base: torch.Tensor) -> tuple[list[list[int]], list[int]]:
    """Table and gap bytes by the words of FRAMES.md, one element at a time."""
    changed = (fresh != base).nonzero()[:, 0].tolist()
    table = [[0, 0] for _ in range(-(-fresh.numel() // 65536))]
    gaps: list[int] = []
    chunk, at = -1, 0
    for position in changed:
        if position // 65536 != chunk:
            chunk, at = position // 65536, position // 65536 * 65536
        skip = position - at
        steps = [255] * (skip // 255) + [skip % 255]
        gaps += steps
        table[chunk][0] += 1
        table[chunk][1] += len(steps)
        at = position + 1
    return table, gaps


@pytest.mark.process
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.3, 1.0])
def test_delta_is_the_specification(kernels: Implementation, dtype: torch.dtype, share: float) -> None:
    if kernels.name == "cpu":
        pytest.skip("its twin is the suite of rl_csrc.delta")
    generator = torch.Generator().manual_seed(4)
    base = torch.randint(0, 100, (150_001,), generator=generator).to(dtype)
    fresh = torch.where(torch.rand(150_001, generator=generator) < share, base + 1, base)
    there = fresh.to(kernels.device)
    found = kernels.call("delta_encode", there, base.to(kernels.device, copy=True), 9.0)
    assert found is not None
    table, gaps, values = found
    wanted_table, wanted_gaps = delta_in_plain_python(fresh, base)
    assert table.tolist() == wanted_table
    assert gaps.tolist() == wanted_gaps
    assert torch.equal(values.cpu(), fresh[fresh != base])
    target = base.to(kernels.device, copy=True)
    assert kernels.call("delta_apply", target, *found)
    assert torch.equal(target.cpu(), fresh)
    if share == 0.3:
        assert kernels.call("delta_encode", there, base.to(kernels.device, copy=True), 0.1) is None
        target = base.to(kernels.device, copy=True)
        assert not kernels.call("delta_apply", target, table, torch.full_like(gaps, 254), values)
        assert not kernels.call("delta_apply", target, table, gaps[:-1], values)
        assert torch.equal(target.cpu(), base)


def gpu_only(kernels: Implementation) -> None:
    if kernels.device.type == "cpu":
        pytest.skip("streams and graphs are CUDA's; the results are covered by the tests above")


@pytest.mark.gpu
def test_ops_are_captured_in_a_graph(kernels: Implementation) -> None:
    gpu_only(kernels)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(64, 1000, generator=generator).to(kernels.device)
    labels = torch.randint(0, 1000, (64,), generator=generator).to(kernels.device)
    mask = torch.ones(64, dtype=torch.bool, device=kernels.device)
    boundaries = cu_seqlens([32, 32], kernels.device)
    advantages = torch.randn(64, generator=generator).to(kernels.device)

    def step() -> list[Any]:
        scored, *_ = kernels.call("logprobs_forward", logits, labels, 1.0, None, -100, None, True, False)
        loss = kernels.call(
            "policy_loss", scored, scored - 0.1, advantages, mask, boundaries, LossSpec(), 64.0, None, None, None
        )
        scan = kernels.call(
            "scan_reverse", advantages, None, boundaries, None, "gae", 1.0, 0.95, None, "hold", None, 1.0, 1.0
        )
        moments = kernels.call("masked_moments", advantages, mask)
        return [scored, loss[0], loss[2], scan[0], moments[1]]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    logits.copy_(torch.randn(64, 1000, generator=generator))
    for _ in range(3):
        graph.replay()
    for ours, theirs in zip(captured, step(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
def test_launches_follow_the_current_stream(kernels: Implementation) -> None:
    """On a side stream the kernel comes after what is queued there, and nothing waits for it on the host."""
    gpu_only(kernels)
    side = torch.cuda.Stream()
    x = torch.zeros(1 << 20, device=kernels.device)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x += 1
        _, mean, _ = kernels.call("masked_moments", x, None)
    side.synchronize()
    assert mean == 1.0


def test_a_bad_launch_says_what_failed(kernels: Implementation) -> None:
    if kernels.name == "cpu":
        pytest.skip("nothing is launched there")
    logits = torch.zeros(1, 8, device=kernels.device, dtype=torch.bfloat16)
    labels = torch.zeros(1, dtype=torch.int64, device=kernels.device)
    scored, wide = torch.zeros(1, device=kernels.device), logits.float()
    with pytest.raises(RuntimeError, match="logprobs_backward: the CUDA launch failed with cudaErrorInvalidValue"):
        kernels.call(
            "logprobs_backward", logits, labels, scored, scored, scored, None, None, 1.0, None, None, None, 0, wide
        )
