"""`file://` against the published suites that need no votes."""

import shutil
import tempfile

import pytest

from rl_ckpt.testing.opening import OpeningSuite
from rl_ckpt.testing.sources import SourceSuite

pytest.importorskip("safetensors")


@pytest.mark.contract
class TestFile(OpeningSuite, SourceSuite):
    @pytest.fixture(autouse=True)
    def folder(self):
        self._folder = tempfile.mkdtemp(prefix="rl-ckpt-test-")
        yield
        shutil.rmtree(self._folder)

    def new_address(self):
        return f"file://{tempfile.mkdtemp(dir=self._folder)}/policy"
