"""What a server bears: limits with a sentence, and a server that answers `/health` and ends whatever it is asked."""

import asyncio
import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from rl_bench.waiting import until_async
from rl_rollout import (
    ConfigError,
    GenerateRequest,
    RequestError,
    SamplingParams,
    ServerConfig,
    connect_server,
    create_server,
    launch_server,
)
from rl_rollout.backends.embedded.decode_engine import Engine
from rl_rollout.backends.embedded.model.model_runner import load_model
from rl_rollout.reward_server import ScoreServer

DEEP = "[" * 40_000 + "]" * 40_000


@pytest.fixture(scope="module")
def site(qwen3_folder):
    with asyncio.Runner() as runner:
        limits = {"max_completions": 8, "max_stops": 4, "max_top_logprobs": 5, "max_body_bytes": 500_000}
        server = create_server("embedded", ServerConfig(model_path=str(qwen3_folder), num_threads=1, **limits))
        url = runner.run(server.start()).url
        yield server, url, runner.run
        runner.run(server.stop())


def post(url, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


PROMPT = {"prompt": [5, 6], "max_tokens": 2}


@pytest.mark.promise("Every request is bounded, by a setting that the refusal names")
@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/completions", {**PROMPT, "n": 10**6}, "asks for 1000000 sequences, and max_completions=8"),
        ("/v1/completions", {**PROMPT, "n": 10**30}, "and max_completions=8"),
        ("/v1/completions", {**PROMPT, "prompt": [[5]] * 9}, "asks for 9 sequences, and max_completions=8"),
        ("/v1/completions", {**PROMPT, "prompt": ["1"] * 3, "n": 3}, "asks for 9 sequences"),
        ("/v1/completions", {**PROMPT, "best_of": 10**6}, "best_of=1000000 is not supported"),
        ("/v1/completions", {**PROMPT, "max_tokens": 10**12}, "max_tokens=1000000000000 is above max_model_len="),
        ("/v1/completions", {**PROMPT, "prompt": "1" * 100_000}, "longer than max_model_len=256 tokens can be"),
        ("/v1/completions", {**PROMPT, "stop": ["a"] * 5}, "there are 5 stop strings, and max_stops=4"),
        ("/v1/completions", {**PROMPT, "stop_token_ids": [9] * 5}, "asks for 5, and max_stops=4"),
        ("/v1/completions", {**PROMPT, "logprobs": 6}, "asks for 6, and max_top_logprobs=5"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}], "n": 10**6}, "max_completions=8"),
        ("/generate_batch", {"requests": [{}] * 9}, "asks for 9 sequences, and max_completions=8"),
    ],
)
def test_asking_for_too_much_is_a_400_that_names_the_setting(site, path, body, told):
    _, url, run = site
    status, answer = run(asyncio.to_thread(post, url + path, body))
    assert status == 400
    assert told in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/generate", "/generate_batch", "/abort", "/v1/completions", "/v1/chat/completions"])
def test_json_that_is_nested_deeply_is_a_400(site, path):
    _, url, run = site
    for body in (DEEP, f'{{"requests": {DEEP}, "prompt": {DEEP}, "messages": {DEEP}}}'):
        status, answer = run(asyncio.to_thread(post, url + path, body.encode()))
        assert (status, answer["error"]["type"]) == (400, "RequestError")


def test_deeply_nested_arguments_are_an_error_of_the_request(site):
    _, url, run = site
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": DEEP}}
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    body = {"messages": messages, "max_tokens": 1}
    assert run(asyncio.to_thread(post, url + "/v1/chat/completions", body))[0] in (200, 400)


def test_an_oversized_body_is_a_413_that_names_the_setting(site):
    _, url, run = site
    status, answer = run(asyncio.to_thread(post, url + "/generate", b" " * 500_001))
    assert status == 413
    assert "larger than max_body_bytes=500000" in answer["error"]["message"]


def test_a_reward_models_server_has_the_same_limits(tmp_path):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from rl_rollout.testing import write_tiny_model

    path = write_tiny_model(tmp_path)
    config = AutoConfig.from_pretrained(path, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)

    async def main():
        limits = {"max_completions": 3, "max_body_bytes": 500_000}
        server = ScoreServer(ServerConfig(model_path=str(path), num_threads=1, **limits))
        url = (await server.start()).url + "/pooling"
        bodies = (DEEP.encode(), {"input": [[5]] * 4}, b" " * 500_001, f'{{"input": {DEEP}}}'.encode())
        try:
            return [await asyncio.to_thread(post, url, body) for body in bodies]
        finally:
            await server.stop()

    found = asyncio.run(main())
    assert [status for status, _ in found] == [400, 400, 413, 400]
    assert "max_completions=3" in found[1][1]["error"]["message"]
    with pytest.raises(ConfigError, match="reachable from outside; set api_token"):
        ScoreServer(ServerConfig(model_path=str(path), host="0.0.0.0"))


