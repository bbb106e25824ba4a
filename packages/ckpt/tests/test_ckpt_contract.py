"""Both backends against the conformance suites."""

import sys

import pytest

from rl_ckpt.testing import CheckpointEngineSuite, ProcessSuite, new_name


@pytest.mark.contract
class TestInproc(CheckpointEngineSuite):
    def new_address(self):
        return f"inproc://{new_name()}"


@pytest.mark.contract
@pytest.mark.skipif(sys.platform != "linux", reason="shm:// needs Linux")
class TestShm(CheckpointEngineSuite, ProcessSuite):
    def new_address(self):
        return f"shm://{new_name()}"
