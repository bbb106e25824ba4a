"""What fails while a queue is used, and is to be told instead of felt.

Here: a full arena, a dead compactor, a producer that dies while it sends over TCP. Elsewhere: one that dies while it
writes to shared memory, a dead or stopped server (`storage`), a consumer that dies with a lease
(`test_known_failures`), a reader that dies (`server`), whoever dies while it writes a snapshot
(`durability`).
"""

import contextlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import rl_tq
from rl_bench.waiting import until
from rl_tq.server.host import Compactor

pytestmark = pytest.mark.process


@pytest.fixture
def small(tmp_path: Path):
    """A file system of 16 MB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("num_columns", [50_000, 800_000], ids=["common segments", "segments of their own"])
def test_a_full_arena_is_an_error_and_the_queue_goes_on(small: Path, num_columns: int):
    """Not a SIGBUS, which ends the process without a word. What was put stays, and room that is made is used."""
    with contextlib.ExitStack() as stack:
        queue = stack.enter_context(rl_tq.serve(f"file://{small}/queue", timeout_s=20.0))
        metas: list[rl_tq.BatchMeta] = []

        def fill() -> None:
            while len(metas) < 200:
                value = float(len(metas))
                metas.append(queue.put({"a": torch.full((2, num_columns), value)}, partition=str(len(metas))))

        with pytest.raises(rl_tq.QueueFullError, match=r"file system of .*queue has no room for \d+ bytes more"):
            fill()
        assert 2 <= len(metas) < 200
        for i, meta in enumerate(metas):
            assert queue.get(meta)["a"].unique().tolist() == [float(i)]
        for meta in metas:
            queue.clear(meta.partition)
        deadline = time.monotonic() + 30.0
        again = None
        while again is None and time.monotonic() < deadline:  # until every reader let go
            with contextlib.suppress(rl_tq.QueueFullError):
                again = queue.put({"a": torch.ones(2, num_columns)}, partition="again")
        assert again is not None
        assert queue.get(again)["a"].unique().tolist() == [1.0]


@pytest.mark.parametrize(("stored", "refused"), [(1, 20 << 20), (12 << 20, (4 << 20) - 4096)])
def test_a_refused_put_gives_back_the_room_that_it_took(small: Path, stored: int, refused: int):
    """Soon, and not only when memory that was kept for the next put is given up."""
    with rl_tq.serve(f"file://{small}/queue", timeout_s=20.0) as queue:
        queue.put({"a": torch.zeros((1, stored), dtype=torch.uint8)}, partition="a")
        room = shutil.disk_usage(small).free
        with pytest.raises(rl_tq.QueueFullError):
            queue.put({"a": torch.zeros((1, refused), dtype=torch.uint8)}, partition="b")
        until(lambda: shutil.disk_usage(small).free == room, timeout_s=5.0)
        assert len(list(small.glob("queue/*.segment"))) == 1


def test_a_full_arena_ends_no_server_and_can_be_served_again(small: Path, monkeypatch):
    """The journal is not made shorter where there is no room for another, and keeps room for who takes it up."""
    monkeypatch.setattr("rl_tq.durability._COMPACT_BYTES", 10_000)
    address = f"file://{small}/queue"
    with rl_tq.serve(address, timeout_s=20.0) as queue:
        meta = queue.put({"a": torch.arange(500)}, partition="p", tags=[{"text": "x" * 100}] * 500)
        with (small / "other").open("wb", buffering=0) as other, contextlib.suppress(OSError):
            while True:
                other.write(bytes(4096))
        for step in range(300):
            queue.ack(queue.get_meta(partition="p", columns=["a"], batch_size=1, task="t"), step=step)
        assert not (small / "queue" / "journal.partial").exists()
    with rl_tq.serve(address, timeout_s=20.0) as queue:
        assert queue.stats()["partitions"]["p"]["tasks"]["t"]["acked"] == 300
        assert queue.get(meta)["a"].tolist() == [*range(500)]


@pytest.mark.parametrize("method", ["step", "_move"], ids=["between copies", "in a copy"])
def test_a_compactor_that_fails_goes_on_and_nothing_is_lost(method, monkeypatch, caplog):
    """Readers and producers need no compactor; it tries again."""
    work = getattr(Compactor, method)
    failed: list[Compactor] = []

    def fail_once(compactor, *arguments):
        if not failed:
            failed.append(compactor)
            raise OSError("a test has no memory")
        return work(compactor, *arguments)

    monkeypatch.setattr(Compactor, method, fail_once)
    with rl_tq.serve("shm://", timeout_s=60.0) as queue:
        meta = queue.put({"a": torch.arange(64.0)[:, None].expand(64, 10_000)}, partition="p")
        queue.clear(meta.reorder(range(2, 64)))
        left = meta.reorder([1, 0])
        deadline = time.monotonic() + 60.0
        while queue.stats()["partitions"]["p"]["bytes"] > 3 * 40_000:
            assert queue.get(left)["a"][:, 0].tolist() == [1.0, 0.0]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(failed) == 1
        assert queue.get(left)["a"][:, -1].tolist() == [1.0, 0.0]
        assert queue.stats()["clients"] == [queue.stats()["server_pid"]]
        claimed = queue.get_meta(partition="p", columns=["a"], batch_size=2, task="t")
        assert claimed.rows == left.reorder([1, 0]).rows
    assert "was not compacted: a test has no memory" in caplog.text


SENDER = """
import sys, time, torch, rl_tq
from rl_tq.protocol import framing
queue = rl_tq.connect(sys.argv[1], timeout_s=60.0)
queue.put({"a": torch.arange(3)}, partition="p")
class Half:
    def __init__(self, connection):
        self.connection = connection
    def sendall(self, data, *flags):
        if len(data) > 1_000_000:
            self.connection.sendall(data[: len(data) // 2])
            print("sending", flush=True)
            time.sleep(600)
        self.connection.sendall(data, *flags)
send = framing.send
framing.send = lambda connection, message, payload=(): send(Half(connection), message, payload)
queue.put({"a": torch.ones(2, 1_000_000)}, partition="q")
"""


def test_a_producer_killed_while_sending_leaves_only_its_puts():
    with rl_tq.serve("tcp://127.0.0.1:0", timeout_s=60.0) as queue:
        producer = subprocess.Popen(
            [sys.executable, "-c", SENDER, queue.address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert producer.stdout is not None
            assert producer.stdout.readline() == "sending\n"
        finally:
            producer.kill()
            producer.communicate()
        meta = queue.get_meta(partition="p", columns=["a"], batch_size=3, task="t")
        assert queue.get(meta)["a"].tolist() == [0, 1, 2]
        assert list(queue.stats()["partitions"]) == ["p"]
        assert queue.stats()["extents"] == 1
        with rl_tq.connect(queue.address, timeout_s=60.0) as other:
            other.put({"a": torch.ones(2, 1_000_000)}, partition="q")
            assert queue.stats()["rows"] == 5
