"""What is particular to `nccl://`. Broadcasts need two GPUs: NCCL refuses two ranks on one."""

import asyncio
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import rl_ckpt
from rl_bench.waiting import until
from rl_ckpt import BackendError, SyncAbortedError
from rl_ckpt.testing import failure
from rl_ckpt.testing.ends import weights_of
from rl_ckpt.transports.group import BroadcastGroup, _surviving

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each end")

RECEIVE = """
    import sys, torch, rl_ckpt

    torch.cuda.set_device(1)
    with rl_ckpt.connect(sys.argv[1], role="receive", token="t", timeout_s=60) as receiver:
        for _ in range(int(sys.argv[2])):
            got = dict(receiver.recv(clone=True))
            print(receiver.version, rl_ckpt.tree_digest(got) == receiver.digest, got["t0"].device, flush=True)
"""


def receiver_of(url, num_syncs):
    command = [sys.executable, "-c", textwrap.dedent(RECEIVE), url, str(num_syncs)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def sender():
    return rl_ckpt.connect("nccl://127.0.0.1:0", role="send", token="t", timeout_s=30)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(BackendError, match="use gloo or tcp instead"):
        sender()


def test_an_abort_that_waits_for_a_peer_holds_nobody_up(monkeypatch):
    """As torch's does, for the timeout of its group, where NCCL does not come back; then it raises."""
    aborting, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    class Stuck:
        def abort(self):
            aborting.set()
            assert may_end.wait(60)
            ended.set()
            raise RuntimeError("ProcessGroup abort timed out")

    monkeypatch.setattr(BroadcastGroup, "_join", lambda _: Stuck())
    group = BroadcastGroup(lambda: None, 1, 0, 2, host="", timeout_s=1, device=torch.device("cuda", 0))
    until(lambda: group._group is not None)
    group.leave()
    assert aborting.wait(60)
    assert not ended.is_set()
    may_end.set()
    assert ended.wait(60)


def test_neither_a_peer_nor_an_abort_ends_the_process(monkeypatch):
    """What torch reads when it makes a group, and what the process has set otherwise."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    with _surviving():
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ


@pytest.mark.gpu
@needs_two_gpus
def test_from_one_gpu_to_another():
    weights = {f"t{i}": torch.randn(1000, 3000 + i, device="cuda:0") for i in range(20)}
    with sender() as end:
        asyncio.run(end.prepare())
        with receiver_of(end.address, 3) as receiver:
            for version in range(3):
                end.send(weights.items(), version=version)
            assert receiver.stdout.read().splitlines() == [f"{version} True cuda:1" for version in range(3)]
        assert receiver.returncode == 0


@pytest.mark.gpu
@needs_two_gpus
def test_a_killed_receiver_ends_the_sync_and_can_be_replaced():
    async def main():
        async with sender() as end:
            await end.prepare()
            killed = receiver_of(end.address, 2)
            await end.connect(1)

            def source():
                for index, item in enumerate(weights_of(1, 200_000).items()):
                    if index == 100_000:
                        killed.kill()
                    yield item

            await failure(SyncAbortedError, end.send_weights(source(), version=1))
            killed.wait(30)
            with receiver_of(end.address, 1) as successor:
                await end.send_weights(weights_of(1).items(), version=1, num_peers=1)
                assert successor.stdout.read().startswith("1 True")

    asyncio.run(main())
