"""Large memory is used again, never under a reader, and within bounds."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rl_tq
from rl_tq.memory import pool
from rl_tq.memory.pool import kept_bytes, new_memory, size_class

NBYTES = 36 << 20


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "RESERVE_S", 3600.0)
    yield
    pool._RESERVE.trim(-1.0, 0)


def test_memory_that_nobody_looks_at_is_used_again_and_no_other():
    first = new_memory(NBYTES)
    view = first.view(torch.int64)[1000:1001]
    view.fill_(7)
    address = first.data_ptr()
    del first
    assert kept_bytes() == 0
    other = new_memory(NBYTES - 1)
    other.fill_(1)
    assert other.data_ptr() != address
    assert view.item() == 7
    del view
    assert kept_bytes() == NBYTES
    again = new_memory(NBYTES - 1000)
    assert (again.data_ptr(), again.nbytes) == (address, NBYTES - 1000)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "RESERVE_BYTES", 3 * NBYTES)
    blocks = [new_memory(NBYTES) for _ in range(5)]
    last = blocks[-1].data_ptr()
    while blocks:
        del blocks[0]
    assert kept_bytes() == 3 * NBYTES
    assert new_memory(NBYTES).data_ptr() == last
    monkeypatch.setattr(pool, "RESERVE_S", 0.0)
    del blocks[:]
    new_memory(NBYTES)
    assert kept_bytes() == 0


@pytest.mark.process
def test_tensors_may_be_dropped_by_any_thread_during_a_take():
    def churn(seed: int) -> None:
        for i in range(12):
            block = new_memory(NBYTES + seed * (4 << 20))
            block[i :: NBYTES // 8] = seed
            assert set(block[i :: NBYTES // 8].tolist()) == {seed}

    threads = [threading.Thread(target=churn, args=(i + 1,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    gc.collect()
    assert not any(thread.is_alive() for thread in threads)
    assert kept_bytes() <= pool.RESERVE_BYTES


@pytest.mark.process
def test_a_batch_is_received_into_the_memory_of_the_one_before():
    values = torch.arange(NBYTES // 8 + 4).view(4, -1)
    with rl_tq.serve("tcp://127.0.0.1:0") as server, rl_tq.connect(server.address) as client:
        meta = client.put({"a": values}, partition="p")
        batch = client.get(meta)
        address = batch["a"].data_ptr()
        kept = batch["a"][0, :3].clone()
        del batch
        again = client.get(meta)
        assert again["a"].data_ptr() == address
        assert torch.equal(again["a"], values)
        assert kept.tolist() == [0, 1, 2]
        more = client.get(meta)
        more["a"].zero_()
        assert torch.equal(again["a"], values)


@given(st.integers(4096, 1 << 40))
def test_size_classes_waste_little_and_hold_slightly_larger(nbytes: int):
    held = size_class(nbytes)
    assert nbytes <= held <= nbytes + max(4096, nbytes // 8)
    assert size_class(held) == held
    assert size_class(nbytes + 1) >= held
    assert held % 4096 == 0
