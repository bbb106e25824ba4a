from importlib.util import find_spec

import pytest

import rl_tq
from rl_tq.protocol.service import Service
from rl_tq.testing import TransferQueueContract


@pytest.mark.process
class TestInproc(TransferQueueContract):
    address = "inproc://"


@pytest.mark.process
class TestShm(TransferQueueContract):
    address = "shm://"


@pytest.mark.process
class TestTcp(TransferQueueContract):
    address = "tcp://127.0.0.1:0"


@pytest.mark.slow
class TestShmAndTcp(TransferQueueContract):
    """One queue at two addresses: half of the calls over each."""

    address = "shm://"
    also = "tcp://127.0.0.1:0"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("zmq") is None, reason="pyzmq is not installed")
class TestZmq(TransferQueueContract):
    address = "zmq://127.0.0.1:0"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("zmq") is None, reason="pyzmq is not installed")
class TestTcpAndZmq(TransferQueueContract):
    address = "tcp://127.0.0.1:0"
    also = "zmq://127.0.0.1:0"


@pytest.mark.slow  # every client is an agent of UCX, which takes its time to start
@pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed: it is for Linux")
class TestNixl(TransferQueueContract):
    address = "nixl://127.0.0.1:0"


@pytest.mark.parametrize("address", ["inproc://", "shm://", "tcp://127.0.0.1:0", "zmq://127.0.0.1:0"])
def test_a_new_operation_is_one_entry_whatever_the_storage(address, monkeypatch):
    if address.startswith("zmq"):
        pytest.importorskip("zmq", reason="pyzmq is not installed")

    def count(service, request, caller):
        return {"rows": service.store.state.num_rows(), "asked": request["question"], "by": caller.label}

    monkeypatch.setitem(Service.operations, "count", count)
    with rl_tq.serve(address) as queue, rl_tq.connect(queue.address) as client:
        client.put({"a": [1, 2, 3]}, partition="p")
        reply = client._call({"op": "count", "question": "how many?"}, 20.0)
        assert (reply["rows"], reply["asked"]) == (3, "how many?")
        assert "client" in reply["by"] or "process" in reply["by"]
