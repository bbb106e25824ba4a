"""What the thread of an end takes over from its caller."""

import asyncio
import os
from contextlib import contextmanager

import pytest
import torch

from rl_ckpt._group import _surviving
from rl_ckpt._worker import Worker


def test_work_on_a_gpu_goes_to_the_stream_of_the_caller(monkeypatch):
    """On another it would not wait for what the caller has begun: an optimizer's step, or a loader's copy."""
    current = ["the caller's"]

    @contextmanager
    def stream(other):
        before, current[0] = current[0], f"{other}, in the thread"
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "stream", stream)

    async def main():
        worker = Worker("a test")
        seen = await worker.run(lambda: current[0])
        worker.close(lambda: None, 10)
        return seen

    assert asyncio.run(main()) == "the caller's, in the thread"


@pytest.mark.parametrize("before", [None, "1"])
def test_a_group_of_nccl_is_made_not_to_end_the_process(monkeypatch, before):
    """And the variable that says so is as it was afterwards."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with _surviving():
        assert os.environ[name] == "0"
    assert os.environ.get(name) == before
