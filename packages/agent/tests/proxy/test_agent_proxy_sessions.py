"""Sessions over HTTP: keys, rewards, export, expiry, and what a client that left had asked for."""

import asyncio
import logging

import aiohttp
import pytest

from rl_agent import RowError, validate_output
from rl_agent.proxy import RecordingProxy
from rl_agent.proxy import sessions as proxy_sessions
from rl_agent.proxy.recording import Exchange, Recording, trajectories
from rl_agent.testing import FakeGenerator, FakeTokenizer
from rl_agent.types import AgentLoopOutput
from rl_rollout.types import FinishReason, TokenOutput

TOKENIZER = FakeTokenizer()
TOKEN = "secret"
USER = {"role": "user", "content": "go"}


def with_http(use, *, says="abcdefgh", **settings):
    """Run `use(call, proxy)` against a proxy, where `call(method, path, key, body)` gives status and answer."""
    turns = iter(says)
    server = FakeGenerator(lambda _: [*TOKENIZER.encode(next(turns)), 1])

    async def main():
        proxy = RecordingProxy(server, TOKENIZER, **settings)
        root = (await proxy.start()).removesuffix("/v1")
        async with aiohttp.ClientSession() as http:

            async def request(method, path, key="", body=None):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                async with http.request(method, root + path, json=body, headers=headers) as response:
                    return response.status, await response.json()

            try:
                return await use(request, proxy)
            finally:
                await proxy.stop()

    return asyncio.run(main())


def chat(*texts):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": each} for i, each in enumerate(texts)]}


def test_a_session_over_http_from_creation_to_trajectories():
    async def use(request, _):
        status, session = await request("POST", "/sessions", TOKEN, {})
        assert status == 200
        key, path = session["api_key"], f"/sessions/{session['session']}"
        assert session["base_url"].endswith("/v1")
        _, first = await request("POST", "/v1/chat/completions", key, chat("go"))
        _, second = await request("POST", "/v1/chat/completions", key, chat("go", "a", "on"))
        _, other = await request("POST", "/v1/chat/completions", key, chat("anew"))
        for body in (
            {"reward": 0.25, "turn": first["id"]},
            {"reward": 1, "name": "tests", "trajectory": second["id"]},
            {"reward": 0.5, "name": "style", "trajectory": other["id"]},
            {"reward": -1, "name": "cost"},
        ):
            assert await request("POST", f"{path}/reward", TOKEN, body) == (200, {})
        exported = await request("GET", f"{path}/export", TOKEN)
        finished = await request("POST", f"{path}/finish", TOKEN, {"reward": 0.125})
        gone = await request("POST", f"{path}/finish", TOKEN)
        late = await request("POST", "/v1/chat/completions", key, chat("late"))
        return exported, finished, gone, late

    exported, (status, finished), gone, late = with_http(use, api_token=TOKEN)
    assert len(exported[1]["trajectories"]) == 2
    outputs = [AgentLoopOutput(**each) for each in finished["trajectories"]]
    for output in outputs:
        validate_output(output)
    assert [output.reward for output in outputs] == [0.375, -0.375]
    assert tuple(outputs[0].turn_rewards) == (0.25, 0.0)
    terms = [{k: v for k, v in output.metrics.items() if k.startswith("reward/")} for output in outputs]
    assert terms[0] == {"reward/reward": 0.375, "reward/tests": 1.0, "reward/cost": -1.0}
    assert terms[1] == {"reward/style": 0.5, "reward/cost": -1.0, "reward/reward": 0.125}
    assert (status, gone[0], late[0]) == (200, 400, 401)


@pytest.mark.promise("A session's key opens the model of this session, and no reward")
def test_the_key_of_a_session_opens_nothing_else():
    async def use(request, _):
        _, mine = await request("POST", "/sessions", TOKEN, {"session": "mine"})
        _, other = await request("POST", "/sessions", TOKEN, {"session": "other"})
        key = mine["api_key"]
        assert key != other["api_key"]
        for method, path in (
            ("POST", "/sessions"),
            ("POST", "/sessions/mine/reward"),
            ("POST", "/sessions/mine/finish"),
            ("GET", "/sessions/mine/export"),
            ("POST", "/sessions/other/v1/chat/completions"),
        ):
            status, answer = await request(method, path, key, {"reward": 1.0} if method == "POST" else None)
            assert status == 401, (method, path)
            assert "opens the model of this session only" in answer["error"]["message"]
        assert (await request("POST", "/sessions/mine/v1/chat/completions", key, chat("go")))[0] == 200
        assert (await request("POST", "/sessions", "", {}))[0] == 401

    with_http(use, api_token=TOKEN)


