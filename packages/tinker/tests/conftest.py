import gc
import warnings

import pytest

from rl_rollout.testing import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def collects_clients():
    """The SDK leaves connections to the garbage collector, which is to find them before the next module's tests."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
