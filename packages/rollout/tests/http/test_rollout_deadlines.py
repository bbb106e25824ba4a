"""Deadlines: what a request that is late gets, and what counts towards the time that it has."""

import asyncio
import logging

import pytest

from rl_bench.waiting import until_async
from rl_rollout import (
    FinishReason,
    GenerateRequest,
    RequestTimeoutError,
    SamplingParams,
    ServerConfig,
    ServerLostError,
    connect_server,
    create_server,
)

pytestmark = pytest.mark.process


def request(request_id="r", timeout_s=None, **params):
    params = {"max_new_tokens": 4000, "temperature": 0.0, "ignore_eos": True} | params
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=(5, 6, 7),
        sampling_params=SamplingParams(**params),
        timeout_s=timeout_s,
    )


def serve(folder, scenario, **config):
    """Run `scenario(server, client)` on a server of its own and a client of its URL."""

    async def life():
        server = create_server("embedded", ServerConfig(**{"model_path": str(folder), "num_threads": 1, **config}))
        address = await server.start()
        client = connect_server(address)
        await client.start()
        try:
            async with asyncio.timeout(120):
                return await scenario(server, client)
        finally:
            await client.stop()
            await server.stop()

    return asyncio.run(life())


async def streamed(server, asked):
    chunks = [chunk async for chunk in server.generate_stream(asked)]
    return sum(len(chunk.token_ids) for chunk in chunks), chunks[-1].finish_reason


@pytest.mark.promise("A late request gives the tokens so far")
@pytest.mark.parametrize("timeout_s", [None, 0.3])
def test_a_late_request_gets_its_tokens_and_the_reason(long_folder, caplog, timeout_s):
    """By the server's own setting, and by the request's."""

    async def scenario(server, client):
        whole = await server.generate(request(max_new_tokens=8))
        late = await asyncio.gather(*(each.generate(request(f"{each}", timeout_s)) for each in (server, client)))
        told = await asyncio.gather(*(streamed(each, request(f"{each}", timeout_s)) for each in (server, client)))
        return whole, late, told, server.status()

    with caplog.at_level(logging.WARNING, "rl_rollout"):
        whole, late, told, status = serve(long_folder, scenario, timeout_s=0.3 if timeout_s is None else 60.0)
    for output in late:
        assert output.finish_reason is FinishReason.TIMEOUT
        count = len(output.token_ids)
        assert 0 < count < 4000
        assert output.token_ids[:8] == whole.token_ids[:count]
        assert len(output.logprobs) == len(output.weight_versions) == count
    assert all(reason is FinishReason.TIMEOUT and count > 0 for count, reason in told)
    assert status["num_running"] == status["num_waiting"] == 0
    assert ("timeout_s=0.3 s" in caplog.text) == (timeout_s is None)


@pytest.mark.promise("The queue, pauses and sleep do not count towards generating")
def test_time_in_the_queue_does_not_count_towards_generating(long_folder):
    """Four requests one after another: the last waits longer than one may generate, and is whole."""

    async def scenario(server, client):
        del client
        asked = [request(f"r{i}", max_new_tokens=4000) for i in range(4)]
        return await asyncio.gather(*map(server.generate, asked))

    outputs = serve(long_folder, scenario, max_num_seqs=1, timeout_s=0.3)
    assert all(output.finish_reason is FinishReason.TIMEOUT and output.token_ids for output in outputs)


def test_time_while_paused_or_asleep_does_not_count(long_folder):
    async def scenario(server, client):
        going = asyncio.create_task(client.generate(request(max_new_tokens=100)))
        await server.pause("keep")
        await asyncio.sleep(0.4)
        await server.resume()
        await server.sleep(1)
        await asyncio.sleep(0.4)
        await server.wake()
        return await going

    assert serve(long_folder, scenario, timeout_s=30.0).finish_reason is FinishReason.LENGTH


def test_the_engine_s_clock_stops_while_computing_is_not_allowed(long_folder):
    async def scenario(server, client):
        del client
        going = asyncio.create_task(server.generate(request(max_new_tokens=4000)))
        await until_async(lambda: server.engine.num_running)
        await server.pause("keep")
        before = server.engine.clock.seconds
        await asyncio.sleep(0.2)
        after = server.engine.clock.seconds
        await server.abort()
        await going
        await server.resume()
        return after - before

    assert serve(long_folder, scenario) == 0


def test_a_missing_turn_is_an_error_that_names_the_setting(long_folder):
    async def scenario(server, client):
        going = asyncio.create_task(server.generate(request("first")))
        await asyncio.sleep(0)
        for each, ask in ((server, server.generate), (client, client.generate)):
            with pytest.raises(RequestTimeoutError, match=r"queue_timeout_s=0\.2 s"):
                await ask(request(f"{each}"))
        with pytest.raises(RequestTimeoutError, match=r"queue_timeout_s=0\.2 s"):
            await streamed(server, request("stream"))
        await server.abort()
        return await going

    assert serve(long_folder, scenario, max_num_seqs=1, queue_timeout_s=0.2).finish_reason is FinishReason.ABORT


def test_a_deadline_before_the_first_token_is_a_named_error(long_folder):
    async def scenario(server, client):
        await server.pause("keep")
        for each in (server, client):
            with pytest.raises(RequestTimeoutError, match=r"within 0\.2 s, its own timeout_s, and has no token"):
                await each.generate(request("late", 0.2))
            with pytest.raises(RequestTimeoutError, match=r"within 0\.2 s, its own timeout_s, and has no token"):
                await streamed(each, request("late", 0.2))
        return server.status()["num_waiting"]

    assert serve(long_folder, scenario) == 0


def test_a_client_waits_while_the_server_beats_and_no_longer(long_folder, monkeypatch):
    """A request waits longer than the client's own deadline: the server tells that it is there. Then it hangs."""
    monkeypatch.setattr("rl_rollout.http.http_server.GRACE_S", 0.0)
    monkeypatch.setattr("rl_rollout.http.endpoint.HEARTBEAT_S", 0.1)

    async def scenario(server, client):
        client.connection.timeout_s = 1.0
        await server.pause("keep")
        waiting = [asyncio.create_task(client.generate(request("a", max_new_tokens=4)))]
        waiting.append(asyncio.create_task(streamed(client, request("b", max_new_tokens=4))))
        await asyncio.sleep(1.5)
        await server.resume()
        output, (count, _) = await asyncio.gather(*waiting)
        monkeypatch.setattr("rl_rollout.http.endpoint.HEARTBEAT_S", 60.0)
        await server.pause("keep")
        with pytest.raises(ServerLostError, match=r"wrote nothing for 1\.0 s"):
            await client.generate(request("c", max_new_tokens=4))
        with pytest.raises((ServerLostError, RequestTimeoutError)):
            await streamed(client, request("d", max_new_tokens=4))
        return len(output.token_ids), count

    assert serve(long_folder, scenario) == (4, 4)
