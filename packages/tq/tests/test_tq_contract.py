from rl_tq.testing import TransferQueueContract


class TestInproc(TransferQueueContract):
    address = "inproc://"


class TestShm(TransferQueueContract):
    address = "shm://"


class TestTcp(TransferQueueContract):
    address = "tcp://127.0.0.1:0"
