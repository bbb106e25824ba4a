"""The OpenAI backend: against the embedded server's own endpoint, and a server that gives text alone."""

import asyncio
import json
import math
import urllib.request
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web

from rl_bench.waiting import until_async
from rl_rollout import (
    ConfigError,
    FinishReason,
    GenerateRequest,
    GenerationError,
    RequestError,
    RequestTimeoutError,
    SamplingParams,
    ServerConfig,
    ServerLostError,
    ServerStartError,
    UnsupportedError,
    create_server,
)
from rl_rollout.backends.openai import Gathered
from rl_rollout.testing import FakeReceiver, load_weights
from rl_rollout.testing.conformance import in_time

KEY = "a-secret"


def request(request_id="r", prompt=(5, 6, 7), timeout_s=None, returns_prompt_logprobs=False, **params):
    params = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True} | params
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(**params),
        timeout_s=timeout_s,
        returns_prompt_logprobs=returns_prompt_logprobs,
    )


def client_of(url, model="tiny-qwen3", **options):
    options = {"url": url, "api_key_variable": "TEST_ROLLOUT_KEY", "max_retries": 0} | options
    return create_server("openai", ServerConfig(model_path=model, options=options, timeout_s=60))


@pytest.fixture(scope="module")
def site(qwen3_folder):
    """The served one, a client of its URL, and how to run both."""
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_ROLLOUT_KEY", KEY)
        config = ServerConfig(model_path=str(qwen3_folder), num_threads=1, api_token=KEY)
        served = create_server("embedded", config)
        url = runner.run(served.start()).url + "/v1"
        client = client_of(url, tokenizer=str(qwen3_folder))
        runner.run(client.start())
        yield served, client, runner.run, url
        runner.run(client.stop())
        runner.run(served.stop())


def test_it_finds_out_what_the_url_can_do(site):
    can = site[1].capabilities
    assert (can.takes_token_ids, can.gives_prompt_logprobs) == (True, True)
    assert (can.updates_weights, can.pauses, can.has_logprobs, can.sleep_levels) == (False, False, False, ())


@pytest.mark.process
def test_it_gives_what_the_served_one_gives(site):
    served, client, run, _ = site
    for params in ({}, {"temperature": 1.0, "seed": 3}, {"max_new_tokens": 300}):
        want, got = run(served.generate(request(**params))), run(client.generate(request(**params)))
        assert got.token_ids == want.token_ids
        assert got.finish_reason is want.finish_reason
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-5)
        assert set(got.weight_versions) == {-1}


def test_logprobs_of_an_unknown_distribution_are_no_numbers(site):
    served, client, run, _ = site
    asked = request(temperature=0.7, top_k=10, seed=1)
    got = run(client.generate(asked))
    assert got.token_ids == run(served.generate(asked)).token_ids
    assert all(map(math.isnan, got.logprobs))


def test_a_teacher_scores_a_prompt(site):
    served, client, run, _ = site
    asked = request(prompt=(5, 9, 13, 6), returns_prompt_logprobs=True)
    want, got = run(served.generate(asked)), run(client.generate(asked))
    assert len(got.prompt_logprobs) == 3
    assert got.prompt_logprobs == pytest.approx(want.prompt_logprobs, abs=1e-5)


def test_an_aborted_request_returns_what_has_come(site):
    served, client, run, _ = site

    async def scenario():
        task = asyncio.create_task(client.generate(request(max_new_tokens=240)))
        await until_async(lambda: task.done() or served.status()["num_running"])
        await served.pause("keep")
        await client.abort(["r", "nobody"])
        output = await task
        await served.resume()
        return output

    output = in_time(lambda: run(scenario()), lambda found: found.finish_reason is FinishReason.ABORT)
    assert len(output.token_ids) == len(output.logprobs) < 240
    assert output.token_ids == run(served.generate(request(max_new_tokens=240))).token_ids[: len(output.token_ids)]


