import pytest

from rl_omni.testing import write_tiny_pipeline


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory):
    return str(write_tiny_pipeline(tmp_path_factory.mktemp("pipeline")))
