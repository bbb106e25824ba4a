"""Snapshots of a queue that goes on: a cut at one moment, whole or not there, and a queue again in any storage."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import rl_tq
from rl_tq.memory.arena import PACKED_BYTES

LARGE = PACKED_BYTES // 4 + 1024
STORAGES = ["inproc://", "shm://", "tcp://127.0.0.1:0", "zmq://127.0.0.1:0", "file"]


def serve(storage: str, where: Path, **given) -> rl_tq.TransferQueue:
    return rl_tq.serve(f"file://{where}" if storage == "file" else storage, timeout_s=60.0, **given)


@pytest.mark.process
@pytest.mark.parametrize("storage", STORAGES)
def test_a_snapshot_is_a_queue_again(storage, tmp_path):
    """Values of every size, who consumed what, and references made before; those of rows put later are unknown."""
    with serve(storage, tmp_path / "one") as queue:
        queue.configure("p", max_attempts=7)
        queue.advance("p", 5)
        rows = {"a": torch.arange(6), "r": [torch.full((i,), i) for i in range(6)], "t": list("abcdef")}
        meta = queue.put(
            {**rows, "g": rl_tq.PerGroup(["x", "y"])}, partition="p", tags=[{"group_id": i // 3} for i in range(6)]
        )
        big = queue.put({"big": torch.arange(2.0 * LARGE).view(2, -1)}, partition="p", sample_ids=meta.reorder([1, 2]))
        other = queue.put({"a": torch.arange(3)}, partition="s")
        claim = {"partition": "p", "columns": ["a"], "task": "t", "batch_size": 1}
        queue.ack(queue.get_meta(**claim), step=3)
        queue.get_meta(**claim)  # of this client, which the next server does not know
        leased = queue.get_meta(**claim, lease_s=600.0)
        queue.snapshot(tmp_path / "snap")
        later = queue.put({"a": torch.arange(6, 8)}, partition="p")
        queue.ack(leased, step=4)
        queue.clear(meta.reorder([5]))
    for target in (storage, "shm://" if storage == "inproc://" else "inproc://"):
        with serve(target, tmp_path / f"two{target[:3]}", snapshot=tmp_path / "snap") as queue:
            stats = queue.stats()
            assert stats["partitions"]["p"]["rows"] == 6
            assert stats["partitions"]["p"]["options"]["max_attempts"] == 7
            assert stats["partitions"]["p"]["weight_version"] == 5
            assert stats["partitions"]["s"]["rows"] == 3
            assert stats["partitions"]["p"]["tasks"]["t"] == {"leased": 1, "acked": 1, "dead": 0, "returns": 0}
            batch = queue.get(meta.reorder([5, 0, 1, 2, 3, 4]))
            assert batch["a"].tolist() == [5, 0, 1, 2, 3, 4]
            assert [len(row) for row in batch["r"].unbind()] == [5, 0, 1, 2, 3, 4]
            assert batch["t"].tolist() == list("fabcde")
            assert batch["g"].tolist() == list("yxxxyy")
            assert torch.equal(queue.get(big)["big"].flatten(), torch.arange(2.0 * LARGE))
            assert queue.get(other)["a"].tolist() == [0, 1, 2]
            with pytest.raises(rl_tq.StaleReferenceError):
                queue.get(later)
            again = queue.get_meta(**{**claim, "batch_size": 4})
            assert again.rows == tuple(meta.rows[i] for i in (1, 3, 4, 5))
            queue.ack(leased, step=4)
            assert queue.put({"a": torch.tensor([9])}, partition="p").rows[0] > max(meta.rows)


@pytest.mark.process
@pytest.mark.parametrize("storage", ["shm://", "tcp://127.0.0.1:0"])
def test_nothing_is_lost_or_duplicated_in_a_busy_queue(storage, tmp_path):
    """Producers number their rows and consumers ack them in order, so that a cut shows a beginning of each."""
    stop = threading.Event()
    failures: list[Exception] = []

    def work(target, *given):
        def run() -> None:
            try:
                with rl_tq.connect(queue.address, timeout_s=60.0) as client:
                    while not stop.is_set():
                        target(client, *given)
            except Exception as error:  # noqa: BLE001 - told below
                failures.append(error)

        return threading.Thread(target=run)

    sent = [0, 0]
    acked: list[list[float]] = [[], []]

    def produce(client: rl_tq.TransferQueue, which: int) -> None:
        n = 1 + sent[which] % 5
        numbers = torch.arange(sent[which], sent[which] + n)
        width = 60_000 if sent[which] % 7 == 0 else 3
        client.put(
            {"n": numbers, "by": torch.full((n,), which), "x": [numbers[:1].float().expand(width)] * n},
            partition=f"p{which}", tags=[{"n": int(i)} for i in numbers],
        )  # fmt: skip
        sent[which] += n

    def consume(client: rl_tq.TransferQueue, which: int) -> None:
        try:
            meta = client.get_meta(partition=f"p{which}", columns=["n"], batch_size=2, task="t", timeout_s=0.2)
        except rl_tq.WaitTimeoutError:
            return
        numbers = client.get(meta, ["n"])["n"].tolist()
        client.ack(meta, step=1)
        acked[which] += numbers
        if len(acked[which]) % 8 == 0:
            client.clear(meta)

    with serve(storage, tmp_path) as queue:
        threads = [work(target, which) for target in (produce, consume) for which in (0, 1)]
        for thread in threads:
            thread.start()
        cuts: list[tuple[list[int], list[int], list[int], list[int]]] = []
        try:
            for i in range(4):
                time.sleep(0.1)
                before = ([*sent], [len(each) for each in acked])
                queue.snapshot(tmp_path / f"snap{i}")
                cuts.append((*before, [*sent], [len(each) for each in acked]))
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
    assert not failures
    for i, (sent_before, acked_before, sent_after, acked_after) in enumerate(cuts):
        with rl_tq.serve("inproc://", timeout_s=60.0, snapshot=tmp_path / f"snap{i}") as queue:
            for which in (0, 1):
                stats = queue.stats()["partitions"].get(f"p{which}")
                if stats is None:
                    assert sent_before[which] == 0
                    continue
                num_acked = stats["tasks"].get("t", {"acked": 0})["acked"]
                rows = _claim_all(queue, f"p{which}")
                # What was acked is a beginning of what was sent, what is left is the rest of it: each row once.
                assert [number for number, _, _ in rows] == list(range(num_acked, num_acked + len(rows)))
                assert sent_before[which] <= num_acked + len(rows) <= sent_after[which] + 5
                assert acked_before[which] <= num_acked <= acked_after[which] + 2
                for number, tag, x in rows:
                    assert tag == {"n": number}
                    assert x.unique().numel() == 1
                    assert 0 <= number - x[0].item() < 5


def _claim_all(queue: rl_tq.TransferQueue, partition: str) -> list[tuple]:
    """Number, tags and `x` of the rows that are free, as they come."""
    found: list[tuple] = []
    try:
        while True:
            meta = queue.get_meta(partition=partition, columns=["n", "x"], batch_size=1, task="t", timeout_s=0.0)
            batch = queue.get(meta)
            found.append((batch["n"].item(), meta.tags[0], batch["x"].unbind()[0]))
    except rl_tq.WaitTimeoutError:
        return found


SNAPSHOTTER = """
import sys, time, torch, rl_tq
from rl_tq.durability import _File
queue = rl_tq.serve("shm://")
queue.put({"a": torch.arange(3)}, partition="p")
queue.put({"a": torch.arange(3, 5)}, partition="p")
queue.snapshot(sys.argv[1])
print("first", flush=True)
sys.stdin.readline()
queue.put({"a": torch.arange(9)}, partition="q")
append, times = _File.append, []
def stop_in_the_middle(file, memory):
    times.append(1)
    if len(times) == 3:
        print("second", flush=True)
        time.sleep(600)
    return append(file, memory)
