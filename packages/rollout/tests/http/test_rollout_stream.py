"""Tokens as they come: over HTTP, and through a router that loses replicas on the way."""

import asyncio
from contextlib import aclosing

import pytest

from rl_rollout import (
    FinishReason,
    GenerateRequest,
    RequestError,
    Router,
    SamplingParams,
    ServerConfig,
    ServerLostError,
    TokenChunk,
    connect_server,
    create_server,
)
from rl_rollout.testing import FakeServer

WAIT_S = 60.0


def request(request_id="r", prompt=(5, 6), **params):
    params = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True} | params
    return GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=SamplingParams(**params))


def ids_of(chunks):
    return tuple(i for chunk in chunks for i in chunk.token_ids)


# ---- HTTP


@pytest.fixture(scope="module")
def site(long_folder):
    """A server and its client."""
    with asyncio.Runner() as runner:
        server = create_server("embedded", ServerConfig(model_path=str(long_folder), num_threads=1))
        client = connect_server(runner.run(server.start()).url)
        yield runner.run, server, client
        runner.run(client.stop())
        runner.run(server.stop())


def test_the_client_hands_tokens_on_one_by_one(site):
    run, server, client = site

    async def scenario():
        return await server.generate(request()), [chunk async for chunk in client.generate_stream(request())]

    whole, chunks = run(scenario())
    assert ids_of(chunks) == whole.token_ids
    assert tuple(x for chunk in chunks for x in chunk.logprobs) == whole.logprobs
    assert [len(chunk.token_ids) for chunk in chunks] == [1] * 8
    assert [chunk.finish_reason for chunk in chunks] == [None] * 7 + [FinishReason.LENGTH]


def test_an_abort_ends_a_stream_with_its_reason(site):
    run, _, client = site

    async def scenario():
        chunks = []
        async with aclosing(client.generate_stream(request(max_new_tokens=1900))) as stream:
            async for chunk in stream:
                chunks.append(chunk)
                if len(chunks) == 3:
                    await client.abort(["r"])
        return chunks

    chunks = run(scenario())
    assert chunks[-1].finish_reason is FinishReason.ABORT
    assert 3 <= len(ids_of(chunks)) < 1900


def test_leaving_a_stream_ends_its_request_in_the_server(site):
    run, _, client = site

    async def scenario():
        async with aclosing(client.generate_stream(request(max_new_tokens=1900))) as stream:
            await anext(stream)
            assert (await client.health())["num_running"] == 1
        async with asyncio.timeout(WAIT_S):
            while (await client.health())["num_running"]:  # noqa: ASYNC110  it is the server's to tell
                await asyncio.sleep(0.01)
        return await client.generate(request())  # the id may be used again

    assert len(run(scenario()).token_ids) == 8


def test_a_stream_reports_errors_and_refuses_an_active_id(site):
    run, _, client = site

    async def first(stream):
        async with aclosing(stream):
            return await anext(stream)

    async def twice():
        async with aclosing(client.generate_stream(request(max_new_tokens=1900))) as stream:
            await anext(stream)
            await first(client.generate_stream(request()))

    with pytest.raises(RequestError, match="the prompt is empty"):
        run(first(client.generate_stream(request(prompt=()))))
    with pytest.raises(RequestError, match="'r' is in flight already"):
        run(twice())
    nobody = connect_server("http://127.0.0.1:9")
    with pytest.raises(ServerLostError, match="is not there or closed the connection"):
        run(first(nobody.generate_stream(request())))
    run(nobody.stop())


# ---- the router


class Counting(FakeServer):
    """Streams prompt length, prompt length + 1, ...: what comes next depends on what came before.

    Args:
        dies_after: Is lost after so many tokens of a stream; None never.
    """

    def __init__(self, dies_after=None):
        super().__init__(self.script)
        self.dies_after = dies_after

    @staticmethod
    def script(request):
        start = len(request.prompt_token_ids)
        return range(start, start + request.sampling_params.max_new_tokens)

    async def generate_stream(self, request):
        self.requests.append(request)
        tokens = list(self.script(request))
        for index, token in enumerate(tokens):
            if index == self.dies_after:
                raise ServerLostError("it died")
            reason = FinishReason.LENGTH if index == len(tokens) - 1 else None
            yield TokenChunk(token_ids=(token,), logprobs=(-0.5,), weight_versions=(0,), finish_reason=reason)


async def routed(servers, **settings):
    router = Router(servers, **settings)
    await router.start()
    return router


@pytest.mark.promise("A stream goes on elsewhere; leaving it ends the request")
def test_a_stream_continues_elsewhere_from_its_tokens():
    async def scenario():
        servers = [Counting(dies_after=3), Counting(dies_after=2), Counting()]
        router = await routed(servers)
        chunks = [chunk async for chunk in router.generate_stream(request())]
        return chunks, [len(server.requests[0].prompt_token_ids) for server in servers], len(router.servers)

    chunks, prompts, num_left = asyncio.run(scenario())
    assert ids_of(chunks) == tuple(range(2, 10))
    assert [chunk.finish_reason for chunk in chunks] == [None] * 7 + [FinishReason.LENGTH]
    assert prompts == [2, 5, 7]
    assert num_left == 1


def test_a_stream_whose_replicas_are_all_lost_says_so():
    async def scenario():
        router = await routed([Counting(dies_after=3), Counting(dies_after=2)])
        chunks = []

        async def collect():
            async for chunk in router.generate_stream(request()):
                chunks.append(chunk)

        with pytest.raises(ServerLostError, match="all 2 replicas are lost; the last one: it died"):
            await collect()
        return chunks

    assert ids_of(asyncio.run(scenario())) == (2, 3, 4, 5, 6)


def test_a_stream_holds_its_place_until_it_is_left():
    async def scenario():
        router = await routed([Counting()], max_in_flight=1)
        async with aclosing(router.generate_stream(request("first"))) as stream:
            await anext(stream)
            waiting = asyncio.create_task(router.generate(request("second")))
            await asyncio.sleep(0.01)
            was_done = waiting.done()
        return was_done, await waiting

    was_done, output = asyncio.run(scenario())
    assert not was_done
    assert len(output.token_ids) == 8


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_abort_meets_what_waits_for_a_replica(is_streamed):
    async def scenario():
        router = await routed([Counting()], max_in_flight=1)
        async with aclosing(router.generate_stream(request("first"))) as stream:
            await anext(stream)
            second = router.generate_stream(request("second"))
            waiting = asyncio.create_task(anext(second) if is_streamed else router.generate(request("second")))
            await asyncio.sleep(0.01)
            await router.abort(["second"])
            async with asyncio.timeout(WAIT_S):
                output = await waiting
        await second.aclose()
        return output

    output = asyncio.run(scenario())
    assert (output.token_ids, output.finish_reason) == ((), FinishReason.ABORT)
