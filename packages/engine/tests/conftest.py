import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tiny models: threads only wait for each other, long so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_group_left():
    """An engine that a test did not close keeps its process group, which the next test would find."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def start_ranks():
    """`start_ranks(script, folder, size, *arguments)`: one process per rank; what rank 0 left in FOLDER/seen.pt."""
    return _start_ranks


def _start_ranks(script, folder, size, *arguments):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    shared |= {"CUDA_VISIBLE_DEVICES": ""}  # NCCL takes no two ranks on one GPU
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(folder), *arguments],
            env=os.environ | shared | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        errors = [process.communicate(timeout=500)[1] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * size, "\n\n".join(error[-3000:] for error in errors)
    return {"folder": folder} | torch.load(folder / "seen.pt", weights_only=True)
