"""What `file` promises when the server dies, whole processes with it, or its journal is damaged."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rl_tq
from rl_bench.waiting import until
from rl_tq.durability import Journal
from rl_tq.memory.arena import PACKED_BYTES
from rl_tq.protocol.framing import Inbox, pack
from rl_tq.storage.file import _names
from rl_tq.testing import TransferQueueContract

LARGE = PACKED_BYTES // 4 + 1024


@pytest.mark.process
class TestFile(TransferQueueContract):
    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> None:
        type(self).address = f"file://{tmp_path}/queue"


SERVER = """
import sys, torch, rl_tq
queue = rl_tq.serve(sys.argv[1])
large = int(sys.argv[2])
queue.configure("p", max_attempts=7)
queue.advance("p", 5)
queue.put({"a": torch.arange(6), "t": list("abcdef")}, partition="p", tags=[{"i": i} for i in range(6)])
queue.put({"big": torch.arange(2.0 * large).view(2, -1)}, partition="p", sample_ids=["row1", "row2"])
queue.put({"a": torch.zeros(3)}, partition="gone")
queue.clear("gone")
claim = dict(partition="p", columns=["a"], task="t", batch_size=1)
queue.ack(queue.get_meta(**claim), step=3)
queue.get_meta(**claim)
leased = queue.get_meta(**claim, lease_s=600.0)
queue.nack(queue.get_meta(**claim))
print(leased.rows[0], leased.leases[0], leased.generation, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def killed(tmp_path: Path) -> tuple[str, rl_tq.BatchMeta]:
    """The address of a queue whose only process was killed, and a lease that it had given."""
    address = f"file://{tmp_path}/queue"
    command = [sys.executable, "-c", SERVER, address, str(LARGE)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        row, lease, generation = map(int, server.stdout.readline().split())
    finally:
        server.send_signal(signal.SIGKILL)
        server.communicate()
    return address, rl_tq.BatchMeta(
        partition="p", sample_ids=("row3",), columns=("a",), rows=(row,), generation=generation, task="t",
        leases=(lease,),
    )  # fmt: skip


@pytest.mark.promise("`file://`: rows, acks and leases survive the death of every process")
@pytest.mark.process
def test_rows_acks_and_leases_survive_the_death_of_every_process(killed):
    address, leased = killed
    for _ in range(2):  # the second time, from the journal that the first wrote
        with rl_tq.serve(address, timeout_s=20.0) as queue:
            stats = queue.stats()["partitions"]["p"]
            assert (stats["rows"], stats["weight_version"], stats["options"]["max_attempts"]) == (6, 5, 7)
            assert stats["tasks"]["t"] == {"leased": 1, "acked": 1, "dead": 0, "returns": 1}
            everything = queue.get_meta(partition="p", columns=["a", "t"], batch_size=6, task="look", lease_s=0.01)
            assert queue.get(everything)["a"].tolist() == [0, 1, 2, 3, 4, 5]
            assert queue.get(everything)["t"].tolist() == list("abcdef")
            assert everything.tags[4] == {"i": 4}
            big = queue.get(everything.reorder([1, 0]), ["big"])["big"]
            assert torch.equal(big.flip(0).flatten(), torch.arange(2.0 * LARGE))
    with rl_tq.serve(address, timeout_s=20.0) as queue:
        # Claimed without a deadline: the claiming client died, and its row is the oldest that is free.
        again = queue.get_meta(partition="p", columns=["a"], batch_size=4, task="t")
        assert again.sample_ids == ("row2", "row4", "row5", "row6")
        queue.ack(leased, step=4)
        report = queue.restore("p", 3)
        assert (report.num_returned, report.num_revoked) == (1, 4)
        fresh = queue.put({"a": torch.tensor([6])}, partition="p")
        assert fresh.rows[0] > max(again.rows)


@pytest.mark.process
def test_a_dying_server_s_half_write_is_cut_and_damage_reported(killed):
    address, _ = killed
    journal = Path(address.removeprefix("file://")) / "journal"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'["put","p",9')
    with rl_tq.serve(address) as queue:
        assert queue.stats()["rows"] == 6
    num_lines = whole.count(b"\n")
    for line in (b"6" * 83, b"{}", b"[]", b"[7]"):
        journal.write_bytes(whole + line + b"\n")
        with pytest.raises(rl_tq.TransferQueueError, match=f"line {num_lines + 1} of .*journal is not a record"):
            rl_tq.serve(address)
    journal.write_bytes(b"[" + whole)
    with pytest.raises(rl_tq.TransferQueueError, match="line 1 of .*journal is not a record"):
        rl_tq.serve(address)
    journal.write_bytes(whole.replace(b'["version",3]', b'["version",99]'))
    with pytest.raises(rl_tq.TransferQueueError, match="reads version 3"):
        rl_tq.serve(address)
    journal.write_bytes(whole)
    rl_tq.serve(address).close()


def test_a_directory_has_one_server(tmp_path):
    queue = rl_tq.serve(f"file://{tmp_path}/queue")
    with pytest.raises(rl_tq.AddressError, match="served by another process"):
        rl_tq.serve(queue.address)
    queue.close()
    with pytest.raises(rl_tq.AddressError, match="absolute"):
        rl_tq.serve("file://queue")


def test_files_go_with_their_rows(tmp_path, monkeypatch):
    for module in ("memory.arena", "client.shm"):
        monkeypatch.setattr(f"rl_tq.{module}.RESERVE_S", 3600.0)
    directory = tmp_path / "queue"
    with rl_tq.serve(f"file://{directory}", timeout_s=20.0) as queue:
        metas = [queue.put({"a": torch.ones(1, LARGE)}, partition="p") for _ in range(3)]
        assert len(list(directory.glob("*.segment"))) == 3
        queue.clear(metas[0])
        queue.put({"a": torch.zeros(1, LARGE)}, partition="p")
        assert len(list(directory.glob("*.segment"))) == 3  # used again
        queue.clear(metas[1])
    with rl_tq.serve(f"file://{directory}", timeout_s=20.0) as queue:
        assert len(list(directory.glob("*.segment"))) == 2
        assert sorted(queue.get(queue.get_meta(partition="p", columns=["a"], batch_size=2, task="t"))["a"][:, 0]) == [
            0.0,
            1.0,
        ]
        queue.clear("p")
        until(lambda: not list(directory.glob("*.segment")))


def test_a_long_journal_is_rewritten(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_tq.durability._COMPACT_BYTES", 2000)
    with rl_tq.serve(f"file://{tmp_path}/queue", timeout_s=20.0) as queue:
        for i in range(100):
            queue.clear(queue.put({"a": torch.tensor([i])}, partition="p"))
        kept = queue.put({"a": torch.tensor([7])}, partition="p")
        assert (tmp_path / "queue" / "journal").stat().st_size < 10_000
    with rl_tq.serve(f"file://{tmp_path}/queue", timeout_s=20.0) as queue:
        assert queue.get(kept)["a"].tolist() == [7]


def test_the_journal_is_lines_of_json(tmp_path):
    journal = Journal(tmp_path)
    assert journal.load() == []
    journal.rewrite([["a", 1]])
    journal.append([["b", {"x": None}], ["c"]])
    lines = (tmp_path / "journal").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [["version", 3], ["a", 1], ["b", {"x": None}], ["c"]]
    journal.close()
    with contextlib.closing(Journal(tmp_path)) as again:
        assert again.load() == [["a", 1], ["b", {"x": None}], ["c"]]
    assert not (tmp_path / "journal.partial").exists()


@pytest.mark.process
def test_what_a_group_shares_survives(tmp_path):
    """Also by way of a snapshot, which writes it once."""
    address = f"file://{tmp_path}/queue"
    image = torch.rand(1, 100_000)
    with rl_tq.serve(address, timeout_s=20.0) as queue:
        first = queue.put({"image": rl_tq.PerGroup(image)}, partition="p", tags=[{"group_id": 1}])
        later = [
            queue.put({"image": rl_tq.PerGroup(), "x": [i]}, partition="p", tags=[{"group_id": 1}]) for i in range(3)
        ]
        queue.clear(first)
        queue.clear(later.pop())
        queue.snapshot(tmp_path / "snap")
    assert sum(path.stat().st_size for path in (tmp_path / "snap").glob("*.segment")) < 1.1 * image.nbytes
    for given in ({}, {"snapshot": tmp_path / "snap"}, {}):
        where = f"file://{tmp_path}/other" if given else address
        with rl_tq.serve(where, timeout_s=20.0, **given) as queue:
            for reference in later:
                assert torch.equal(queue.get(reference, ["image"])["image"], image)
            again = queue.put({"image": rl_tq.PerGroup(), "x": [7]}, partition="p", tags=[{"group_id": 1}])
            assert torch.equal(queue.get(again, ["image"])["image"], image)


def test_changes_of_a_turn_are_written_before_any_reply(tmp_path, monkeypatch):
    written: list[tuple[list[str], bool]] = []
    append = Journal.append

    with rl_tq.serve(f"file://{tmp_path}/queue") as queue, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect("\0" + _names(str(tmp_path / "queue"))[1])
        client.settimeout(20.0)
        inbox = Inbox(client)
        [(_, stamps)] = inbox.receive()
        os.close(stamps)

        arrived = select.poll()  # a worker of a whole run has more descriptors open than select.select takes
        arrived.register(client, select.POLLIN)

        def noted(journal, records):
            is_told = bool(arrived.poll(0))
            written.append(([record[1] for record in records], is_told))
            append(journal, records)

        monkeypatch.setattr(Journal, "append", noted)
        requests = [
            {"op": "advance", "partition": partition, "weight_version": 1, "id": i}
            for i, partition in enumerate("abc", 1)
        ]
        client.sendall(b"".join(map(pack, requests)))
        answers: list[int] = []
        while len(answers) < 3:
            answers += [message["id"] for message, _ in inbox.receive()]
        assert answers == [1, 2, 3]
        assert written == [(["a", "b", "c"], False)]
        assert queue.stats()["partitions"] == {}
