"""`file://` against the published suites of what every backend promises; it declares that it promises no more."""

import shutil
import tempfile

import pytest

from rl_ckpt.session import capabilities
from rl_ckpt.testing import AliasSuite, IntoSuite, SessionSuite

pytestmark = pytest.mark.process

pytest.importorskip("safetensors")


@pytest.mark.process
@pytest.mark.contract
class TestFile(SessionSuite, IntoSuite, AliasSuite):
    @pytest.fixture(autouse=True)
    def folder(self):
        self._folder = tempfile.mkdtemp(prefix="rl-ckpt-test-")
        yield
        shutil.rmtree(self._folder)

    def new_address(self):
        return f"file://{tempfile.mkdtemp(dir=self._folder)}/policy"

    def test_a_folder_promises_nothing_beyond(self):
        assert capabilities(self.new_address()) == frozenset()
