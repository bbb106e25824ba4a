"""Every backend against the conformance suites."""

import importlib.util
import socket
import sys

import pytest

from rl_ckpt.testing import CheckpointEngineSuite, ProcessSuite, VersionSuite, new_name

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="abstract UNIX sockets need Linux")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.contract
class TestInproc(CheckpointEngineSuite, VersionSuite):
    def new_address(self):
        return f"inproc://{new_name()}"


@pytest.mark.contract
@on_linux
class TestShm(CheckpointEngineSuite, VersionSuite, ProcessSuite):
    def new_address(self):
        return f"shm://{new_name()}"


@pytest.mark.contract
@on_linux
class TestUds(CheckpointEngineSuite, VersionSuite, ProcessSuite):
    def new_address(self):
        return f"uds://{new_name()}"


@pytest.mark.contract
class TestTcp(CheckpointEngineSuite, VersionSuite, ProcessSuite):
    token = "known to both"

    def new_address(self):
        return f"tcp://127.0.0.1:{free_port()}?streams=3"


@pytest.mark.contract
@pytest.mark.skipif(not importlib.util.find_spec("nixl"), reason="nixl is not installed: it is for Linux")
class TestNixl(CheckpointEngineSuite, ProcessSuite):
    token = "known to both"

    def new_address(self):
        return f"nixl://127.0.0.1:{free_port()}"
