"""Memory of cleared rows goes although neighbours of theirs stay: with real clients, readers and processes."""

import os
import random
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import rl_tq
from rl_bench.waiting import until
from rl_csrc.ipc import SharedMemory
from rl_tq.columns.schema import ColumnKind, ColumnSchema, Schema
from rl_tq.metadata.rows import Extent
from rl_tq.metadata.state import State
from rl_tq.server.compaction import CompactionQueue, is_worth_it
from rl_tq.server.memory import HeapMemory
from rl_tq.server.segment_table import Client, SegmentTable

WORDS = 1 << 15  # int64 values of a row: 256 KiB


@pytest.fixture
def queue() -> Iterator[rl_tq.TransferQueue]:
    with rl_tq.serve("shm://", timeout_s=60.0) as served:
        yield served


@pytest.mark.parametrize(
    ("live", "nbytes", "rest_s", "verdict"),
    [
        (4 << 20, 8 << 20, 0.0, True),  # half of it, and much
        (
            3 << 20,
            6 << 20,
            0.0,
            None,
        ),  # half of it, but little: small rows that come and go are not copied all the time
        (3 << 20, 6 << 20, 0.5, True),
        (60 << 20, 66 << 20, 0.0, None),  # a part of it
        (60 << 20, 66 << 20, 0.5, True),
        (63 << 20, 66 << 20, 9.0, False),  # a twentieth
        (0, 60_000, 9.0, False),
    ],
)
def test_what_is_worth_a_copy(live: int, nbytes: int, rest_s: float, verdict: bool | None):
    assert is_worth_it(live, nbytes, rest_s) is verdict


class Counted(dict[int, Extent]):
    """Extents by number; counts who asks."""

    num_looks = 0

    def get(self, key: int, default: object = None) -> Any:
        self.num_looks += 1
        return super().get(key, default)


@pytest.mark.process
def test_a_plan_looks_at_some_of_a_segment_of_many_extents():
    """The server waits for it, and so do its clients."""
    state, table = State(), SegmentTable(lambda *_: None, None)
    segment = SharedMemory.create(64 << 20)
    member = Client()
    table.admit(member, 1, SharedMemory(os.dup(segment.fd)), is_packed=True, file=None)
    state.open("p", 1)
    float32 = Schema({"a": ColumnSchema(kind=ColumnKind.DENSE, dtype="float32", shape=())})
    for i in range(1 << 15):
        extent = table.add(member, 1, i << 11, 2048, is_last=False)
        state.put("p", extent, float32, 2048, 1, "test", None, [i + 1], None, None)
    state.extents = held = Counted(state.extents)
    wasted = CompactionQueue(table, state)
    for number, much in ((100, False), (1 << 14, True)):
        state.clear("p", [*home_rows(state)][:number], None)
        for extent in state.freed:
            wasted.note(extent, 0.0)
        table.free(state.freed)
        state.freed.clear()
        held.num_looks = 0
        plan = wasted.plan(0.1)
        assert (plan is not None) == much
        assert held.num_looks <= (1 << 14 if much else 0)
    assert plan is not None
    assert plan.rows == [*home_rows(state)][: len(plan.old)]
    table.close()


def home_rows(state: State) -> Iterator[int]:
    return iter(state.partitions["p"].rows)


def resident(queue: rl_tq.TransferQueue) -> int:
    queue._arena.trim(0.0)  # what the next put would use again
    return queue.stats()["resident_bytes"]


def rows(numbers: range) -> dict:
    return {"a": torch.stack([torch.full((WORDS,), n) for n in numbers]), "n": [[n] for n in numbers]}


@pytest.mark.process
@pytest.mark.parametrize("rows_per_put", [1, 64])
def test_after_a_clear_of_nearly_all_rows_memory_is_what_is_left(queue, rows_per_put):
    """One extent per segment, and many in one."""
    metas = [queue.put(rows(range(i, i + rows_per_put)), partition="p") for i in range(0, 128, rows_per_put)]
    meta = rl_tq.BatchMeta.concat(metas)
    kept = [5, 100]
    queue.clear(meta.reorder([i for i in range(128) if i not in kept]))
    live = 8 * WORDS * len(kept)
    until(lambda: resident(queue) <= 1.1 * live)
    left = meta.reorder(kept)
    assert queue.get(left)["a"][:, ::WORDS].flatten().tolist() == kept
    assert queue.get(left)["n"].tolist() == [[n] for n in kept]
    claimed = queue.get_meta(partition="p", columns=["a", "n"], batch_size=2, task="t")
    assert claimed.rows == left.rows
    assert queue.get(claimed)["a"][:, -1].tolist() == kept
    assert queue.stats()["partitions"]["p"]["bytes"] <= 1.1 * live
    queue.clear("p")
    until(lambda: queue.stats()["segments"] == 0)


