"""Buckets: the plan by hand and by property, and copies that digest their leaves."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_csrc import ArgumentError, _cpu, bucket, digest


@given(st.lists(st.integers(0, 5000), max_size=30), st.sampled_from([256, 1024, 2048, 1 << 20]))
def test_a_plan_places_every_byte_once_in_order(sizes, room):
    plan = bucket.BucketPlan(room)
    last, end = 0, 0
    for size in sizes:
        seen = 0
        for place in plan.place(size):
            assert place.bucket_offset % 256 == 0
            assert (place.bucket, place.bucket_offset) >= (last, end if place.bucket == last else 0)
            assert place.offset == seen
            seen += place.num_bytes
            last, end = place.bucket, place.bucket_offset + place.num_bytes
            assert end <= room
        assert seen == size


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