_File.append = stop_in_the_middle
queue.snapshot(sys.argv[1])
"""


@pytest.mark.process
def test_a_killed_writer_leaves_the_previous_snapshot(tmp_path):
    snap = tmp_path / "snap"
    process = subprocess.Popen(
        [sys.executable, "-c", SNAPSHOTTER, str(snap)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        whole = set(snap.iterdir())
        assert process.stdin is not None
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "second\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert len(set(snap.iterdir()) - whole) == 1
    for _ in range(2):
        with rl_tq.serve("shm://", timeout_s=60.0, snapshot=snap) as queue:
            assert list(queue.stats()["partitions"]) == ["p"]
            meta = queue.get_meta(partition="p", columns=["a"], batch_size=5, task="t")
            assert queue.get(meta)["a"].tolist() == [0, 1, 2, 3, 4]
            queue.ack(meta)
            queue.clear("p")
    with rl_tq.serve("shm://", timeout_s=60.0) as queue:
        queue.put({"a": torch.arange(2)}, partition="q")
        queue.snapshot(snap)
    assert len(list(snap.glob("*.segment"))) == 1  # what was written by half is gone, and the one before
    with rl_tq.serve(f"file://{snap}", timeout_s=60.0) as queue:  # a snapshot is such a directory
        assert list(queue.stats()["partitions"]) == ["q"]
        with pytest.raises(rl_tq.AddressError, match="served by another process"):
            queue.snapshot(snap)
        with pytest.raises(rl_tq.AddressError, match="served by another process"):
            rl_tq.serve("shm://", snapshot=snap)


@pytest.mark.process
def test_what_is_no_snapshot_and_no_empty_directory_is_refused(tmp_path):
    for storage in STORAGES:
        with pytest.raises(rl_tq.AddressError, match="holds no snapshot"):
            serve(storage, tmp_path / "new", snapshot=tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with serve("file", tmp_path / "used") as queue:
        queue.put({"a": torch.arange(2)}, partition="p")
        queue.snapshot(tmp_path / "snap")
    with pytest.raises(rl_tq.AddressError, match="holds a queue already"):
        serve("file", tmp_path / "used", snapshot=tmp_path / "snap")
    with serve("file", tmp_path / "used") as queue:
        assert queue.stats()["rows"] == 2
    [segment] = (tmp_path / "snap").glob("*.segment")
    segment.write_bytes(segment.read_bytes()[:100])
    with pytest.raises(rl_tq.AddressError, match="the snapshot was damaged"):
        rl_tq.serve("inproc://", snapshot=tmp_path / "snap")


@pytest.mark.process
def test_a_file_system_that_is_full_keeps_the_snapshot_before(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        with rl_tq.serve("inproc://", timeout_s=20.0) as queue:
            queue.put({"a": torch.arange(3)}, partition="p")
            queue.snapshot(small / "snap")
            before = sorted((small / "snap").iterdir())
            queue.put({"a": torch.zeros(1 << 20, 3)}, partition="q")
            with pytest.raises(rl_tq.QueueFullError, match="could not be written.*what was there before is as it was"):
                queue.snapshot(small / "snap")
            assert sorted((small / "snap").iterdir()) == before
        with rl_tq.serve("inproc://", snapshot=small / "snap") as queue:
            assert queue.stats()["rows"] == 3
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_snapshot_is_on_stable_storage_before_it_is_said_to_be(tmp_path, monkeypatch):
    """Values, journal and directory: a machine that loses power after it loses nothing of it."""
    synced = []
    fsync = os.fsync

    def noted(fd):
        synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    with rl_tq.serve("inproc://") as queue:
        queue.put({"a": torch.zeros(2, LARGE)}, partition="p")
        queue.put({"b": torch.zeros(2)}, partition="q")
        queue.snapshot(tmp_path / "one")
    segments = {path.name for path in (tmp_path / "one").glob("*.segment")}
    assert segments
    assert segments | {"journal.partial", "one"} <= set(synced)
    assert synced.index("one") > synced.index("journal.partial") > max(synced.index(name) for name in segments)


@pytest.mark.parametrize("storage", ["inproc://", "shm://"])
def test_numbers_cleared_before_a_snapshot_are_not_reused(storage, tmp_path):
    """Else a reference to a cleared row would read another, and an old lease would ack it."""
    with serve(storage, tmp_path) as queue:
        meta = queue.put({"a": torch.arange(3)}, partition="p")
        claimed = queue.get_meta(partition="p", columns=["a"], batch_size=3, task="t")
        queue.clear(meta.reorder([1, 2]))
        queue.snapshot(tmp_path / "one")
    with serve(storage, tmp_path, snapshot=tmp_path / "one") as queue:
        later = queue.put({"a": torch.arange(7, 9)}, partition="p")
        assert not set(later.rows) & set(meta.rows)
        with pytest.raises(rl_tq.StaleReferenceError):
            queue.get(meta)
        again = queue.get_meta(partition="p", columns=["a"], batch_size=3, task="t")
        assert not set(again.leases) & set(claimed.leases)
        other = queue.put({"a": torch.zeros(1)}, partition="new")
        assert other.generation > meta.generation
