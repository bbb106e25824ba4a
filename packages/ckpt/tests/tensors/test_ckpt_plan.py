"""The bucket plan against hand-computed numbers, and its laws."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_csrc.buffers.bucket import BucketPlan, aligned


def place_all(sizes, bucket_bytes):
    """(tensor, bucket, tensor_offset, bucket_offset, num_bytes) of every span."""
    plan = BucketPlan(bucket_bytes)
    return [
        (tensor, piece.bucket, piece.offset, piece.bucket_offset, piece.num_bytes)
        for tensor, size in enumerate(sizes)
        for piece in plan.place(size)
    ]


@pytest.mark.parametrize(("size", "expected"), [(0, 0), (1, 256), (256, 256), (257, 512)])
def test_aligned(size, expected):
    assert aligned(size) == expected


def test_small_tensors_share_a_bucket_at_aligned_offsets():
    assert place_all([100, 256, 300], 1024) == [(0, 0, 0, 0, 100), (1, 0, 0, 256, 256), (2, 0, 0, 512, 300)]


def test_a_tensor_that_does_not_fit_opens_the_next_bucket():
    assert place_all([600, 512, 512], 1024) == [(0, 0, 0, 0, 600), (1, 1, 0, 0, 512), (2, 1, 0, 512, 512)]


def test_a_larger_tensor_is_split_and_its_last_bucket_is_shared():
    assert place_all([10, 2148, 256], 1024) == [
        (0, 0, 0, 0, 10),
        (1, 1, 0, 0, 1024),
        (1, 2, 1024, 0, 1024),
        (1, 3, 2048, 0, 100),
        (2, 3, 0, 256, 256),
    ]


def test_a_tensor_of_exactly_two_buckets():
    assert place_all([2048, 1], 1024) == [(0, 0, 0, 0, 1024), (0, 1, 1024, 0, 1024), (1, 2, 0, 0, 1)]


def test_empty_tensors_have_one_empty_span_and_take_no_space():
    assert place_all([0, 1024, 0], 1024) == [(0, 0, 0, 0, 0), (1, 0, 0, 0, 1024), (2, 0, 0, 1024, 0)]


def test_a_closed_bucket_takes_nothing_more():
    plan = BucketPlan(1024)
    plan.close()
    assert [piece.bucket for piece in plan.place(100)] == [0]
    plan.close()
    assert [piece.bucket for piece in plan.place(100)] == [1]


@given(st.lists(st.integers(0, 5000), max_size=40), st.integers(1, 8).map(lambda n: n * 256))
def test_laws(sizes, bucket_bytes):
    spans = place_all(sizes, bucket_bytes)
    for tensor, size in enumerate(sizes):
        pieces = [span for span in spans if span[0] == tensor]
        assert sum(piece[4] for piece in pieces) == size
        assert [piece[2] for piece in pieces] == [sum(p[4] for p in pieces[:i]) for i in range(len(pieces))]
        assert len(pieces) == 1 or size > bucket_bytes, "a tensor that fits a bucket is never split"
        assert len(pieces) == 1 or all(piece[3] == 0 for piece in pieces), "pieces start at the start of a bucket"
        assert all(piece[4] > 0 for piece in pieces) or (size == 0 and len(pieces) == 1)
    assert all(offset % 256 == 0 and offset + length <= bucket_bytes for _, _, _, offset, length in spans)
    buckets = [bucket for _, bucket, *_ in spans]
    assert buckets == sorted(buckets)
    assert set(buckets) == set(range(len(set(buckets))))
    for bucket in set(buckets):
        taken = [(offset, offset + length) for _, b, _, offset, length in spans if b == bucket]
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken)), "no overlap"
