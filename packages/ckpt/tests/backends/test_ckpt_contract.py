"""Every backend against the conformance suites: by default those of memory, of a network and of NIXL.

The others have tests of their own in the default tier, in the files of their names and `test_ckpt_sharded_backends.py`.
"""

import importlib.util
import sys
from importlib.metadata import entry_points

import pytest
from ckpt_gpu import fake_gpu, fake_nccl, hold_on_gpu, use_fake_gpu, use_fake_nccl

from rl_ckpt.session import GROUP, capabilities
from rl_ckpt.testing import CheckpointEngineSuite, KillSuite, ProcessSuite, VersionSuite, new_name, new_port
from rl_ckpt.types import Capability

pytestmark = pytest.mark.process

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="abstract UNIX sockets need Linux")


@pytest.mark.process
@pytest.mark.contract
class TestInproc(CheckpointEngineSuite, VersionSuite):
    def new_address(self):
        return f"inproc://{new_name()}"


@pytest.mark.process
@pytest.mark.contract
@on_linux
class TestShm(CheckpointEngineSuite, VersionSuite, ProcessSuite):
    def new_address(self):
        return f"shm://{new_name()}"


@pytest.mark.slow
@pytest.mark.contract
@on_linux
class TestUds(CheckpointEngineSuite, VersionSuite, ProcessSuite):
    def new_address(self):
        return f"uds://{new_name()}"


@pytest.fixture
def gpu():
    with fake_gpu():
        yield


@pytest.mark.slow
@pytest.mark.contract
@pytest.mark.usefixtures("gpu")
@on_linux
class TestCudaIpc(CheckpointEngineSuite, VersionSuite, ProcessSuite):
    """Over memory that another process opens; what is registered here is not on the fake GPU, and is packed."""

    set_up = use_fake_gpu

    def new_address(self):
        return f"cuda-ipc://{new_name()}"


@pytest.mark.process
@pytest.mark.contract
class TestTcp(CheckpointEngineSuite, VersionSuite, ProcessSuite):
    token = "known to both"

    def new_address(self):
        return f"tcp://127.0.0.1:{new_port()}?streams=3"


@pytest.mark.process
@pytest.mark.contract
@pytest.mark.skipif(not importlib.util.find_spec("nixl"), reason="nixl is not installed: it is for Linux")
class TestNixl(CheckpointEngineSuite, VersionSuite, ProcessSuite):
    token = "known to both"

    def new_address(self):
        return f"nixl://127.0.0.1:{new_port()}"


@pytest.mark.slow
@pytest.mark.contract
class TestGloo(CheckpointEngineSuite, VersionSuite, ProcessSuite):
    token = "known to both"

    def new_address(self):
        return f"gloo://127.0.0.1:{new_port()}"


@pytest.fixture
def nccl():
    with fake_nccl():
        yield


@pytest.mark.slow
@pytest.mark.contract
@pytest.mark.usefixtures("nccl")
class TestNccl(CheckpointEngineSuite, VersionSuite, ProcessSuite):
    """Over gloo in its place; in buckets of its own size, 64 MiB."""

    token = "known to both"
    set_up = use_fake_nccl

    def new_address(self):
        return f"nccl://127.0.0.1:{new_port()}"


@pytest.mark.process
def test_every_backend_passes_the_suites_of_all_that_it_promises():
    """Those with a transaction, each of them; a folder promises less, and has a file of its own."""
    schemes = {entry.name for entry in entry_points(group=GROUP)} - {"file"}
    with fake_gpu(), fake_nccl():
        assert all(capabilities(f"{scheme}://x") == frozenset(Capability) for scheme in schemes)
    suites = [value for name, value in globals().items() if name.startswith("Test") and not name.endswith("Killed")]
    assert {suite().new_address().partition(":")[0] for suite in suites} == schemes
    assert all(issubclass(suite, CheckpointEngineSuite) and issubclass(suite, VersionSuite) for suite in suites)


@pytest.mark.contract
@pytest.mark.slow
@on_linux
class TestShmKilled(KillSuite):
    new_address = TestShm.new_address


@pytest.mark.contract
@pytest.mark.slow
@on_linux
class TestUdsKilled(KillSuite):
    new_address = TestUds.new_address


@pytest.mark.contract
@pytest.mark.slow
@pytest.mark.usefixtures("gpu")
@on_linux
class TestCudaIpcKilled(KillSuite):
    set_up = TestCudaIpc.set_up
    new_address = TestCudaIpc.new_address


@pytest.mark.contract
@pytest.mark.slow
@pytest.mark.usefixtures("gpu")
@on_linux
class TestCudaIpcMappedKilled(KillSuite):
    set_up = TestCudaIpc.set_up
    hold = hold_on_gpu
    new_address = TestCudaIpc.new_address
    sender_messages = ("Hello", "Session", "Begin", "Manifest", "Sources", "Mapped", "Seal", "Commit")


@pytest.mark.contract
@pytest.mark.slow
class TestTcpKilled(KillSuite):
    token = TestTcp.token
    new_address = TestTcp.new_address
    sender_messages = (*KillSuite.sender_messages, "Proof")
    receiver_messages = (*KillSuite.receiver_messages, "Proof")


@pytest.mark.contract
@pytest.mark.slow
class TestGlooKilled(KillSuite):
    token = TestGloo.token
    new_address = TestGloo.new_address
    sender_messages = (*KillSuite.sender_messages, "Proof", "NewGroup")
    receiver_messages = (*KillSuite.receiver_messages, "Proof")


@pytest.mark.contract
@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("nixl"), reason="nixl is not installed: it is for Linux")
class TestNixlKilled(KillSuite):
    token = TestNixl.token
    new_address = TestNixl.new_address
    sender_messages = (*KillSuite.sender_messages, "Proof")
    receiver_messages = (*KillSuite.receiver_messages, "Proof")
