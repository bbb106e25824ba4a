"""One test for each way in which other queues are known to fail without a word."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

import rl_tq
from rl_tq import policies


@pytest.fixture
def queue():
    with rl_tq.serve("shm://", timeout_s=20.0) as served:
        yield served


def test_a_reference_after_a_clear_never_reads_foreign_rows(queue):
    """Its rows' places, and the very memory, are used again by other partitions and by the same."""
    kept = queue.put({"a": torch.arange(2)}, partition="p", sample_ids=["x", "y"])
    queue.clear("p")
    queue.put({"a": torch.tensor([7, 8])}, partition="q", sample_ids=["x", "y"])
    for _ in range(2):
        with pytest.raises(rl_tq.StaleReferenceError):
            queue.get(kept)
        queue.clear("p")
        queue.put({"a": torch.tensor([9])}, partition="p", sample_ids=["x"])
        queue.clear("q")


def test_a_dtype_conflict_is_an_error_and_stores_nothing(queue):
    queue.put({"a": torch.zeros(1)}, partition="p")
    for other in (torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, 1)):
        with pytest.raises(rl_tq.SchemaError, match="dense float32"):
            queue.put({"a": other}, partition="p")
    assert queue.stats()["rows"] == 1


def test_a_group_with_a_late_sample_is_not_filled_from_another(queue):
    sizes = {0: 3, 1: 4, 2: 4}
    for group, size in sizes.items():
        tags = [{"group_id": group}] * size
        queue.put({"a": torch.full((size,), group)}, partition="p", tags=tags)
    claim = {"partition": "p", "columns": ["a"], "task": "t", "sampler": policies.GroupComplete(group_size=4)}
    meta = queue.get_meta(**claim, batch_size=8)
    assert queue.get(meta)["a"].tolist() == [1] * 4 + [2] * 4
    with pytest.raises(rl_tq.WaitTimeoutError, match="group 0 has 3 of 4"):
        queue.get_meta(**claim, batch_size=4, timeout_s=0.0)


def test_a_missing_row_or_column_never_shortens_a_batch(queue):
    queue.put({"a": torch.zeros(3)}, partition="p", sample_ids=["x", "y", "z"])
    queue.put({"b": torch.zeros(2)}, partition="p", sample_ids=["x", "z"])
    for ids, columns in ((("x", "gone", "z"), ("a",)), (("x", "y", "z"), ("a", "b"))):
        with pytest.raises(rl_tq.MissingDataError, match=r"1 of 3 rows.*'(gone|y)'"):
            queue.get(rl_tq.BatchMeta(partition="p", sample_ids=ids, columns=columns))


HAS_NIXL = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed: it is for Linux")
HAS_ZMQ = pytest.mark.skipif(find_spec("zmq") is None, reason="pyzmq is not installed")
CONSUMER = """
import sys, rl_tq
queue = rl_tq.connect(sys.argv[1])
meta = queue.get_meta(partition="p", columns=["a"], batch_size=3, task="t")
print("got", *queue.get(meta)["a"].tolist(), file=sys.stderr, flush=True)
queue.ack(meta.reorder([0]), step=1)
print("acked", file=sys.stderr, flush=True)
sys.stdin.read()
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "address",
    [
        "shm://",
        pytest.param("tcp://127.0.0.1:0", marks=pytest.mark.slow),
        pytest.param("zmq://127.0.0.1:0", marks=[pytest.mark.slow, HAS_ZMQ]),
        pytest.param("nixl://127.0.0.1:0", marks=[pytest.mark.slow, HAS_NIXL]),
    ],
)
def test_rows_that_a_dead_consumer_fetched_are_not_lost(address, monkeypatch):
    if address.startswith("zmq"):
        monkeypatch.setattr("rl_tq.storage.zmq._SILENCE_S", 2.5)
    with rl_tq.serve(address, timeout_s=60.0) as queue:
        queue.put({"a": torch.arange(3)}, partition="p")
        command = [sys.executable, "-c", CONSUMER, queue.address]
        consumer = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        try:
            assert consumer.stderr is not None
            said = iter(consumer.stderr.readline, "")
            assert next(line for line in said if line.startswith("got")) == "got 0 1 2\n"  # NIXL speaks up as well
            assert next(said) == "acked\n"
            text = queue.explain(partition="p", columns=["a"], batch_size=2, task="t")
            assert "leased and not acked: 2 to " in text
        finally:
            consumer.kill()
            consumer.communicate()
        meta = queue.get_meta(partition="p", columns=["a"], batch_size=2, task="t")
        assert queue.get(meta)["a"].tolist() == [1, 2]
        assert queue.stats()["partitions"]["p"]["tasks"]["t"]["returns"] == 2


def test_the_thread_count_of_torch_is_the_callers(queue):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        meta = queue.put({"a": torch.zeros(64, 40_000), "r": [torch.arange(i) for i in range(64)]}, partition="p")
        queue.get(meta, out=torch.empty(20 << 20, dtype=torch.uint8))
        queue.get(meta.reorder(range(63, -1, -1)))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