def test_all_kinds_of_columns_move(queue):
    data = {
        "dense": torch.arange(600.0).view(300, 2),
        "ragged": [torch.arange(i % 3) for i in range(300)],
        "turns": [[torch.arange(j) for j in range(i % 3)] for i in range(300)],
        "bytes": [bytes([i % 256]) * (i % 5) for i in range(300)],
        "json": [{"i": i} for i in range(300)],
        "shared": rl_tq.PerGroup([torch.full((5000,), g) for g in range(3)]),
    }
    meta = queue.put(data, partition="p", tags=[{"group_id": i % 3} for i in range(300)])
    added = queue.put({"pad": torch.zeros(300, 5000)}, partition="p", sample_ids=meta)
    before = queue.get(meta.reorder([299, 7]))
    queue.clear(meta.reorder([i for i in range(300) if i not in (7, 299)]))
    until(lambda: queue.stats()["bytes"] < 200_000)
    after = queue.get(meta.union(added).reorder([299, 7]))
    for name in ("dense", "pad"):
        assert after[name].shape[0] == 2
    assert torch.equal(after["dense"], before["dense"])
    for name in ("ragged", "shared"):
        assert all(torch.equal(a, b) for a, b in zip(after[name].unbind(), before[name].unbind(), strict=True))
    for name in ("values", "lengths"):
        assert torch.equal(after["turns"][name].values(), before["turns"][name].values())
    assert after["bytes"].tolist() == before["bytes"].tolist()
    assert after["json"].tolist() == [{"i": 299}, {"i": 7}]


@pytest.mark.process
def test_readers_go_on_while_rows_move(queue):
    """Two threads read what is left, by references of before and after, while all else is cleared bit by bit."""
    meta = queue.put(rows(range(96)), partition="p")
    kept = list(range(0, 96, 24))
    with rl_tq.connect(queue.address) as peer, ThreadPoolExecutor(2) as pool:
        held = peer.get(meta, ["a"])["a"]
        is_done = False

        def read() -> int:
            times = 0
            while not is_done:
                assert peer.get(meta.reorder(kept), ["a"])["a"][:, 7].tolist() == kept
                times += 1
                time.sleep(0.001)  # two threads that never rest would keep the others of this process waiting
            return times

        readers = [pool.submit(read) for _ in range(2)]
        try:
            for number in range(96):
                if number not in kept:
                    queue.clear(meta.reorder([number]))
            until(lambda: queue.stats()["bytes"] <= 1.1 * 8 * WORDS * len(kept))
        finally:
            is_done = True
        assert all(reader.result(60) for reader in readers)
        assert held[:, 0].tolist() == list(range(96))  # a view of what is gone
        del held
        until(lambda: resident(queue) <= 1.1 * 8 * WORDS * len(kept))


HOLDER = """
import sys, time, rl_tq
queue = rl_tq.connect(sys.argv[1])
meta = queue.get_meta(partition="p", columns=["a"], batch_size=64, task="t")
batch = queue.get(meta)
print(int(batch["a"][:, 0].sum()), flush=True)
time.sleep(600)
"""


@pytest.mark.process
def test_a_killed_reader_keeps_no_memory(queue):
    meta = queue.put(rows(range(64)), partition="p")
    reader = subprocess.Popen([sys.executable, "-c", HOLDER, queue.address], stdout=subprocess.PIPE, text=True)
    try:
        assert int(reader.stdout.readline()) == sum(range(64))
        queue.clear(meta.reorder(range(1, 64)))
        until(lambda: queue.stats()["bytes"] <= 1.1 * 8 * WORDS)
        assert resident(queue) > 64 * 8 * WORDS  # the reader still looks at it
    finally:
        os.kill(reader.pid, signal.SIGKILL)
        reader.communicate()
    until(lambda: resident(queue) <= 1.1 * 8 * WORDS)
    assert queue.get(meta.reorder([0]))["a"][0, -1].item() == 0


@pytest.mark.process
def test_what_was_moved_survives_a_restart(tmp_path):
    address = f"file://{tmp_path}/q"
    with rl_tq.serve(address) as queue:
        meta = queue.put(rows(range(64)), partition="p")
        queue.clear(meta.reorder([i for i in range(64) if i != 9]))
        until(lambda: queue.stats()["bytes"] <= 1.1 * 8 * WORDS)
    with rl_tq.serve(address) as queue:
        assert queue.get(meta.reorder([9]))["a"][0].unique().tolist() == [9]
        assert queue.stats()["rows"] == 1
        assert resident(queue) <= 1.1 * 8 * WORDS


