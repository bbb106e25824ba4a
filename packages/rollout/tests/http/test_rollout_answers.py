"""Answers of other servers: bounded, decompressed within the bound, and checked; one error with the URL."""

import asyncio
import gzip
import json
import resource
import zlib

import pytest
from aiohttp import web

import rl_rollout
from rl_rollout import FinishReason, GenerateRequest, GenerationError, RolloutError, SamplingParams, TokenOutput
from rl_rollout.http.body import MOST_BYTES, AnswerBody
from rl_rollout.types import ServerConfig
from rl_rollout.validation import check_answer

REQUEST = GenerateRequest(request_id="r", prompt_token_ids=(1, 2, 3), sampling_params=SamplingParams(max_new_tokens=2))
FINE = {"token_ids": [4, 5], "logprobs": [-0.5, -1], "weight_versions": [0, 0], "finish_reason": "stop"}
BOMB = gzip.compress(bytes(MOST_BYTES + 1))
HEALTH = {"status": "ok", "model": "m", "pid": 1, "capabilities": {}}


def answers(body, *, health=HEALTH, encoding=None):
    """What a client makes of a server that answers so."""

    async def respond(request):
        if request.path == "/health":
            return web.json_response(health) if isinstance(health, dict) else web.Response(body=health)
        headers = {} if encoding is None else {"Content-Encoding": encoding}
        return web.Response(body=body, headers=headers)

    async def main():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", respond)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server = rl_rollout.connect_server(f"http://127.0.0.1:{runner.addresses[0][1]}", timeout_s=20.0)
        try:
            await server.start()
            return await server.generate(REQUEST)
        finally:
            await server.stop()
            await runner.cleanup()

    return asyncio.run(main())


def line(**changed):
    return json.dumps({"request_id": "r", **FINE, **changed}).encode() + b"\n"


@pytest.mark.process
def test_a_good_answer_is_taken_compressed_or_not():
    assert answers(line()).token_ids == (4, 5)
    assert answers(gzip.compress(line()), encoding="gzip").token_ids == (4, 5)
    assert answers(zlib.compress(line()), encoding="deflate").token_ids == (4, 5)


@pytest.mark.process
@pytest.mark.parametrize(
    ("body", "encoding", "words"),
    [
        (BOMB, "gzip", f"sent more than {MOST_BYTES} bytes"),
        (b"no gzip", "gzip", "cannot be decompressed"),
        (line(), "br", "in the encoding 'br'; identity, gzip and deflate are read"),
        (line(token_ids=[4, -1]), None, r"the token id -1, which is outside the vocabulary"),
        (line(token_ids=[4, 1 << 40]), None, "outside the vocabulary"),
        (line(logprobs=[-0.5, 0.7]), None, "the log-prob 0.7, which is above 0"),
        (line(logprobs=[-0.5]), None, "1 log-probs and 2 versions of 2 tokens"),
        (line(weight_versions=[0]), None, "2 log-probs and 1 versions of 2 tokens"),
        (line(token_ids=[4] * 3, logprobs=[-1] * 3, weight_versions=[0] * 3), None, "3 tokens, and 2 were asked for"),
        (line(prompt_logprobs=[-1.0, -2.0]), None, "2 log-probs of the prompt, and 0 were asked for"),
        (line(top_logprobs=[[[4, -0.5]]]), None, "likeliest tokens of 1 places of 2"),
        (line(request_id="other"), None, "answered request 'other', which it was not asked"),
        (b'{"request_id": "r"}\n', None, "answered with no known message"),
        (b"[" * 100_000 + b"\n", None, "answered with no known message"),
        (b"\xff\xfe\n", None, "answered with no known message"),
    ],
)
def test_an_answer_that_cannot_be_is_one_error_with_the_url(body, encoding, words):
    with pytest.raises(RolloutError, match=words) as raised:
        answers(body, encoding=encoding)
    assert "http://127.0.0.1:" in str(raised.value)


@pytest.mark.process
@pytest.mark.parametrize(
    ("health", "words"),
    [
        ({"status": "ok"}, "answered without model and pid"),
        ({**HEALTH, "capabilities": {"pauses": 3}}, "capabilities"),
        (b"<html>", "answered with no JSON"),
        (b"[]", "answered with list, and not with a JSON object"),
    ],
)
def test_a_health_that_is_none_is_one_error_with_the_url(health, words):
    with pytest.raises(RolloutError, match=words) as raised:
        answers(line(), health=health)
    assert "http://127.0.0.1:" in str(raised.value)


