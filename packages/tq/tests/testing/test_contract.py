from importlib.util import find_spec

import pytest

from rl_tq.testing import TransferQueueContract


class TestInproc(TransferQueueContract):
    address = "inproc://"


class TestShm(TransferQueueContract):
    address = "shm://"


class TestTcp(TransferQueueContract):
    address = "tcp://127.0.0.1:0"


@pytest.mark.skipif(find_spec("zmq") is None, reason="pyzmq is not installed")
class TestZmq(TransferQueueContract):
    address = "zmq://127.0.0.1:0"


@pytest.mark.slow  # every client is an agent of UCX, which takes its time to start
@pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed: it is for Linux")
class TestNixl(TransferQueueContract):
    address = "nixl://127.0.0.1:0"
