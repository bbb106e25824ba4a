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