def test_a_request_of_our_own_client_has_the_same_limits(site):
    _, url, run = site
    params = SamplingParams(max_new_tokens=1, stop_token_ids=(9,) * 5)

    async def ask():
        client = connect_server(url)
        try:
            with pytest.raises(RequestError, match="max_stops=4"):
                await client.generate(GenerateRequest(request_id="r", prompt_token_ids=(5,), sampling_params=params))
        finally:
            await client.stop()

    run(ask())


@pytest.mark.promise("`/health` and SIGTERM are answered whatever is asked")
@pytest.mark.process
def test_health_and_sigterm_are_answered_whatever_is_asked(qwen3_folder):
    """Absurd numbers, floods of completions, and texts that take long to tokenise, from several callers at once."""

    async def main():
        server = launch_server("embedded", ServerConfig(model_path=str(qwen3_folder), num_threads=1))
        address = await server.start()
        bodies = [
            {**PROMPT, "n": 10**6},
            {**PROMPT, "prompt": [[5, 6]] * 4096, "max_tokens": 200},
            {**PROMPT, "prompt": "1+2=3 " * 1_000_000},
            {**PROMPT, "prompt": "".join(map(chr, range(33, 126))) * 50_000},
        ]
        over = threading.Event()

        def flood(body):
            while not over.is_set():
                try:
                    post(address.url + "/v1/completions", body)
                except (OSError, ValueError):
                    return

        callers = [threading.Thread(target=flood, args=(body,), daemon=True) for body in bodies]
        for caller in callers:
            caller.start()
        slowest = 0.0
        try:
            for _ in range(10):
                start = time.perf_counter()
                await server.check_health()
                slowest = max(slowest, time.perf_counter() - start)
                await asyncio.sleep(0.1)
            os.kill(address.pid, signal.SIGTERM)
            has_ended = await server.process.has_ended(60.0)
        finally:
            over.set()
            await server.stop()
        return slowest, has_ended, server.process.returncode

    slowest, has_ended, code = asyncio.run(main())
    assert slowest < 30.0
    assert (has_ended, code) == (True, 0)


def num_lines(work):
    """Lines of Python that `work()` runs in this package, comprehensions included: what it costs, whoever else runs."""
    count = 0

    def local(frame, event, arg):
        nonlocal count
        count += event == "line"
        return local

    def trace(frame, event, arg):
        return local if "rl_rollout" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("is_held", [False, True])
def test_ending_requests_one_by_one_has_linear_cost(qwen3_folder, is_held):
    """As it is where callers leave: each is ended by a call of its own, while all others wait."""
    config = ServerConfig(model_path=str(qwen3_folder), num_threads=1, kv_cache_bytes=2**20)
    model = load_model(config)

    def cost(count):
        engine = Engine(model, config)
        if is_held:
            engine.pause("wait")
        ids = [f"r{i}" for i in range(count)]
        engine.submit((GenerateRequest(request_id=i, prompt_token_ids=(5,)), 0) for i in ids)
        return num_lines(lambda: [engine.abort([i]) for i in ids]) / count

    assert cost(2000) < 1.1 * cost(200)


def test_requests_left_in_one_turn_are_ended_by_one_command(qwen3_folder, monkeypatch):
    async def main():
        server = create_server("embedded", ServerConfig(model_path=str(qwen3_folder), num_threads=1))
        url = (await server.start()).url
        client = connect_server(url)
        await client.start()
        calls, abort, found = [], Engine.abort, []

        def counted(engine, ids=None, **given):
            calls.append(1)
            return abort(engine, ids, **given)

        monkeypatch.setattr(Engine, "abort", counted)
        for each in (server, client):
            calls.clear()
            await server.pause("keep")
            asked = [GenerateRequest(request_id=f"r{i}", prompt_token_ids=(5,)) for i in range(300)]
            tasks = [asyncio.create_task(each.generate(request)) for request in asked]
            await until_async(lambda: server.status()["num_waiting"] >= 300)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await until_async(lambda: not server.status()["num_waiting"])
            await server.resume()
            found.append(len(calls))
        await client.stop()
        await server.stop()
        return found

    assert all(count <= 3 for count in asyncio.run(main()))
