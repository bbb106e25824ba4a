"""The HTTP endpoint of an embedded server: the client, plain HTTP, and OpenAI's own Python client."""

import asyncio
import json
import socket
from types import SimpleNamespace

import aiohttp
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rl_rollout import (
    FinishReason,
    GenerateRequest,
    RequestError,
    RequestTimeoutError,
    RolloutError,
    SamplingParams,
    ServerConfig,
    ServerLostError,
    ServerStartError,
    connect_server,
    create_server,
)

TOKEN = "a-secret"
HI = {"role": "user", "content": "1+1"}


@pytest.fixture(scope="module")
def site(qwen3_folder):
    """A server with a token, its URL, and a client."""
    with asyncio.Runner() as runner:
        config = ServerConfig(model_path=str(qwen3_folder), num_threads=1, api_token=TOKEN)
        server = create_server("embedded", config)
        url = runner.run(server.start()).url
        client = connect_server(url, api_token=TOKEN, timeout_s=60)
        yield SimpleNamespace(server=server, url=url, client=client, run=runner.run, config=config)
        runner.run(client.stop())
        runner.run(server.stop())


def request(request_id="r", prompt=(5, 6, 7), **params):
    params = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True} | params
    return GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=SamplingParams(**params))


async def post(site, path, body, token=TOKEN):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(site.url + path, data=data) as response,
    ):
        return response.status, await response.json()


def test_the_client_gives_what_the_server_gives(site):
    params = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 4, "stop_token_ids": (9,), "max_new_tokens": 30}
    assert site.run(site.client.generate(request(**params))) == site.run(site.server.generate(request(**params)))


def test_requests_of_one_turn_travel_together(site):
    async def scenario():
        sent = []
        real = site.client._send_batch
        site.client._send_batch = lambda batch: sent.append(len(batch)) or real(batch)
        try:
            return sent, await asyncio.gather(*(site.client.generate(request(f"r{i}", seed=i)) for i in range(300)))
        finally:
            del site.client._send_batch

    sent, outputs = site.run(scenario())
    assert sent == [300]
    assert [output.request_id for output in outputs] == [f"r{i}" for i in range(300)]


def test_a_bad_request_in_a_batch_spoils_no_other(site):
    async def scenario():
        requests = [request("a"), request("b", prompt=()), request("a"), request("c")]
        return await asyncio.gather(*map(site.client.generate, requests), return_exceptions=True)

    good, empty, twice, other = site.run(scenario())
    assert good.token_ids == other.token_ids
    assert isinstance(empty, RequestError)
    assert isinstance(twice, RequestError)
    assert "in flight already" in str(twice)


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/generate", {"prompt_token_ids": [5], "sampling_params": {"temprature": 1}}, "did you mean 'temperature'"),
        (
            "/generate",
            {"prompt_token_ids": [5], "sampling_params": {"top_k": 1.5}},
            "Expected `int`, got `float` - at `$.sampling_params.top_k`",
        ),
        ("/generate", {"prompt_token_ids": "abc"}, "Expected `array`, got `str` - at `$.prompt_token_ids`"),
        ("/generate", {"prompt_token_ids": [5, True]}, "Expected `int`, got `bool` - at `$.prompt_token_ids[1]`"),
        ("/generate", {"prompt": [5]}, "unknown field `prompt`"),
        ("/generate", {}, "prompt_token_ids"),
        ("/generate", {"prompt_token_ids": []}, "empty"),
        ("/generate", b"{", "not JSON"),
        ("/generate", [], "Expected `object`, got `array`"),
        ("/pause", {"mode": "now"}, "abort, wait, keep"),
        ("/sleep", {"level": 3}, "level 3"),
        ("/wake", {"tags": ["all"]}, "weights, kv_cache"),
        ("/update_weights", {"version": 1}, "missing required field `address`"),
        ("/generate", {"prompt_token_ids": [5], "sampling_params": {"stop_token_ids": [2**63]}}, "in 64 bits"),
        ("/generate", {"prompt_token_ids": [5], "sampling_params": {"top_k": 2**63}}, "in 64 bits"),
        ("/generate", {"prompt_token_ids": [5], "sampling_params": {"temperature": 1e-7}}, "1e-06 or above"),
        ("/v1/completions", {"prompt": "1+1", "stream_options": {"include_usage": True}}, "stream=true"),
        ("/v1/chat/completions", {"messages": [HI], "max_tokens": 1, "max_completion_tokens": 2}, "one setting"),
        ("/v1/completions", {"prompt": "1+1", "best_off": 2}, "unknown field `best_off`; did you mean 'best_of'"),
        ("/v1/completions", {"prompt": "1+1", "min_p": 1.5}, "min_p=1.5 must be 0 (off) to 1"),
        ("/v1/completions", {"prompt": "1+1", "model": "other"}, "'other' is not served here"),
        ("/v1/completions", {"prompt": "1+1", "stop": [""]}, "must not be empty"),
        ("/v1/completions", {"prompt": "1+1", "prompt_logprobs": 0, "stop": "1"}, "goes without stream and stop"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "text or image_url"),
    ],
)
def test_bad_input_gets_400_and_a_sentence(site, path, body, told):
    status, answer = site.run(post(site, path, body))
    assert status == 400
    assert answer["error"]["type"] == "RequestError"
    assert told in answer["error"]["message"]


