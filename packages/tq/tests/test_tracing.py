import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rl_tq
from rl_tq import tracing

CONSUMER = """
import sys, os, signal, rl_tq
with rl_tq.connect(sys.argv[1], timeout_s=60.0) as queue:
    meta = queue.get_meta(partition="p", columns=["a", "t"], batch_size=2, task="t")
    queue.get(meta)
    queue.ack(meta, step=4)
    try:
        queue.ack(rl_tq.BatchMeta(partition="p", sample_ids=("x",), columns=("a",)))
    except ValueError:
        pass
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_batches_are_followed_through_processes(tmp_path, monkeypatch):
    """By the environment alone; a process that is killed loses none of its spans."""
    monkeypatch.setenv(tracing.VARIABLE, str(tmp_path / "spans"))
    with rl_tq.serve("shm://", timeout_s=60.0) as queue:
        tensors = {"a": torch.zeros(3, 5), "r": [torch.ones(2), torch.ones(0), torch.ones(1)]}
        queue.put({**tensors, "t": ["x", "y", "z"], "b": [b"12", b"", b"3"]}, partition="p")
        subprocess.run([sys.executable, "-c", CONSUMER, queue.address], check=False, timeout=120)
        meta = queue.get_meta(partition="p", columns=["r"], batch_size=1, task="t")
        queue.nack(meta)
        queue.clear("p")
    command = [str(Path(sys.executable).with_name("rl-tq")), "trace", str(tmp_path / "spans")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    events = json.loads(done.stdout)["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert len(processes) == 2
    spans = sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"])
    assert [span["name"] for span in spans] == ["put", "claim", "get", "ack", "ack", "claim", "nack", "clear"]
    put, claim, get, ack, wrong, again, nack, clear = spans
    assert put["args"] == {
        "partition": "p", "rows": "1-3", "num_rows": 3, "columns": ["a", "r", "t", "b"], "bytes": 60 + 12 + 3
    }  # fmt: skip
    assert (claim["args"]["rows"], claim["args"]["task"], claim["args"]["batch_size"]) == ("1-2", "t", 2)
    assert get["args"]["bytes"] == 40
    assert get["args"]["leases"] == claim["args"]["leases"] == ack["args"]["leases"]
    assert ack["args"]["step"] == 4
    assert wrong["args"]["error"].startswith("ValueError: this reference to 1 rows")
    assert {span["pid"] for span in (claim, get, ack)} == {wrong["pid"]}
    assert {span["pid"] for span in (put, again, nack, clear)} == {put["pid"]} != {claim["pid"]}
    assert clear["args"] == {"partition": "p"}
    for before, after in itertools.pairwise(spans[1:4]):
        assert before["ts"] + before["dur"] <= after["ts"]
    arrows = [(event["ph"], event["id"]) for event in events if event["ph"] in "stf"]
    first, second = f"p/{claim['args']['leases'][0]}", f"p/{again['args']['leases'][0]}"
    assert arrows == [("s", first), ("t", first), ("f", first), ("s", second), ("f", second)]


def test_a_client_is_traced_by_hand_and_others_are_as_they_were(tmp_path):
    with rl_tq.serve("inproc://") as queue, rl_tq.connect(queue.address) as other:
        assert tracing.trace(queue, tmp_path) is queue
        other.put({"a": torch.zeros(3)}, partition="p")
        assert "put" not in vars(other)
        with pytest.raises(rl_tq.WaitTimeoutError):
            queue.get_meta(partition="p", columns=["b"], batch_size=1, task="t", timeout_s=0.0)
        queue.clear("p")
    [_, claim, clear] = tracing.chrome_trace(tmp_path)["traceEvents"]
    assert claim["args"]["error"].startswith("WaitTimeoutError: task 't' wanted 1 rows")
    assert clear["name"] == "clear"


def test_a_cut_off_line_is_skipped_and_an_empty_log_is_reported(tmp_path):
    with pytest.raises(rl_tq.TransferQueueError, match="has no spans: set RL_TQ_TRACE"):
        tracing.chrome_trace(tmp_path)
    (tmp_path / "7-x.spans").write_text('{"process":"h 7 x"}\n{"name":"put","ts"')
    assert len(tracing.chrome_trace(tmp_path)["traceEvents"]) == 1