def test_text_for_judges(site, qwen3_folder):
    _, client, run, _ = site
    params = SamplingParams(max_new_tokens=12, temperature=0.0)
    said = run(client.chat([{"role": "user", "content": "1+2="}], params))
    assert said == run(client.complete("1+2=", params))
    assert said.text
    assert (said.num_prompt_tokens, said.num_completion_tokens) == (4, 12)
    with pytest.raises(UnsupportedError, match="top_k"):
        run(client.complete("1+2=", SamplingParams(top_k=3)))


def test_it_answers_at_an_endpoint_of_its_own(site):
    served, client, run, _ = site
    url = run(client.start()).url

    def post():
        body = json.dumps({"prompt_token_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "temperature": 0}})
        with urllib.request.urlopen(urllib.request.Request(f"{url}/generate", body.encode()), timeout=30) as answer:
            return json.load(answer)

    assert run(asyncio.to_thread(post))["token_ids"] == list(
        run(served.generate(request(max_new_tokens=4, ignore_eos=False))).token_ids
    )


@pytest.mark.parametrize(
    "control",
    [
        lambda client: client.pause("keep"),
        lambda client: client.resume(),
        lambda client: client.update_weights(FakeReceiver({}), 1),
        lambda client: client.sleep(),
        lambda client: client.wake(),
    ],
)
def test_it_is_not_for_training(site, control):
    _, client, run, url = site
    with pytest.raises(UnsupportedError, match=f"{url} is not ours to control; train with the backend embedded"):
        run(control(client))


@pytest.mark.process
def test_bad_requests_and_deadlines(site):
    served, client, run, _ = site
    with pytest.raises(RequestError, match="empty"):
        run(client.generate(request(prompt=())))
    with pytest.raises(RequestError, match="context length is 256 tokens"):
        run(client.generate(request(prompt=(5,) * 256)))
    with pytest.raises(RequestError, match="999 is outside the vocabulary"):
        run(client.generate(request(prompt=(999,))))
    run(served.pause("keep"))
    with pytest.raises(RequestTimeoutError, match=r"no token within 0\.2 s.*raise timeout_s"):
        run(client.generate(request(timeout_s=0.2)))
    run(served.resume())


def test_weights_with_nan_are_an_error_and_the_next_ones_serve(site, qwen3_folder):
    served, client, run, _ = site
    weights, want = load_weights(qwen3_folder), run(client.generate(request()))
    version = served.status()["weight_version"]
    spoilt = {**weights, "model.norm.weight": torch.full_like(weights["model.norm.weight"], math.nan)}
    run(served.update_weights(FakeReceiver(spoilt), version + 1))
    with pytest.raises(GenerationError, match="not finite"):
        run(client.generate(request()))
    run(served.update_weights(FakeReceiver(weights), version + 2))
    assert run(client.generate(request())).token_ids == want.token_ids


@pytest.mark.process
def test_a_full_cache_is_told_and_a_request_that_fits_is_served(qwen3_folder):
    config = ServerConfig(model_path=str(qwen3_folder), num_threads=1, kv_cache_bytes=2**14)  # 64 tokens

    async def scenario():
        served = create_server("embedded", config)
        client = client_of((await served.start()).url + "/v1", tokenizer=str(qwen3_folder))
        try:
            await client.start()
            with pytest.raises(
                RequestError, match="it needs 83 tokens of cache and there are 64; raise kv_cache_bytes"
            ):
                await client.generate(request(max_new_tokens=80))
            alone = await client.generate(request(max_new_tokens=40))
            return alone, await asyncio.gather(*(client.generate(request(str(i), max_new_tokens=40)) for i in range(4)))
        finally:
            await client.stop()
            await served.stop()

    alone, outputs = asyncio.run(scenario())
    assert [output.token_ids for output in outputs] == [alone.token_ids] * 4
    assert len(alone.token_ids) == 40


def test_a_port_in_use(site):
    _, _, run, url = site
    port = int(url.split(":")[2].split("/")[0])
    options = {"url": url, "api_key_variable": "TEST_ROLLOUT_KEY"}
    other = create_server("openai", ServerConfig(model_path="tiny-qwen3", options=options, port=port))
    with pytest.raises(ServerStartError, match=f"port {port} of 127.0.0.1 cannot be bound"):
        run(other.start())


@pytest.mark.parametrize("field", ["max_num_seqs", "seed", "num_threads", "kv_cache_bytes"])
def test_settings_of_whoever_started_the_url_are_refused(field):
    with pytest.raises(ConfigError, match=f"{field}=7: the model at a URL is started outside of this run"):
        create_server("openai", ServerConfig(model_path="m", options={"url": "http://x/v1"}, **{field: 7}))


@pytest.mark.parametrize("told", [None, -9999.0])
def test_logprobs_that_are_no_numbers_are_an_error(told):
    logprobs = SimpleNamespace(token_logprobs=[-0.5, told])
    found = Gathered(request())
    found.add(SimpleNamespace(token_ids=[5, 6], logprobs=logprobs, finish_reason="stop"))
    with pytest.raises(GenerationError, match="not finite"):
        found.output(is_aborted=False)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"url": None}, "needs the option url"),
        ({"url": "localhost:1"}, "needs the option url"),
        ({"url": "http://x/v1", "api_key": "k"}, "did you mean 'api_key_variable'"),
    ],
)
def test_bad_settings(options, told):
    with pytest.raises(ConfigError, match=told):
        create_server("openai", ServerConfig(model_path="m", options=options))


