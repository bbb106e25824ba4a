"""One queue at several addresses: what is put at one is claimed, read and acked at another, and one close ends all."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import rl_tq
from rl_tq.durability import Journal
from rl_tq.testing._served import until

PRODUCER = """
import sys, torch, rl_tq
with rl_tq.connect(sys.argv[1], timeout_s=60.0) as queue:
    first = int(sys.argv[2])
    for i in range(first, first + 40):
        size = 400_000 if i % 10 == 0 else 50
        data = {"i": torch.tensor([i]), "r": [torch.full((size,), i)], "j": [{"of": i}]}
        queue.put(data, partition="p", tags=[{"group_id": i // 4}])
"""
CONSUMER = """
import sys, rl_tq
with rl_tq.connect(sys.argv[1], timeout_s=60.0) as queue:
    for _ in range(20):
        meta = queue.get_meta(partition="p", columns=["i", "r", "j"], batch_size=2, task="t")
        batch = queue.get(meta)
        for i, row, info in zip(batch["i"].tolist(), batch["r"].unbind(), batch["j"].tolist()):
            assert row.unique().tolist() == [i] and info == {"of": i}
            print(i)
        queue.ack(meta)
        queue.clear(meta)
"""


@pytest.mark.promise("One queue is served at several addresses")
@pytest.mark.process
def test_shm_producers_and_tcp_consumers_share_one_queue():
    with rl_tq.serve("shm://", timeout_s=60.0, also=["tcp://127.0.0.1:0"]) as queue:
        shm, tcp = queue.addresses
        assert shm == queue.address
        commands = [[PRODUCER, shm, "0"], [PRODUCER, shm, "40"], [CONSUMER, tcp], [CONSUMER, tcp]]
        started = [
            subprocess.Popen([sys.executable, "-c", *command], stdout=subprocess.PIPE, text=True)
            for command in commands
        ]
        said = [process.communicate(timeout=120)[0] for process in started]
        assert [process.returncode for process in started] == [0, 0, 0, 0]
        assert sorted(map(int, "".join(said).split())) == list(range(80))
        stats = queue.stats()
        assert (stats["rows"], stats["extents"], stats["partitions"]["p"]["tasks"]["t"]["acked"]) == (0, 0, 80)
        assert stats["clients"] == [stats["server_pid"]]


@pytest.mark.process
def test_the_sleeping_front_wakes_for_another_s_deadline():
    """A lease taken by a thread of the server expires for who waits over shared memory, whom nothing else wakes."""
    claim = {"partition": "p", "columns": ["a"], "task": "t"}
    with (
        rl_tq.serve("shm://", timeout_s=60.0, also=["inproc://"]) as queue,
        rl_tq.connect(queue.addresses[1], timeout_s=60.0) as inside,
        ThreadPoolExecutor(1) as pool,
    ):
        inside.put({"a": torch.zeros(1)}, partition="p")
        waiting = pool.submit(queue.get_meta, **claim, batch_size=2)
        until(lambda: _waiters(inside) == 1)
        held = inside.get_meta(**claim, batch_size=1, lease_s=0.5)
        inside.put({"a": torch.zeros(1)}, partition="p")
        both = waiting.result(15)
        assert held.rows[0] in both.rows
        with pytest.raises(rl_tq.LeaseLostError):
            inside.ack(held)


@pytest.mark.process
def test_memory_seen_by_a_tcp_reader_is_reused_after_a_clear():
    with (
        rl_tq.serve("shm://", timeout_s=60.0, also=["tcp://127.0.0.1:0"]) as queue,
        rl_tq.connect(queue.addresses[1], timeout_s=60.0) as remote,
    ):
        for i in range(8):
            for client in (queue, remote):
                meta = client.put({"x": torch.full((2, 1_000_000), i)}, partition="p")
                assert remote.get(meta)["x"].unique().tolist() == [i]
                assert queue.get(meta)["x"].unique().tolist() == [i]
                client.clear(meta)
        until(lambda: queue.stats()["segments"] == 0)
        assert queue.stats()["shared_bytes"] < 16 * 16_000_000 / 2


@pytest.mark.process
def test_a_close_ends_the_queue_at_every_address():
    queue = rl_tq.serve("shm://", timeout_s=20.0, also=["tcp://127.0.0.1:0", "inproc://"])
    clients = [rl_tq.connect(address, timeout_s=20.0) for address in queue.addresses]
    failures = []

    def wait(client):
        with pytest.raises(rl_tq.ServerLostError):
            client.get_meta(partition="p", columns=["a"], batch_size=1, task="t")
        failures.append(client)

    threads = [threading.Thread(target=wait, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    until(lambda: queue.stats()["waiters_elsewhere"].get("p") == 3)
    queue.close()
    for thread in threads:
        thread.join(20)
    assert len(failures) == 3
    for client in clients:
        client.close()
        with pytest.raises(rl_tq.ServerLostError):
            rl_tq.connect(client.address, timeout_s=20.0)


@pytest.mark.process
def test_rows_of_a_directory_are_served_again_whoever_put_them(tmp_path):
    """A put over TCP is in a file of the directory, and in its journal before it is answered."""
    with (
        rl_tq.serve(f"file://{tmp_path}/queue", timeout_s=20.0, also=["tcp://127.0.0.1:0"]) as queue,
        rl_tq.connect(queue.addresses[1], timeout_s=20.0) as remote,
    ):
        meta = remote.put({"x": torch.arange(5), "big": torch.ones(5, 300_000)}, partition="p")
        claimed = remote.get_meta(partition="p", columns=["x"], batch_size=2, task="t")
        remote.ack(claimed, step=3)
        remote.snapshot(tmp_path / "copy")
    for address, options in ((f"file://{tmp_path}/queue", {}), ("tcp://127.0.0.1:0", {"snapshot": tmp_path / "copy"})):
        with rl_tq.serve(address, timeout_s=20.0, **options) as queue:
            batch = queue.get(meta)
            assert batch["x"].tolist() == [0, 1, 2, 3, 4]
            assert batch["big"].unique().tolist() == [1.0]
            assert queue.restore("p", 2).num_returned == 2


@pytest.mark.process
def test_nobody_is_told_what_the_journal_does_not_have_yet(tmp_path, monkeypatch):
    """A put, and the claim of another client that it settles; at either address."""
    append = Journal.append
    events = []

    def slow(self, records):
        held = list(records)
        time.sleep(0.3)
        append(self, held)
        events.append("written")

    def tell(work, *arguments, **options):
        work(*arguments, **options)
        events.append("told")

    with (
        rl_tq.serve(f"file://{tmp_path}/queue", timeout_s=20.0, also=["tcp://127.0.0.1:0"]) as queue,
        rl_tq.connect(queue.addresses[1], timeout_s=20.0) as remote,
    ):
        claim = {"partition": "p", "columns": ["a"], "batch_size": 1, "task": "t"}
        monkeypatch.setattr(Journal, "append", slow)
        for client in (queue, remote):
            waiter = threading.Thread(target=tell, args=(remote.get_meta,), kwargs=claim)
            waiter.start()
            until(lambda: any(queue.stats()["waiters_elsewhere"].values()) or _waiters(queue) == 1)
            events.clear()
            tell(client.put, {"a": torch.ones(1)}, partition="p")
            waiter.join(20)
            assert events[0] == "written", (client, events)
            assert events.count("told") == 2
        monkeypatch.undo()


def _waiters(queue):
    return queue.stats()["partitions"].get("p", {"waiters": 0})["waiters"]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("tcp://127.0.0.1:0", "shm://", "cannot be served at shm://, too"),
        ("shm://", "nothing://", "no storage 'nothing'"),
        ("shm://", "tcp://nowhere", "write tcp://HOST:PORT"),
    ],
)
def test_an_address_that_cannot_be_added_ends_what_was_served(first, second, message):
    threads = threading.active_count()
    with pytest.raises((rl_tq.AddressError, rl_tq.StorageError), match=message):
        rl_tq.serve(first, also=[second])
    until(lambda: threading.active_count() <= threads)
