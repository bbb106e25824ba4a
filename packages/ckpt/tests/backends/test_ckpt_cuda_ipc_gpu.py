"""Sharing a GPU's memory: the real thing, on a GPU."""

import asyncio
import os
import subprocess
import sys
import textwrap

import pytest
import torch

import rl_ckpt
from rl_ckpt.testing import new_name

pytestmark = pytest.mark.process

RECEIVE = """
    import sys, torch, rl_ckpt

    url, num_syncs, expected = sys.argv[1], int(sys.argv[2]), None
    current = torch.cuda.current_device()
    into = {f"t{i}": torch.zeros(1000, 257 + i, dtype=torch.bfloat16, device="cuda") for i in range(50)}
    into["t3"] = torch.zeros(260, 1000, dtype=torch.bfloat16, device="cuda").t()
    with rl_ckpt.connect(url, role="receive", timeout_s=60) as receiver:
        for _ in range(num_syncs):
            receiver.recv_into(into)
            print(receiver.version, rl_ckpt.tree_digest(into) == receiver.digest, flush=True)
            held = torch.cuda.memory_reserved()
            expected = expected or held
            assert held == expected, (held, expected)
        got = dict(receiver.recv(clone=True))
        print(rl_ckpt.tree_digest(got) == receiver.digest, got["t0"].is_cuda, flush=True)
    assert torch.cuda.current_device() == current
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_registered", [True, False])
def test_between_two_processes_on_a_gpu(is_registered):
    """Version after version, through mapped memory or the ring: the bits are the sender's, and memory does not grow."""
    url = f"cuda-ipc://{new_name()}"
    command = [sys.executable, "-c", textwrap.dedent(RECEIVE), url, "5"]
    weights = {f"t{i}": torch.randn(1000, 257 + i, device="cuda").bfloat16() for i in range(50)}
    with (
        rl_ckpt.connect(url, role="send", timeout_s=60) as sender,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver,
    ):
        if is_registered:
            sender.register_source(weights)
        for version in range(6):
            for tensor in weights.values():
                tensor.mul_(-1.25)
            sender.send(None if is_registered else weights.items(), version=version)
        said = receiver.stdout.read().splitlines()
        assert said == [f"{version} True" for version in range(5)] + ["True True"]
    assert receiver.returncode == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_registered", [True, False])
def test_both_ends_in_one_process_of_a_gpu(is_registered):
    """CUDA opens no handle in the process that it is of: the memory itself takes its place."""
    weights = {f"t{i}": torch.randn(1000, 257 + i, device="cuda").bfloat16() for i in range(50)}
    into = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}

    async def main():
        url = f"cuda-ipc://{new_name()}"
        async with (
            rl_ckpt.connect(url, role="send", timeout_s=60) as sender,
            rl_ckpt.connect(url, role="receive", timeout_s=60) as receiver,
        ):
            if is_registered:
                sender.register_source(weights)
            for version in range(3):
                for tensor in weights.values():
                    tensor.mul_(-1.25)
                sending = sender.send_weights(None if is_registered else weights.items(), version=version)
                await asyncio.gather(sending, receiver.receive_into(into))
                torch.testing.assert_close(into, weights, rtol=0, atol=0)

    asyncio.run(main())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_expandable_segments_are_refused_on_a_gpu():
    """By the driver's own word."""
    code = """
        import asyncio, torch, rl_ckpt

        weights = {"w": torch.ones(1 << 24, device="cuda")}
        try:
            with rl_ckpt.connect("cuda-ipc://refused", role="send", timeout_s=5) as sender:
                asyncio.run(sender.prepare())
        except rl_ckpt.BackendError as error:
            print(error)
    """
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert "expandable_segments:False" in done.stdout, done


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_current_device_of_the_caller_stays_what_it_was():
    """Also where it is not the one whose memory is mapped: what the caller allocates next goes where it went before."""
    url = f"cuda-ipc://{new_name()}"
    code = """
        import sys, torch, rl_ckpt

        with rl_ckpt.connect(sys.argv[1], role="receive", timeout_s=60) as receiver:
            got = dict(receiver.recv(clone=True))
        print(got["w"].device, torch.cuda.current_device())
    """
    weights = {"w": torch.ones(1000, device="cuda:1")}
    with torch.cuda.device(1), rl_ckpt.connect(url, role="send", timeout_s=60) as sender:
        sender.register_source(weights)
        command = [sys.executable, "-c", textwrap.dedent(code), url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
            sender.send(version=1)
            assert receiver.stdout.read() == "cuda:1 0\n"
