"""Capacity planning with hand-computed numbers, and rows that keep their content."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_rollout.backends.embedded.cache import KVCache, LayerShape, plan_capacity

BIG = 10**9


@pytest.mark.parametrize(
    ("count", "length", "rows", "room", "budget", "want"),
    [
        (1, 10, 0, 0, BIG, (1, 64)),  # from nothing: positions in steps of 64
        (3, 65, 1, 64, BIG, (3, 128)),  # 3 > 2 x 1; 65 > 64, and 96 rounds to 128
        (3, 65, 2, 256, BIG, (4, 256)),  # rows double
        (30, 65, 20, 64, BIG, (32, 128)),  # rows double, up to 32
        (3, 10, 4, 64, BIG, (4, 64)),  # enough already
        (2, 65, 32, 64, 1024, (8, 128)),  # 32 x 128 is over the budget: 1024 / 128 = 8 rows
        (12, 10, 1, 512, 1024, (12, 64)),  # 12 x 512 is over the budget: positions shrink
    ],
)
def test_plan_capacity(count, length, rows, room, budget, want):
    assert plan_capacity(count, length, rows=rows, room=room, max_rows=32, budget=budget) == want


@given(st.integers(1, 64), st.integers(1, 500), st.integers(0, 64), st.integers(0, 10), st.integers(64, 40_000))
def test_a_plan_is_always_enough(count, length, rows, steps, budget):
    new_rows, new_room = plan_capacity(count, length, rows=rows, room=64 * steps, max_rows=64, budget=budget)
    assert new_rows >= count
    assert new_room >= length
    assert new_rows <= 64
    if new_rows * new_room > budget:  # then nothing smaller would do
        assert (new_rows, new_room) == (count, -(-length // 64) * 64)


def make_cache():
    shapes = {0: LayerShape(num_heads=2, key_dim=4, value_dim=3), 1: LayerShape(num_heads=1, key_dim=4, value_dim=4)}
    return KVCache(shapes, dtype=torch.float32, device=torch.device("cpu"))


def test_resizing_keeps_the_rows_in_use():
    cache = make_cache()
    assert cache.bytes_per_position == 4 * (2 * 7 + 1 * 8)
    cache.resize(2, 64, num_used=0)
    for part in (*cache.keys.values(), *cache.values.values()):
        part.normal_()
    before = cache.keys[0][:1].clone()
    cache.resize(5, 128, num_used=1)
    assert cache.keys[0].shape == (5, 2, 128, 4)
    assert cache.values[0].shape == (5, 2, 128, 3)
    assert cache.keys[0][:1, :, :64].equal(before)
    assert not cache.keys[0][1:].any()
    assert not cache.keys[0][:, :, 64:].any()


def test_copy_clear_release():
    cache = make_cache()
    cache.resize(4, 64, num_used=0)
    cache.values[1][0] = 7
    cache.copy_rows(torch.tensor([0, 0]), torch.tensor([2, 3]), 10)
    assert cache.values[1][2:, :, :10].eq(7).all()
    assert not cache.values[1][2:, :, 10:].any()
    cache.clear(torch.tensor([3]))
    assert not cache.values[1][3].any()
    assert cache.values[1][2, :, :10].eq(7).all()
    cache.release()
    assert (cache.num_rows, cache.length, cache.keys) == (0, 0, {})
