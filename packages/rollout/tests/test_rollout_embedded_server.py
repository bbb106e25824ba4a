"""The embedded server in this process: the conformance suite, and what only it promises."""

import asyncio

import pytest

from rl_rollout import ServerConfig, create_server
from rl_rollout.testing import Served, ServerConformance


@pytest.fixture(scope="module")
def served(long_folder):
    with asyncio.Runner() as runner:
        server = create_server("embedded", ServerConfig(model_path=str(long_folder), num_threads=1))
        runner.run(server.start())
        yield Served(server=server, run=runner.run, model_path=str(long_folder), max_model_len=4096)
        runner.run(server.stop())


@pytest.mark.contract
class TestEmbedded(ServerConformance):
    pass
