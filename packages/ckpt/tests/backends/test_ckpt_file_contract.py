"""`file://` against the published suites that need no votes.

A folder's two ends never meet, so it has no receipts, no abort and no vote, no differences, and no ring of buckets
whose views end, are held, or are poisoned: the suites that ask for those do not run here.
"""

import shutil
import tempfile

import pytest

from rl_ckpt.testing import sample_weights
from rl_ckpt.testing.opening import OpeningSuite
from rl_ckpt.testing.sources import SourceSuite
from rl_ckpt.types import ReceiverState

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

    def test_the_version_that_is_being_taken_is_told(self):
        """As the other backends do; there is no receipt to look into."""

        async def work(pair):
            sender, receiver = await pair.send_end(), await pair.receive_end()
            for version in (1, 2, 7):
                report = await sender.send_weights(sample_weights(version).items(), version=version)
                seen = [(receiver.version, receiver.state) async for _ in receiver.receive_weights()]
                assert set(seen) == {(version, ReceiverState.PREPARING)}
                assert (receiver.version, receiver.state) == (version, ReceiverState.COMMITTED)
                assert (report.receipts, report.lost) == ((), ())
                assert receiver.digest == report.digest

        self.run(work)