def test_what_is_wrong_with_a_url_is_told_at_start(site, monkeypatch):
    _, _, run, url = site
    with pytest.raises(ServerStartError, match="no model 'gpt-9'; it has: tiny-qwen3"):
        run(client_of(url, model="gpt-9").start())
    with pytest.raises(ServerStartError, match="does not list its models"):
        run(client_of("http://127.0.0.1:9/v1").start())
    monkeypatch.setenv("TEST_ROLLOUT_KEY", "wrong")
    with pytest.raises(ServerStartError, match="bearer token"):
        run(client_of(url).start())


class TextOnly:
    """A server of text: it knows no `return_token_ids`, and refuses or ignores it."""

    def __init__(self, refuses):
        self.refuses = refuses

    async def models(self, request):
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def completions(self, request):
        body = await request.json()
        if self.refuses and ("return_token_ids" in body or isinstance(body["prompt"], list)):
            return web.json_response({"error": {"message": "unknown field"}}, status=400)
        choice = {"index": 0, "text": "three", "finish_reason": "stop", "logprobs": None}
        usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
        return web.json_response({"id": "c", "object": "text_completion", "choices": [choice], "usage": usage})

    async def overloaded(self, request):
        return web.json_response({"error": {"message": "too many requests"}}, status=429)


@pytest.mark.parametrize("refuses", [True, False])
def test_a_text_server_is_refused_for_tokens_and_serves_text(refuses):
    async def scenario():
        fake, app = TextOnly(refuses), web.Application()
        app.add_routes(
            [
                web.get("/v1/models", fake.models),
                web.post("/v1/completions", fake.completions),
                web.post("/v1/chat/completions", fake.overloaded),
            ]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        client = client_of(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", model="m")
        await client.start()
        try:
            assert not client.capabilities.takes_token_ids
            with pytest.raises(UnsupportedError, match="nothing of it can be trained on; use chat or complete"):
                await client.generate(request())
            with pytest.raises(ServerLostError, match="too many requests"):
                await client.chat([{"role": "user", "content": "?"}])
            return await client.complete("1+2=")
        finally:
            await client.stop()
            await runner.cleanup()

    assert asyncio.run(scenario()).text == "three"