def test_a_bomb_takes_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    body = AnswerBody("gzip", url="http://x", most_bytes=1 << 20)
    with pytest.raises(GenerationError, match="http://x sent more than 1048576 bytes"):
        body.feed(BOMB)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"token_ids": (4, 9)}, r"the token id 9, which is outside the vocabulary \[0, 6\)"),
        ({"token_ids": (4, True)}, "the token id True"),
        ({"logprobs": (-1.0, "a")}, "the log-prob 'a'"),
        ({"top_logprobs": (((9, -1.0),), ())}, "the token id 9"),
        ({"top_logprobs": (((4, 1.0),), ())}, "the log-prob 1.0"),
        ({"prompt_logprobs": (-1.0,)}, "1 log-probs of the prompt, and 0"),
    ],
)
def test_an_output_is_held_to_its_request(changed, words):
    fields = {"request_id": "r", "token_ids": (4, 5), "logprobs": (-1.0, -1.0), "weight_versions": (0, 0)}
    output = TokenOutput(**{**fields, "finish_reason": FinishReason.STOP, **changed})
    with pytest.raises(GenerationError, match=f"request 'r': http://x answered with .*{words}"):
        check_answer(REQUEST, output, "http://x", vocab_size=6)


def complete(choice, *, encoding=None, raw=None):
    """What the OpenAI client makes of such a completion."""

    async def respond(request):
        if request.path.endswith("/models"):
            return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})
        asked = await request.json()
        if asked.get("stream") or raw is not None:
            event = {"id": "c", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}
            data = raw if raw is not None else b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n"
            if not asked.get("stream"):
                data = json.dumps({**event, "choices": [{"index": 0, "text": "", "finish_reason": "stop",
                                                         "token_ids": [1]}]}).encode()  # fmt: skip
                return web.Response(body=data, content_type="application/json")
            headers = {"Content-Type": "text/event-stream"} | ({"Content-Encoding": encoding} if encoding else {})
            return web.Response(body=data, headers=headers)
        first = {"index": 0, "text": "", "finish_reason": "stop", "token_ids": [1]}
        return web.json_response(
            {"id": "c", "object": "text_completion", "created": 0, "model": "m", "choices": [first]}
        )

    async def main():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", respond)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        options = {"url": url, "max_retries": 0}
        server = rl_rollout.create_server("openai", ServerConfig(model_path="m", max_model_len=64, options=options))
        try:
            await server.start()
            return await server.generate(REQUEST)
        finally:
            await server.stop()
            await runner.cleanup()

    return asyncio.run(main())


def choice(ids=(4, 5), logprobs=(-0.5, -1.0), **changed):
    told = {"token_logprobs": list(logprobs), "tokens": ["a"] * len(logprobs), "top_logprobs": [], "text_offset": []}
    return {"index": 0, "text": "", "finish_reason": "stop", "token_ids": list(ids), "logprobs": told, **changed}


@pytest.mark.process
def test_a_good_completion_of_a_url_is_taken():
    assert complete(choice()).token_ids == (4, 5)


@pytest.mark.process
@pytest.mark.parametrize(
    ("made", "options", "words"),
    [
        (choice(ids=(4, -5)), {}, "the token id -5"),
        (choice(ids=(4, "x")), {}, "the token id 'x'"),
        (choice(logprobs=(-0.5, 3.0)), {}, "the log-prob 3.0"),
        (choice(logprobs=(-0.5, "a")), {}, "not an OpenAI completion"),
        (choice(logprobs=(-0.5,)), {}, "1 log-probs of 2 tokens"),
        (choice(ids=(4, 5, 6), logprobs=(-1, -1, -1)), {}, "more than 2 tokens"),
        (choice(logprobs=(-0.5, -1.0), token_ids=3), {}, "not an OpenAI completion"),
        (None, {"raw": b"data: {nonsense\n\n"}, "not an OpenAI completion"),
        (None, {"raw": BOMB, "encoding": "gzip"}, "sent more than"),
    ],
)
def test_a_completion_that_cannot_be_is_one_error_with_the_url(made, options, words):
    with pytest.raises(RolloutError, match=words) as raised:
        complete(made, **options)
    assert "http://127.0.0.1:" in str(raised.value)
