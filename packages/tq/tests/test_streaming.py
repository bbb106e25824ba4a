"""The stream of batches: order, back-pressure, and what becomes of batches that nobody acknowledged."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader

import rl_tq
from rl_tq.streaming import StreamingDataset


@pytest.fixture(params=["shm://", "tcp://127.0.0.1:0"])
def queue(request):
    with rl_tq.serve(request.param, timeout_s=30.0) as served:
        yield served


def stream(queue: rl_tq.TransferQueue, **options) -> StreamingDataset:
    return StreamingDataset(
        queue.address, **{"partition": "p", "columns": ["a"], "batch_size": 2, "task": "t", "idle_s": 0.2, **options}
    )


@pytest.mark.process
def test_a_stream_ends_when_nothing_comes(queue):
    queue.put({"a": torch.arange(5)}, partition="p")
    acked = []
    for batch in DataLoader(stream(queue), batch_size=None):
        acked += batch.data["a"].tolist()
        queue.ack(batch.meta, step=1)
    assert acked == [0, 1, 2, 3]
    assert queue.stats()["partitions"]["p"]["tasks"]["t"]["acked"] == 4


def test_a_slow_consumer_holds_producers_up(queue):
    """At most what the partition takes is ever held, and nothing is lost."""
    queue.configure("p", max_rows=4)

    def produce() -> None:
        with rl_tq.connect(queue.address, timeout_s=60.0) as producer:
            for i in range(10):
                producer.put({"a": torch.tensor([2 * i, 2 * i + 1])}, partition="p")

    taken = []
    with ThreadPoolExecutor(1) as pool:
        producing = pool.submit(produce)
        for batch in stream(queue, clear=True, idle_s=60.0):
            assert queue.stats()["partitions"]["p"]["rows"] <= 4
            taken += batch.data["a"].tolist()
            if len(taken) == 20:
                break
        producing.result(60)
    assert taken == list(range(20))


def test_batches_that_were_not_acknowledged_go_back(queue):
    queue.put({"a": torch.arange(4)}, partition="p")
    batches = iter(stream(queue))
    first = next(batches)
    queue.ack(first.meta)
    assert next(batches).data["a"].tolist() == [2, 3]
    batches.close()
    again = queue.get_meta(partition="p", columns=["a"], batch_size=2, task="t", timeout_s=20.0)
    assert queue.get(again)["a"].tolist() == [2, 3]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_workers_of_a_loader_share_the_rows(queue):
    queue.put({"a": torch.arange(8)}, partition="p")
    dataset = stream(queue, clear=True, idle_s=3.0)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    taken = [value for batch in loader for value in batch.data["a"].tolist()]
    assert sorted(taken) == list(range(8))