def test_a_failed_update_is_told_over_http(site):
    status, answer = site.run(post(site, "/update_weights", {"address": "nope://x", "version": 1}))
    assert status == 409
    assert "version 0 still serves" in answer["error"]["message"]


def test_an_unknown_path_gets_a_sentence(site):
    status, answer = site.run(post(site, "/generat", {}))
    assert status == 404
    assert "/generat" in answer["error"]["message"]


@pytest.mark.promise("Beyond loopback a token is asked for everywhere but at `/health`")
def test_the_token_is_asked_for_everywhere_but_at_health(site):
    status, answer = site.run(post(site, "/generate", {"prompt_token_ids": [5]}, token="wrong"))
    assert status == 401
    assert "bearer token" in answer["error"]["message"]
    stranger = connect_server(site.url)
    assert site.run(stranger.health())["weight_version"] == 0
    with pytest.raises(RolloutError, match="bearer token"):
        site.run(stranger.generate(request()))
    site.run(stranger.stop())


def test_metrics_are_prometheus_text(site):
    from prometheus_client.parser import text_string_to_metric_families

    async def scenario():
        await site.client.generate(request())
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session,
            session.get(f"{site.url}/metrics") as response,
        ):
            return await response.text()

    samples = {
        (sample.name, sample.labels.get("path"), sample.labels.get("status")): sample.value
        for family in text_string_to_metric_families(site.run(scenario()))
        for sample in family.samples
    }
    assert samples["rl_rollout_num_running", None, None] == 0
    assert samples["rl_rollout_weight_version", None, None] == 0
    assert samples["rl_rollout_http_requests_total", "/generate_batch", "200"] >= 1
    assert ("rl_rollout_pid", None, None) not in samples


@pytest.mark.process
def test_a_request_that_is_late_is_told_and_leaves(site):
    async def scenario():
        await site.client.pause("keep")
        late = GenerateRequest(request_id="late", prompt_token_ids=(5,), timeout_s=0.2)
        try:
            with pytest.raises(RequestTimeoutError, match=r"'late' did not finish within 0\.2 s, its own timeout_s"):
                await site.client.generate(late)
        finally:
            await site.client.resume()
        return await site.client.health()

    assert site.run(scenario())["num_waiting"] == 0


@pytest.mark.promise("A client that left has its request aborted")
@pytest.mark.process
def test_a_caller_that_goes_away_takes_its_request_with_it(site):
    async def scenario():
        await site.client.pause("keep")
        task = asyncio.create_task(site.client.generate(request("gone")))
        await asyncio.sleep(0.1)
        before = (await site.client.health())["num_waiting"]
        task.cancel()
        await asyncio.sleep(0.1)
        after = (await site.client.health())["num_waiting"]
        await site.client.resume()
        return before, after

    assert site.run(scenario()) == (1, 0)


@pytest.mark.process
def test_an_id_may_be_used_again_once_its_caller_has_left(long_folder):
    """Each gets its own answer, and none is aborted by what the one before left behind."""

    async def scenario():
        server = create_server("embedded", ServerConfig(model_path=str(long_folder), num_threads=1))
        client = connect_server(await server.start())
        await client.start()
        try:
            for asked in (server, client):
                want = await asked.generate(request("alone", prompt=(9,)))
                for _ in range(8):
                    task = asyncio.create_task(asked.generate(request("again", max_new_tokens=4000)))
                    await asyncio.sleep(0.02)
                    task.cancel()
                    await asyncio.wait([task])
                    assert task.cancelled()
                    found = await asked.generate(request("again", prompt=(9,)))
                    assert (found.token_ids, found.finish_reason) == (want.token_ids, FinishReason.LENGTH)
        finally:
            await client.stop()
            await server.stop()

    asyncio.run(scenario())


def test_a_server_that_is_not_there(site):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        client = connect_server(url)
        with pytest.raises(ServerLostError, match=url):
            site.run(client.generate(request()))
        with pytest.raises(ServerLostError, match=url):
            site.run(client.start())
        site.run(client.stop())


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            b'{"request_id": "r", "finished": true}',
            'answered with no known message: {"request_id": "r", "finished": true}',
        ),
        (b'+{"request_id": "r", "token_ids": "5"}', "answered with no known message"),
        (b'{"error": {"type": "RequestError", "message": "no", "code": 400}, "request_id": "r"}', "^no$"),
    ],
)
def test_an_invalid_reply_ends_the_request_with_a_clear_error(line, told):
    async def answer(request):
        return web.Response(body=line + b"\n")

    async def scenario():
        app = web.Application()
        app.router.add_post("/generate_batch", answer)
        async with TestServer(app) as server:
            client = connect_server(str(server.make_url("")))
            try:
                await client.generate(request())
            finally:
                await client.stop()

    with pytest.raises(RolloutError, match=told):
        asyncio.run(scenario())


