"""Buckets: the plan by hand and by property, and packing of every awkward tensor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_csrc import ArgumentError, _cpu, bucket, digest


def spans(buckets):
    return [[(p.tensor, p.tensor_offset, p.bucket_offset, p.nbytes) for p in b.pieces] for b in buckets]


def test_plan_by_hand():
    buckets = bucket.plan([100, 0, 300, 2000, 10], bucket_nbytes=1024)
    assert spans(buckets) == [
        [(0, 0, 0, 100), (1, 0, 256, 0), (2, 0, 256, 300)],
        [(3, 0, 0, 1024)],
        [(3, 1024, 0, 976)],
        [(4, 0, 0, 10)],
    ]
    assert [b.nbytes for b in buckets] == [768, 1024, 1024, 256]


def test_nothing_to_plan_and_no_room():
    assert bucket.plan([], bucket_nbytes=1024) == []
    with pytest.raises(ArgumentError, match="bucket_nbytes=100"):
        bucket.plan([1], bucket_nbytes=100)


@given(st.lists(st.integers(0, 5000), max_size=30), st.sampled_from([256, 1000, 2048, 1 << 20]))
def test_plan_covers_every_byte_once(sizes, room):
    seen = [0] * len(sizes)
    order = []
    for b in bucket.plan(sizes, bucket_nbytes=room):
        end = 0
        assert b.pieces
        for p in b.pieces:
            assert p.bucket_offset % 256 == 0
            assert p.bucket_offset >= end
            assert p.tensor_offset == seen[p.tensor]
            seen[p.tensor] += p.nbytes
            end = p.bucket_offset + p.nbytes
            order.append(p.tensor)
        assert end <= b.nbytes <= room
    assert seen == sizes
    assert order == sorted(order)
    assert set(order) == set(range(len(sizes)))


def test_a_plan_of_what_comes_by_hand():
    plan = bucket.BucketPlan(1024)
    assert plan.place(100) == [(0, 0, 0, 100)]
    assert plan.place(0) == [(0, 0, 256, 0)]
    assert plan.place(2000) == [(1, 0, 0, 1024), (2, 1024, 0, 976)]
    assert plan.place(0) == [(2, 0, 1024, 0)]
    plan.close()
    plan.close()
    assert plan.place(10) == [(3, 0, 0, 10)]
    assert (plan.bucket, plan.offset) == (3, 256)
    assert [bucket.aligned(n) for n in (0, 1, 256, 257)] == [0, 256, 256, 512]


def awkward():
    base = torch.randn(300, 70)
    return [
        base,
        base.t(),
        base[::3, ::2],
        torch.tensor(2.5),
        torch.empty(0, 7),
        torch.randn(33).bfloat16(),
        torch.randn(50, dtype=torch.complex64).conj(),
        torch.randint(0, 255, (13,), dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.nn.Parameter(torch.randn(9)),
        torch.tensor([True, False, True]),
    ]


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("room", [512, 4096, 1 << 22])
def test_pack_and_unpack(level, num_threads, room):
    _cpu.set_isa(level)
    try:
        tensors = awkward()
        targets = [torch.empty(t.shape, dtype=t.dtype) for t in tensors]
        memory = torch.full((room,), 99, dtype=torch.uint8)
        for b in bucket.plan([t.nbytes for t in tensors], bucket_nbytes=room):
            memory.fill_(99)
            sent = bucket.pack(b, tensors, memory, digest=True, num_threads=num_threads)
            assert sent == digest(memory[: b.nbytes])
            assert bucket.pack(b, tensors, memory, num_threads=num_threads) is None
            assert bucket.unpack(b, memory, targets, digest=True, num_threads=num_threads) == sent
        for t, u in zip(tensors, targets, strict=True):
            plain = t.detach().resolve_conj().contiguous()
            assert torch.equal(plain.view(-1).view(torch.uint8), u.view(-1).view(torch.uint8))
    finally:
        _cpu.set_isa(-1)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_large_copies_over_threads_are_exact(level):
    _cpu.set_isa(level)
    try:
        tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (5_000_001, 3, 9_000_017)]
        (b,) = bucket.plan([t.nbytes for t in tensors], bucket_nbytes=1 << 24)
        memory = torch.empty((1 << 24) + 8, dtype=torch.uint8)[3:]  # not aligned either
        for threads in (1, 4):
            assert bucket.pack(b, tensors, memory, digest=True, num_threads=threads) == digest(memory[: b.nbytes])
            targets = [torch.zeros_like(t) for t in tensors]
            bucket.unpack(b, memory, targets, num_threads=threads)
            assert all(torch.equal(t, u) for t, u in zip(tensors, targets, strict=True))
    finally:
        _cpu.set_isa(-1)


def test_a_flipped_bit_changes_what_unpack_reports():
    tensors = [torch.randn(100), torch.randn(100)]
    (b,) = bucket.plan([t.nbytes for t in tensors], bucket_nbytes=4096)
    memory = torch.empty(4096, dtype=torch.uint8)
    sent = bucket.pack(b, tensors, memory, digest=True)
    memory[600] ^= 4
    assert bucket.unpack(b, memory, [torch.empty(100), torch.empty(100)], digest=True) != sent


def test_a_plan_of_other_tensors_is_refused():
    (b,) = bucket.plan([400], bucket_nbytes=4096)
    memory = torch.empty(4096, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match="piece 0 does not fit"):
        bucket.pack(b, [torch.randn(99)], memory)
    with pytest.raises(ArgumentError, match="its memory 100"):
        bucket.pack(b, [torch.randn(100)], memory[:100])
    with pytest.raises(ArgumentError, match="not contiguous"):
        bucket.unpack(b, memory, [torch.randn(20, 10).t()[:10]])
    with pytest.raises(ArgumentError, match="lazily conjugated"):
        bucket.unpack(b, memory, [torch.randn(50, dtype=torch.complex64).conj()])


def test_unpack_bumps_the_version():
    (b,) = bucket.plan([400], bucket_nbytes=4096)
    target = torch.randn(100)
    before = target._version
    bucket.unpack(b, torch.zeros(4096, dtype=torch.uint8), [target])
    assert target._version > before


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("leaf_nbytes", [8, 4096, 1 << 22])
def test_leaves_are_copied_and_digested(level, leaf_nbytes):
    _cpu.set_isa(level)
    try:
        contents = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (5000, 0, 70_001, 8)]
        starts, lengths, places = (8, 0, 1, 0), (4000, 0, 70_000, 8), (0, 4096, 4096, 74_240)
        slot = torch.full((80_000,), 99, dtype=torch.uint8)
        found = bucket.pack_leaves(
            slot, list(zip(contents, starts, places, lengths, strict=True)), leaf_nbytes=leaf_nbytes
        )
        targets = [torch.zeros_like(content) for content in contents]
        versions = [target._version for target in targets]
        pieces = list(zip(targets, starts, places, lengths, strict=True))
        assert bucket.unpack_leaves(slot, pieces, leaf_nbytes=leaf_nbytes) == found
        for content, target, start, length, leaves in zip(contents, targets, starts, lengths, found, strict=True):
            part = content[start : start + length]
            assert torch.equal(target[start : start + length], part)
            assert not target[:start].any()
            assert not target[start + length :].any()
            assert leaves == [digest(leaf) for leaf in (part.split(leaf_nbytes) if length else [part])]
        assert [target._version for target in targets] == [version + 1 for version in versions]
        assert (slot[4000:4096] == 99).all()
    finally:
        _cpu.set_isa(-1)


def test_leaves_that_do_not_fit_are_refused():
    slot, content = torch.zeros(4096, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    for piece in ((content, 1, 0, 100), (content, 0, 4000, 100), (content, 0, 4, 8), (content, 2**63, 0, 2**63)):
        with pytest.raises(ArgumentError, match="does not fit"):
            bucket.pack_leaves(slot, [piece], leaf_nbytes=64)
    with pytest.raises(ArgumentError, match="does not fit"):
        bucket.unpack_leaves(slot, [(content, 0, 256, 8), (content, 0, 0, 8)], leaf_nbytes=64)
    with pytest.raises(ArgumentError, match="multiple of 8"):
        bucket.pack_leaves(slot, [(content, 0, 0, 8)], leaf_nbytes=12)
