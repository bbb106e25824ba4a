import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tiny models: threads only wait for each other, long so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