def test_a_created_session_is_not_opened_by_its_name():
    async def use(request, proxy):
        name, key = proxy.create_session("mine")
        status, answer = await request("POST", "/v1/chat/completions", name, chat("go"))
        assert (status, "has a key of its own" in answer["error"]["message"]) == (400, True)
        assert (await request("POST", "/v1/chat/completions", key, chat("go")))[0] == 200
        with pytest.raises(RowError, match="session 'mine' exists already"):
            proxy.create_session("mine")

    with_http(use)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "needs 'reward', a number"),
        ({"reward": "1"}, "reward is '1'; a finite number is needed"),
        ({"reward": True}, "reward is True"),
        ({"reward": 1e16}, "a number of at most 1e\\+15"),
        ({"reward": 1, "turn": "x"}, "turn='x' is not the id of a response of this session"),
        ({"reward": 1, "turn": 3}, "turn is 3; text is needed"),
        ({"reward": 1, "turn": "x", "trajectory": "y"}, "leave one of them out"),
        ({"reward": 1, "colour": "x"}, "colour is not known here"),
    ],
)
def test_a_reward_that_is_none_is_an_error_by_field(body, sentence):
    import re

    async def use(request, _):
        await request("POST", "/v1/chat/completions", "one", chat("go"))
        status, answer = await request("POST", "/sessions/one/reward", "", body)
        assert status == 400
        assert re.search(sentence, answer["error"]["message"])
        status, answer = await request("POST", "/sessions/none/reward", "", {"reward": 1})
        assert "there is no session 'none'" in answer["error"]["message"]

    with_http(use)


def test_an_idle_session_expires_and_a_late_request_is_an_error(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr(proxy_sessions.time, "monotonic", lambda: now[0])

    async def use(request, proxy):
        _, key = proxy.create_session("made")
        await request("POST", "/v1/chat/completions", "one", chat("go"))
        now[0] = 9.0
        await request("POST", "/v1/chat/completions", "two", chat("go"))
        now[0] = 11.0
        status, answer = await request("POST", "/v1/chat/completions", "one", chat("go", "a", "on"))
        assert (status, "'one' was idle for more than expiry_s=10 s" in answer["error"]["message"]) == (400, True)
        status, answer = await request("POST", "/v1/chat/completions", key, chat("go"))
        assert (status, "was idle" in answer["error"]["message"]) == (400, True), "its key is no name"
        assert (await request("POST", "/v1/chat/completions", "two", chat("go", "b", "on")))[0] == 200
        assert proxy.finish("one") == []
        return proxy.finish("two")

    with caplog.at_level(logging.WARNING, "rl_agent.proxy.sessions"):
        (output,) = with_http(use, expiry_s=10)
    assert output.num_turns == 2
    assert "session 'one' was idle for more than expiry_s=10 s and is dropped, with 1 exchanges" in caplog.text


def test_a_session_with_sampling_parameters_draws_by_them():
    server = FakeGenerator()

    async def main():
        proxy = RecordingProxy(server, TOKENIZER)
        base = await proxy.start()
        params = {"temperature": 1.0, "top_p": 1.0, "seed": 5, "max_new_tokens": 100}
        _, key = proxy.create_session(sampling_params=params)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:
            for limit in (10, 1000):
                body = {"messages": [USER], "temperature": 0.0, "top_p": 0.5, "seed": 1, "max_tokens": limit}
                async with http.post(base + "/chat/completions", json=body) as response:
                    assert response.status == 200
        await proxy.stop()

    asyncio.run(main())
    first, second = (request.sampling_params for request in server.requests)
    assert (first.temperature, first.top_p, first.max_new_tokens, second.max_new_tokens) == (1.0, 1.0, 10, 100)
    assert first.seed == 5 != second.seed, "turns do not repeat the draws of the first"


def test_an_answer_nobody_heard_takes_nothing_else_with_it():
    def exchange(parent, prompt, name):
        output = TokenOutput(
            request_id=name, token_ids=(7,), logprobs=(-1.0,), weight_versions=(0,), finish_reason=FinishReason.STOP
        )
        return Exchange(
            parent=parent,
            prompt_token_ids=prompt,
            sampled_spans=(),
            output=output,
            conversation=(),
            tools="",
            text="",
            response_id=name,
        )

    recording = Recording(exchanges=[exchange(None, (1,), "first"), exchange(0, (1, 7, 2), "last")])
    recording.abandon("last")
    (output,) = trajectories(recording, 1.0)
    assert (output.num_turns, output.metrics["num_abandoned"]) == (1, 1.0)
