"""Partitions that spill: what does not fit into memory lies in files, and nobody who reads can tell."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import rl_tq
from rl_tq.types import PartitionOptions

ROW = 50_000
"""float32 per row: 200 kB, so that several puts share a segment."""
LARGE = 1_500_000
"""6 MB: more than puts that share a segment have."""


def address(storage: str, tmp_path: Path) -> str:
    return (
        f"file://{tmp_path}/queue" if storage == "file" else {"tcp": "tcp://127.0.0.1:0"}.get(storage, f"{storage}://")
    )


def values(first: int, rows: int, width: int) -> torch.Tensor:
    return torch.arange(first, first + rows)[:, None].expand(rows, width).float()


@pytest.mark.parametrize("width", [ROW, LARGE], ids=["common segments", "segments of their own"])
@pytest.mark.parametrize("storage", ["inproc", "shm", "file", "tcp"])
def test_what_does_not_fit_goes_to_files_and_is_read_as_ever(storage, width, tmp_path):
    spill = tmp_path / "spill"
    nbytes = 4 * width + 4096
    with rl_tq.serve(address(storage, tmp_path), timeout_s=20.0) as queue, rl_tq.connect(queue.address) as peer:
        queue.configure("p", on_full="spill", max_bytes=2 * nbytes, spill_directory=str(spill), spill_bytes=3 * nbytes)
        metas = [peer.put({"a": values(i, 1, width)}, partition="p") for i in range(5)]
        stats = queue.stats()
        assert stats["spilled_bytes"] == stats["partitions"]["p"]["spilled_bytes"] > 3 * 4 * width
        assert 2 * 4 * width < stats["partitions"]["p"]["bytes"] <= 2 * nbytes
        assert spill.is_dir()
        assert bool(list(spill.iterdir())) == (storage == "file")
        whole = rl_tq.BatchMeta.concat(metas).reorder([4, 0, 3, 1, 2])
        for client in (queue, peer, peer):
            assert torch.equal(client.get(whole)["a"], values(0, 5, width)[[4, 0, 3, 1, 2]])
        with pytest.raises(rl_tq.WaitTimeoutError, match=rf"of {3 * nbytes} in files"):
            peer.put({"a": values(5, 1, width)}, partition="p", timeout_s=0.1)
        queue.clear(metas[4])
        peer.put({"a": values(5, 1, width)}, partition="p")
        late = peer.put({"b": values(9, 2, width)}, partition="p", sample_ids=rl_tq.BatchMeta.concat(metas[:2]))
        assert torch.equal(queue.get(late)["b"], values(9, 2, width))  # columns of rows that exist never wait
        queue.clear("p")
        assert queue.stats()["spilled_bytes"] == 0


def test_a_file_system_that_is_full_is_an_error_and_the_queue_goes_on(small_spill, tmp_path):
    for storage in ("shm", "inproc"):
        with rl_tq.serve(f"{storage}://", timeout_s=20.0) as queue:
            queue.configure(
                "p", on_full="spill", max_bytes=1_000_000, spill_directory=str(small_spill), spill_bytes=1 << 30
            )
            kept = queue.put({"a": values(0, 1, ROW)}, partition="p")
            spilled = queue.put({"a": values(1, 20, ROW)}, partition="p")
            with pytest.raises(rl_tq.QueueFullError, match=f"file system of {small_spill} has no room"):
                queue.put({"a": values(9, 80, ROW)}, partition="p")
            assert queue.get(spilled)["a"][:, 0].tolist() == list(range(1, 21))
            assert torch.equal(queue.get(kept)["a"], values(0, 1, ROW))
            assert queue.stats()["rows"] == 21
            (tmp_path / "none").write_text("a file")
            queue.configure(
                "q", on_full="spill", max_bytes=1, spill_directory=f"{tmp_path}/none/such", spill_bytes=1 << 30
            )
            with pytest.raises(rl_tq.QueueFullError, match="no file can be made in the spill_directory"):
                queue.put({"a": values(0, 1, ROW)}, partition="q")


@pytest.fixture
def small_spill(tmp_path: Path):
    """A file system of 8 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_full": "spill"}, "needs all of"),
        ({"on_full": "spill", "max_bytes": 1, "spill_bytes": 1}, r"\['spill_directory'\] are not given"),
        ({"spill_bytes": 1}, "mean nothing with on_full 'block'"),
        ({"on_full": "spill", "max_bytes": 1, "spill_bytes": 1, "spill_directory": "here"}, "absolute"),
        ({"on_full": "spill", "max_bytes": 1, "spill_bytes": 0, "spill_directory": "/x"}, "spill_bytes is 0"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        PartitionOptions(**options)


def test_a_put_is_not_divided_and_a_credit_is_for_both(tmp_path):
    with rl_tq.serve("inproc://", timeout_s=5.0) as queue:
        queue.configure("p", on_full="spill", max_bytes=610_000, spill_directory=str(tmp_path), spill_bytes=300_000)
        with pytest.raises(rl_tq.QueueFullError, match="can never enter partition 'p', which takes 610000"):
            queue.put({"a": values(0, 4, ROW)}, partition="p")
        credit = queue.admit(partition="p", num_rows=4, num_bytes=850_000)
        with pytest.raises(rl_tq.WaitTimeoutError):
            queue.put({"a": values(0, 1, ROW)}, partition="p", timeout_s=0.1)
        for i in range(4):
            queue.put({"a": values(i, 1, ROW)}, partition="p", credit=credit)
        assert queue.stats()["partitions"]["p"]["spilled_bytes"] > 4 * ROW
        # Too much for files, and memory is taken: it waits for memory.
        queue.clear("p")
        first = queue.put({"a": values(0, 2, ROW)}, partition="p")
        with pytest.raises(rl_tq.WaitTimeoutError):
            queue.put({"a": values(0, 2, ROW)}, partition="p", timeout_s=0.1)
        queue.clear(first)
        queue.put({"a": values(0, 2, ROW)}, partition="p")
        assert queue.stats()["spilled_bytes"] == 0


def test_what_is_left_of_a_spilled_segment_is_copied_to_a_file(tmp_path, monkeypatch):
    for module in ("memory.arena", "client.shm"):
        monkeypatch.setattr(f"rl_tq.{module}.RESERVE_S", 0.2)
    with rl_tq.serve(f"file://{tmp_path}/queue", timeout_s=20.0) as queue:
        queue.configure("p", on_full="spill", max_bytes=1, spill_directory=f"{tmp_path}/spill", spill_bytes=1 << 30)
        meta = queue.put({"a": values(0, 15, ROW)}, partition="p")
        before = set(Path(f"{tmp_path}/spill").iterdir())
        queue.clear(meta.reorder(range(1, 15)))
        deadline = time.monotonic() + 60.0
        while queue.stats()["spilled_bytes"] > 2 * 4 * ROW or before & set(Path(f"{tmp_path}/spill").iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert queue.stats()["bytes"] == 0
        assert torch.equal(queue.get(meta.reorder([0]))["a"], values(0, 1, ROW))
    with rl_tq.serve(f"file://{tmp_path}/queue", timeout_s=20.0) as queue:
        assert queue.stats()["spilled_bytes"] > 0
        assert torch.equal(queue.get(meta.reorder([0]))["a"], values(0, 1, ROW))


OWNER = """
import sys, time, torch, rl_tq
from rl_tq.columns.extent import Layout
queue = rl_tq.serve(sys.argv[1]) if sys.argv[3] == "serve" else rl_tq.connect(sys.argv[1])
queue.configure("p", on_full="spill", max_bytes=1_000_000, spill_directory=sys.argv[2], spill_bytes=1 << 30)
row = lambda i: torch.full((1, 150_000), float(i))
for i in range(5):
    queue.put({"a": row(i)}, partition="p")
write, times = Layout.write, []
def stop_in_the_middle(layout, memory):
    times.append(1)
    if len(times) == 2:  # the first is into memory, the second into the file
        memory[: len(memory) // 2] = 1
        print("spilling", flush=True)
        time.sleep(600)
    write(layout, memory)
Layout.write = stop_in_the_middle
queue.put({"a": row(5)}, partition="p")
"""


@pytest.mark.parametrize("storage", ["shm", "file"])
def test_whoever_is_killed_while_it_spills_leaves_what_it_put_and_nothing_else(storage, tmp_path):
    """With `shm` a producer; with `file` the process that serves and puts, after which another takes the directory."""
    spill = tmp_path / "spill"
    queue = rl_tq.serve("shm://", timeout_s=60.0) if storage == "shm" else None
    where = queue.address if queue else f"file://{tmp_path}/queue"
    command = [sys.executable, "-c", OWNER, where, str(spill), "connect" if queue else "serve"]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "spilling\n"
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    if queue is None:
        assert len(list(spill.iterdir())) == 1
        (spill / "somebody-elses.segment").write_text("not ours")
        queue = rl_tq.serve(where, timeout_s=60.0)
        assert len(list(spill.iterdir())) == 2
    else:
        assert not list(spill.iterdir())
    with queue:
        assert queue.stats()["spilled_bytes"] > 4 * 4 * 150_000
        meta = queue.get_meta(partition="p", columns=["a"], batch_size=5, task="t")
        assert queue.get(meta)["a"][:, 0].tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(rl_tq.WaitTimeoutError):
            queue.get_meta(partition="p", columns=["a"], batch_size=1, task="t", timeout_s=0.0)
        again = queue.put({"a": torch.full((1, 150_000), 7.0)}, partition="p")
        assert queue.get(again)["a"].unique().tolist() == [7.0]
        queue.clear("p")
        assert queue.stats()["spilled_bytes"] == 0
