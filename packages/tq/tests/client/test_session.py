"""Requests that are given up, over every connection."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import rl_tq
from rl_tq.testing._served import until

pytestmark = pytest.mark.process

ADDRESSES = ["shm://", "tcp://127.0.0.1:0", "zmq://127.0.0.1:0"]


@pytest.fixture(params=ADDRESSES)
def queue(request):
    if request.param.startswith("zmq"):
        pytest.importorskip("zmq", reason="pyzmq is not installed")
    with rl_tq.serve(request.param, timeout_s=60.0) as served:
        yield served


@pytest.mark.parametrize("has_leader", [False, True], ids=["alone", "beside a thread that reads"])
def test_abandoned_requests_are_withdrawn_and_claim_nothing(queue, has_leader, monkeypatch):
    """Else the rows that come next would be given to whoever is gone."""
    claim = {"partition": "p", "columns": ["a"], "batch_size": 1, "task": "t"}
    with rl_tq.connect(queue.address, timeout_s=60.0) as client, ThreadPoolExecutor(1) as pool:
        if has_leader:
            elsewhere = pool.submit(client.get_meta, **{**claim, "partition": "q"}, timeout_s=50.0)
            until(lambda: queue.stats()["waiters_elsewhere"].get("q") == 1)
        with monkeypatch.context() as hurried:
            hurried.setattr("rl_tq.client.session.GRACE_S", -29.0)
            with pytest.raises(rl_tq.WaitTimeoutError, match="did not answer 'wait' within 30.0 s"):
                client.get_meta(**claim, timeout_s=30.0)
        until(lambda: "p" not in queue.stats()["waiters_elsewhere"], timeout_s=10.0)
        meta = queue.put({"a": torch.ones(1)}, partition="p")
        assert queue.get_meta(**claim).rows == meta.rows
        if has_leader:
            queue.put({"a": torch.ones(1)}, partition="q")
            assert len(elsewhere.result(20)) == 1