@pytest.mark.parametrize("address", ["inproc://", "tcp://127.0.0.1:0", "zmq://127.0.0.1:0"])
def test_memory_of_a_serving_process_is_what_is_left(address):
    """Where values lie in the server; a reader that located them before goes on."""
    with rl_tq.serve(address, timeout_s=60.0) as served:
        data = {**rows(range(32)), "turns": [[torch.arange(j) for j in range(i % 4)] for i in range(32)]}
        meta = served.put(data, partition="p", tags=[{"group_id": i // 16} for i in range(32)])
        extents = served.host.memory.extents
        [(number, held)] = extents.items()
        whole = weakref.ref(held.memory)
        request = {"op": "locate", "partition": "p", "generation": 0, "rows": list(meta.rows), "sample_ids": ()}
        located = served.host.locate({**request, "columns": ["n"]}, served)
        served.clear(meta.reorder([i for i in range(32) if i not in (3, 30)]))
        until(lambda: number not in extents)
        assert len(located[1][number].ragged("n")[1]) == 33
        del located, held
        until(lambda: whole() is None)  # the compactor's thread lets go of it last
        assert served.stats()["bytes"] <= 1.1 * 2 * 8 * WORDS
        batch = served.get(meta.reorder([30, 3]))
        assert batch["a"][:, 5].tolist() == [30, 3]
        assert batch["n"].tolist() == [[30], [3]]
        assert [len(row) for row in batch["turns"]["lengths"].unbind()] == [2, 3]
        claimed = served.get_meta(partition="p", columns=["a", "turns"], batch_size=2, task="t")
        assert claimed.rows == meta.reorder([3, 30]).rows
        served.clear("p")
        assert not extents


def test_what_several_puts_share_is_left_alone_and_gains_nothing():
    with rl_tq.serve("inproc://") as served:
        prompts = rl_tq.PerGroup([torch.arange(50_000)])
        first = served.put({"x": torch.zeros(4), "prompt": prompts}, partition="p", tags=[{"group_id": 0}] * 4)
        later = served.put({"x": torch.ones(2), "prompt": rl_tq.PerGroup()}, partition="p", tags=[{"group_id": 0}] * 2)
        served.clear(first.reorder([0, 1, 2]))
        served.clear(first.reorder([3]))
        assert [len(row) for row in served.get(later)["prompt"].unbind()] == [50_000] * 2
        assert len(served.host.memory.extents) == 2


@pytest.mark.process
def test_memory_that_stays_for_another_put_is_not_copied(monkeypatch):
    """It would be there twice."""
    copies = []
    write = HeapMemory.write
    monkeypatch.setattr(HeapMemory, "write", lambda *arguments: copies.append(1) or write(*arguments))
    with rl_tq.serve("inproc://") as served:
        prompts = rl_tq.PerGroup([torch.arange(50_000)])
        data = {"x": torch.zeros(8, 20_000), "prompt": prompts}
        first = served.put(data, partition="p", tags=[{"group_id": 0}] * 8)
        served.put({"x": torch.ones(1, 20_000), "prompt": rl_tq.PerGroup()}, partition="p", tags=[{"group_id": 0}])
        alone = served.put({"x": torch.zeros(8, 20_000)}, partition="q")
        for meta in (first, alone):
            served.clear(meta.reorder(range(1, 8)))
        until(lambda: served.stats()["partitions"]["q"]["bytes"] < 200_000)  # the compactor came by
        assert len(copies) == 1


@pytest.mark.process
def test_rows_are_cleared_and_read_while_others_move():
    with rl_tq.serve("inproc://", timeout_s=60.0) as served:

        def work(seed: int) -> None:
            order = random.Random(seed)
            for _ in range(20):
                meta = served.put(rows(range(8)), partition=f"p{seed}")
                left = list(range(8))
                while left:
                    gone = left.pop(order.randrange(len(left)))
                    served.clear(meta.reorder([gone]))
                    if left:
                        assert served.get(meta.reorder(left))["a"][:, 7].tolist() == left

        with ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(work, seed) for seed in range(3)]:
                done.result(60)
        assert not served.host.memory.extents


@pytest.mark.slow  # every client is an agent of UCX, which takes its time to start
def test_what_was_written_anew_is_read_by_nixl():
    pytest.importorskip("nixl")
    with (
        rl_tq.serve("nixl://127.0.0.1:0", timeout_s=60.0) as served,
        rl_tq.connect(served.address, timeout_s=60.0) as client,
    ):
        meta = client.put(rows(range(32)), partition="p")
        assert client.get(meta.reorder([7]))["a"][:, 5].tolist() == [7]
        [number] = served.host.memory.extents
        client.clear(meta.reorder([i for i in range(32) if i not in (3, 30)]))
        until(lambda: number not in served.host.memory.extents)
        assert client.get(meta.reorder([30, 3]))["a"][:, 5].tolist() == [30, 3]
