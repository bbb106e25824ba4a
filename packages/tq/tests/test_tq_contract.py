from rl_tq.testing import TransferQueueContract


class TestInproc(TransferQueueContract):
    address = "inproc://"


class TestShm(TransferQueueContract):
    address = "shm://"
