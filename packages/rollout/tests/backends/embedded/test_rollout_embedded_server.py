"""The embedded server in this process: the conformance suite, and what only it promises."""

import asyncio
import sys
import threading

import pytest
from slow_engine import slow_down

from rl_rollout import GenerateRequest, SamplingParams, ServerConfig, ServerLostError, create_server
from rl_rollout.testing import Served, ServerConformance


@pytest.fixture(scope="module")
def served(long_folder):
    with asyncio.Runner() as runner:
        server = create_server("embedded", ServerConfig(model_path=str(long_folder), num_threads=1))
        runner.run(server.start())
        yield Served(server=server, run=runner.run, model_path=str(long_folder), max_model_len=4096)
        runner.run(server.stop())


@pytest.mark.process
@pytest.mark.contract
class TestEmbedded(ServerConformance):
    pass


def run_with_a_long_request(folder, end):
    async def scenario():
        server = create_server("embedded", ServerConfig(model_path=str(folder), num_threads=1))
        await server.start()
        slow_down(server, 1)
        params = SamplingParams(max_new_tokens=4000, ignore_eos=True)
        request = GenerateRequest(request_id="long", prompt_token_ids=(5,), sampling_params=params)
        going = asyncio.create_task(server.generate(request))
        await asyncio.sleep(0)
        await end(server)
        async with asyncio.timeout(60):
            with pytest.raises(ServerLostError):
                await going
        for call in (server.check_health(), server.abort(), server.generate(request)):
            with pytest.raises(ServerLostError):
                await call
        await server.stop()

    asyncio.run(scenario())


def test_a_request_that_came_with_the_stop_is_told(long_folder):
    run_with_a_long_request(long_folder, lambda server: server.stop())


def test_an_engine_whose_thread_ended_is_lost_and_blocks_nothing(long_folder, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    async def end(server):
        await server.abort(["nobody"])  # the request is in flight
        await server.check_health()
        server.requests.thread.call(lambda _: sys.exit("a fault of our own"))
        await asyncio.to_thread(server.requests.thread._thread.join)
        with pytest.raises(ServerLostError, match="has ended"):
            await server.check_health()

    run_with_a_long_request(long_folder, end)