def test_a_port_in_use(site, qwen3_folder):
    port = int(site.url.rsplit(":", 1)[1])
    other = create_server("embedded", ServerConfig(model_path=str(qwen3_folder), port=port))
    with pytest.raises(ServerStartError, match=f"port {port} of 127.0.0.1"):
        site.run(other.start())


# ---- OpenAI


@pytest.fixture
def official(site):
    """OpenAI's client, as in its own documentation."""

    def call(work):
        async def scenario():
            async with openai.AsyncOpenAI(
                base_url=f"{site.url}/v1", api_key=TOKEN, max_retries=0, timeout=240
            ) as client:
                return await work(client)

        return site.run(scenario())

    return call


def test_openai_models(official):
    async def work(client):
        return [model.id async for model in client.models.list()]

    assert official(work) == ["tiny-qwen3"]


def test_openai_completion_is_the_same_text_as_the_token_ids(site, official):
    answer = official(
        lambda client: client.completions.create(
            model="tiny-qwen3",
            prompt="1+2=",
            max_tokens=12,
            temperature=0,
            logprobs=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
    )
    (choice,) = answer.choices
    output = site.run(site.server.generate(request(prompt=tuple(choice.prompt_token_ids), max_new_tokens=12)))
    assert tuple(choice.token_ids) == output.token_ids
    assert choice.text == "".join(choice.logprobs.tokens)
    assert choice.logprobs.token_logprobs == pytest.approx(output.logprobs, abs=1e-5)
    assert choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 12)


def test_openai_prompts_as_token_ids_and_several_choices(official):
    answer = official(
        lambda client: client.completions.create(
            model="tiny-qwen3", prompt=[[5, 6], [7, 8]], n=2, max_tokens=6, seed=1, extra_body={"ignore_eos": True}
        )
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) == 4


def test_openai_chat_streamed_and_whole_are_the_same(official):
    messages = [{"role": "user", "content": "what is 1+2?"}]
    settings = {"model": "tiny-qwen3", "messages": messages, "max_tokens": 20, "temperature": 0}

    async def streamed(client):
        stream = await client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})
        return [chunk async for chunk in stream]

    whole = official(lambda client: client.chat.completions.create(**settings))
    *chunks, last = official(streamed)
    assert len(chunks) >= whole.usage.completion_tokens
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage == whole.usage


def test_openai_stop_strings_end_the_text_before_them(official):
    settings = {"model": "tiny-qwen3", "prompt": "1+2=", "max_tokens": 20, "temperature": 0}
    text = official(lambda client: client.completions.create(**settings)).choices[0].text
    stop = text[5:8]
    want = text[: text.index(stop)]

    async def streamed(client):
        stream = await client.completions.create(**settings, stop=[stop, "never"], stream=True)
        return [chunk.choices[0] async for chunk in stream]

    whole = official(lambda client: client.completions.create(**settings, stop=stop)).choices[0]
    pieces = official(streamed)
    assert (whole.text, whole.finish_reason) == (want, "stop")
    assert "".join(piece.text for piece in pieces) == want
    assert pieces[-1].finish_reason == "stop"


def test_openai_a_stop_token_is_no_part_of_the_text(site, official):
    settings = {"model": "tiny-qwen3", "prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0}
    ids = site.run(site.server.generate(request(max_new_tokens=20))).token_ids
    extra = {"stop_token_ids": [ids[4]], "return_token_ids": True, "ignore_eos": True}
    (choice,) = official(lambda client: client.completions.create(**settings, extra_body=extra)).choices
    end = ids.index(ids[4]) + 1
    assert tuple(choice.token_ids) == ids[:end]
    assert len(choice.text) == end - 1
    assert choice.finish_reason == FinishReason.STOP


def test_openai_errors_are_openai_errors(official):
    with pytest.raises(openai.BadRequestError, match="the prompt has 300 tokens"):
        official(lambda client: client.completions.create(model="tiny-qwen3", prompt="1" * 300))
    with pytest.raises(openai.BadRequestError, match="is not served here"):
        official(lambda client: client.completions.create(model="gpt-5", prompt="1"))

    async def streamed(client):
        await client.completions.create(model="tiny-qwen3", prompt=[], stream=True)

    with pytest.raises(openai.BadRequestError, match="empty"):
        official(streamed)
