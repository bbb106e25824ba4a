"""The sender for checkpoint-engine's protocol against its own worker. Needs its sources, at RL_CKPT_CHECKPOINT_ENGINE.

RL_CKPT_CHECKPOINT_ENGINE is a folder that `pip install --no-deps --target FOLDER checkpoint-engine==0.4.2 loguru` has
filled. `checkpoint_engine/worker.py` is run as it is, in a process of its own, but for two things that want a GPU: what
it asks of the device (wait, collect) does nothing, and the buffer is a file in memory that both map.
"""

import functools
import os
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rl_ckpt import PeerTimeoutError, SyncAbortedError, TensorError
from rl_ckpt.testing import assert_same, sample_weights

zmq = pytest.importorskip("zmq")
FOLDER = os.environ.get("RL_CKPT_CHECKPOINT_ENGINE")
pytestmark = pytest.mark.skipif(not FOLDER, reason="RL_CKPT_CHECKPOINT_ENGINE names no folder with checkpoint-engine")
UUID = "GPU-of-the-test"


def shared_file(folder, num_bytes):
    """A buffer on the CPU, and the handle that the worker calls."""
    path = Path(folder) / f"buffer-{len(list(Path(folder).iterdir()))}"
    path.write_bytes(bytes(num_bytes))
    rebuild = functools.partial(torch.from_file, dtype=torch.uint8)
    arguments = (str(path), True, num_bytes)
    return rebuild(*arguments), (rebuild, arguments)


def worker_module():
    """checkpoint_engine.worker, without the package around it, which wants a web server."""
    package = types.ModuleType("checkpoint_engine")
    package.__path__ = [f"{FOLDER}/checkpoint_engine"]
    sys.modules["checkpoint_engine"] = package
    sys.path.append(FOLDER)
    import checkpoint_engine.worker as worker

    class NoDevice:
        device_module = types.SimpleNamespace(
            synchronize=lambda: None, ipc_collect=lambda: None, empty_cache=lambda: None
        )

    worker.DeviceManager = NoDevice
    return worker


def serve(address, fail_at, out):
    """One update in this process; writes what was loaded, in how many calls, and how often it was finished."""
    got, calls, hooks = {}, [], []

    def load(weights):
        calls.append(len(weights))
        if len(calls) == int(fail_at):
            raise ValueError("this loader knows no such tensor")
        got.update({name: tensor.clone() for name, tensor in weights})

    worker_module().update_weights_from_ipc(
        zmq.Context(), address, None, run=load, post_hook=lambda: hooks.append(True)
    )
    torch.save((got, len(calls), len(hooks)), out)


class Worker:
    """This file as a process that takes one update."""

    def __init__(self, address, fail_at, out):
        self._out = out
        command = [sys.executable, __file__, address, str(fail_at), str(out)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def result(self):
        """What it loaded, or its error."""
        _, error = self.process.communicate(timeout=60)
        return torch.load(self._out) if self.process.returncode == 0 else error


@pytest.fixture
def worker(tmp_path):
    """Starts a worker for an address."""
    workers = []

    def start(address, fail_at=0):
        workers.append(Worker(address, fail_at, tmp_path / f"result-{len(workers)}"))
        return workers[-1]

    yield start
    for each in workers:
        each.process.kill()
        each.process.communicate()


@pytest.fixture
def sender(tmp_path):
    from rl_ckpt.adapters.checkpoint_engine import WorkerSender

    make = functools.partial(shared_file, tmp_path)
    with WorkerSender(UUID, bucket_bytes=4096, timeout_s=60, buffer=make) as end:
        yield end


def test_the_real_worker_loads_what_is_sent(sender, worker):
    """Over more buckets than the buffer has halves, update after update, in the order of the source."""
    for seed in (0, 1):
        weights = sample_weights(seed) | {f"t{i}": torch.randn(700, i + 1)[:, 0] for i in range(9)}
        taking = worker(sender.handles[UUID])
        num_bytes = sender.send(weights.items())
        got, num_calls, num_hooks = taking.result()
        assert_same(got, {name: tensor.detach() for name, tensor in weights.items()})
        assert num_bytes == sum(tensor.numel() * tensor.itemsize for tensor in weights.values())
        assert (num_calls > 4, num_hooks) == (True, 1)


def test_a_worker_that_fails_ends_the_update_at_both_ends(sender, worker):
    """With its own words; and the next update works."""
    weights = {f"t{i}": torch.randn(1000) for i in range(6)}
    taking = worker(sender.handles[UUID], fail_at=2)
    with pytest.raises(SyncAbortedError, match="this loader knows no such tensor"):
        sender.send(weights.items())
    assert "the sender gave up" in taking.result()
    taking = worker(sender.handles[UUID])
    sender.send(weights.items())
    assert_same(taking.result()[0], weights)


def test_a_source_that_fails_is_the_workers_error_as_well(sender, worker):
    def source():
        yield "a", torch.ones(900)
        yield "b", torch.ones(900)
        raise KeyError("the export failed")

    taking = worker(sender.handles[UUID])
    with pytest.raises(KeyError):
        sender.send(source())
    assert "the export failed" in taking.result()
    for wrong in ([("large", torch.ones(5000))], []):
        taking = worker(sender.handles[UUID])
        with pytest.raises(TensorError, match=r"bucket_bytes of at least|drained"):
            sender.send(wrong)
        assert "gave up" in taking.result()


def test_a_worker_that_never_comes_is_named(tmp_path):
    from rl_ckpt.adapters.checkpoint_engine import WorkerSender

    with (
        WorkerSender(UUID, bucket_bytes=4096, timeout_s=0.2, buffer=functools.partial(shared_file, tmp_path)) as end,
        ThreadPoolExecutor(1) as pool,
    ):
        error = pool.submit(lambda: end.send([("a", torch.ones(3))])).exception(30)
    assert isinstance(error, PeerTimeoutError)
    assert UUID in str(error)


if __name__ == "__main__":
    serve(*sys.argv[1:])
