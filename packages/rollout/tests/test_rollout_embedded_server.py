"""The embedded server in this process: the conformance suite, and what only it promises."""

import asyncio

import pytest

from rl_rollout import ServerConfig, create_server
from rl_rollout.testing import Served, ServerConformance, write_tiny_model


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("model"))
    with asyncio.Runner() as runner:
        server = create_server("embedded", ServerConfig(model_path=str(folder), num_threads=1))
        runner.run(server.start())
        yield Served(server=server, run=runner.run, model_path=str(folder))
        runner.run(server.stop())


@pytest.mark.contract
class TestEmbedded(ServerConformance):
    pass
