"""Blocks: who holds them, how they are found again, and what a copy keeps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_rollout.backends.embedded.kv_cache import KVCache, LayerShape
from rl_rollout.backends.embedded.scheduling.block_manager import BlockPool


def test_blocks_are_taken_shared_and_given_back():
    pool = BlockPool(4, 2, capacity=4)
    mine = pool.take(3)
    assert (pool.num_free, pool.num_held) == (1, 3)
    pool.share(mine[:2])
    assert pool.give_back(mine) == [mine[2]]  # two have another holder
    assert pool.num_free == 2
    assert pool.give_back(mine[:2]) == [mine[1], mine[0]]
    assert pool.num_free == 4


def test_a_prefix_is_found_by_its_tokens_and_its_root():
    pool = BlockPool(8, 2, capacity=8)
    blocks = pool.take(3)
    pool.remember("v1", (1, 2, 3, 4, 5), blocks)  # two full blocks; the third is not
    assert pool.find("v1", (1, 2, 3, 4, 5, 6)) == blocks[:2]
    assert pool.find("v1", (1, 2, 9, 9)) == blocks[:1]
    assert pool.find("v1", (3, 4)) == []  # the same tokens after others are another block
    assert pool.find("v2", (1, 2)) == []
    assert pool.num_held == 3


def test_unheld_versions_stay_until_room_is_needed_ends_first():
    pool = BlockPool(4, 1, capacity=4)
    old = pool.take(2)
    pool.remember("v", (1, 2), old)
    pool.give_back(old)
    assert pool.num_free == 4
    pool.take(3)  # two that were empty, and the end of the chain
    assert pool.find("v", (1, 2)) == old[:1]
    assert pool.num_free == 0


def test_what_is_spoiled_is_not_found_again():
    pool = BlockPool(2, 1, capacity=2)
    blocks = pool.take(2)
    pool.remember("v", (1, 2), blocks)
    assert sorted(pool.give_back(blocks, is_spoiled=True)) == sorted(blocks)
    assert pool.find("v", (1, 2)) == []
    assert pool.num_free == 2


def test_a_pool_grows_while_more_than_half_is_held():
    pool = BlockPool(100, 1)
    assert (pool.num_free, pool.capacity) == (100, 0)
    held = pool.take(64)
    assert pool.capacity == 64
    held += pool.take(1)
    assert pool.capacity == 100  # doubled, as far as the limit allows
    pool.remember("v", range(65), held)
    pool.give_back(held)
    assert pool.num_free == 100


@pytest.mark.process
@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), max_size=9)), max_size=40), st.integers(4, 12))
def test_no_block_has_two_owners_and_none_is_lost(operations, limit):
    """Each operation starts a sequence of these tokens (shared prefix first), or ends one."""
    pool, alive = BlockPool(limit, 2), []
    for kind, tokens in operations:
        if kind and alive:
            known, blocks = alive.pop(kind - 1 if len(alive) > 1 else 0)
            pool.remember("v", known, blocks)
            pool.give_back(blocks)
        else:
            found = pool.find("v", tokens)
            needed = -(-len(tokens) // 2) - len(found)
            if needed > pool.num_free:
                pool.give_back(found)
                continue
            new = pool.take(needed)
            in_use = {block for _, blocks in alive for block in blocks} | set(found)
            assert not in_use & set(new)
            alive.append((tokens, found + new))
        assert pool.num_held == len({block for _, blocks in alive for block in blocks})
        assert pool.num_free + pool.num_held == limit
        assert pool.capacity <= limit


def make_cache():
    shapes = {0: LayerShape(num_heads=2, key_dim=4, value_dim=3), 1: LayerShape(num_heads=1, key_dim=4, value_dim=4)}
    return KVCache(shapes, block_size=2, dtype=torch.float32, device=torch.device("cpu"))


def test_resizing_keeps_the_blocks():
    cache = make_cache()
    assert cache.bytes_per_block == 2 * 4 * (2 * 7 + 1 * 8)
    cache.resize(2)
    for part in (*cache.keys.values(), *cache.values.values()):
        part.normal_()
    before = cache.keys[0].clone()
    cache.resize(5)
    assert cache.keys[0].shape == (5, 2, 2, 4)
    assert cache.values[0].shape == (5, 2, 2, 3)
    assert cache.keys[0][:2].equal(before)
    assert not cache.keys[0][2:].any()


def test_copy_clear_release():
    cache = make_cache()
    cache.resize(4)
    cache.copy([])
    cache.values[1][0] = 7
    cache.copy([(0, 2), (0, 3)])
    assert cache.values[1][2:].eq(7).all()
    assert not cache.values[1][1].any()
    cache.clear([3])
    assert not cache.values[1][3].any()
    assert cache.values[1][2].eq(7).all()
    cache.release()
    assert (cache.num_blocks, cache.keys) == (0, {})
