"""A served reward model: its scores are those of the model alone, over HTTP, in batches, and from the command line."""

import asyncio
import json
import math
import subprocess
import sys
import threading

import aiohttp
import pytest
import torch

from rl_rollout import ConfigError, ModelFolderError, ServerConfig, ServerLostError
from rl_rollout.cli import main
from rl_rollout.http.http_server import READY
from rl_rollout.reward_server import ScoreServer
from rl_rollout.testing import write_tiny_model

ROWS = [[5, 6, 7], [9] * 40, [12, 0, 1], [3], [4, 1], [1, 1, 1, 1]]  # padding's and the end's ids among them


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    path = write_tiny_model(tmp_path_factory.mktemp("reward"))
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(path, num_labels=1)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def wanted(folder):
    """What transformers says of rows one at a time, where nothing is padded."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()

    def score(ids):
        with torch.inference_mode():  # its own search for the last token would stop at the padding's id
            return float(model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1]))

    return score


def serve(folder, use, **settings):
    async def main():
        server = ScoreServer(ServerConfig(model_path=str(folder), num_threads=1, **settings))
        address = await server.start()
        try:
            async with asyncio.timeout(120), aiohttp.ClientSession() as session:
                return await use(session, address.url, server)
        finally:
            await server.stop()

    return asyncio.run(main())


async def ask(session, url, headers=None, **body):
    async with session.post(f"{url}/pooling", json=body, headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.promise("What is beside a sequence does not change its score")
def test_scores_do_not_depend_on_the_rows_scored_together(folder, wanted, monkeypatch):
    monkeypatch.setattr("rl_rollout.reward_server.MAX_TOKENS_TOGETHER", 20)  # several passes

    async def use(session, url, server):
        together = await ask(session, url, input=ROWS)
        alone = await asyncio.gather(*(ask(session, url, input=row) for row in ROWS))
        return together, alone, await server.score(ROWS)

    (status, answer), alone, scores = serve(folder, use)
    expected = [wanted(row) for row in ROWS]
    assert status == 200
    assert [each["index"] for each in answer["data"]] == list(range(len(ROWS)))
    assert [each["data"][0] for each in answer["data"]] == pytest.approx(expected, abs=1e-5)
    assert [found["data"][0]["data"][0] for _, found in alone] == pytest.approx(expected, abs=1e-5)
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 3) for score in expected}) == len(ROWS)
    assert answer["usage"]["total_tokens"] == sum(map(len, ROWS))


def test_a_conversation_is_scored_as_rl_rm_has_learned_it(folder, wanted):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": "1 + 2 = "}, {"role": "assistant", "content": [{"type": "text", "text": "3"}]}]

    async def use(session, url, server):
        return await ask(session, url, messages=turns, model="m"), await ask(session, url, input=["12", "3"])

    (_, chat), (_, texts) = serve(folder, use)
    ids = [*tokenizer.encode("1 + 2 = "), *tokenizer.encode("3"), tokenizer.eos_token_id]
    assert chat["data"][0]["data"] == pytest.approx([wanted(ids)], abs=1e-5)
    expected = [wanted(tokenizer.encode(text)) for text in ("12", "3")]
    assert [each["data"][0] for each in texts["data"]] == pytest.approx(expected, abs=1e-5)


def test_what_cannot_be_scored_is_refused(folder):
    user = {"role": "user", "content": "1"}
    cases = [
        ({}, "one of 'input' and 'messages'"),
        ({"input": "1", "messages": [user]}, "one of 'input' and 'messages'"),
        ({"input": []}, "'input' is empty"),
        ({"input": [["x"]]}, "must be a text, a list of token ids"),
        ({"input": [[]]}, "sequence 0 has 0 tokens; 1 to 64 are taken"),
        ({"input": [[3], [3] * 65]}, "sequence 1 has 65 tokens; 1 to 64 are taken"),
        ({"input": [[3, 999]]}, "sequence 0 has an id outside of 0 to "),
        ({"messages": [user]}, "a prompt and an assistant's answer"),
        ({"inptu": "1"}, "did you mean 'input'"),
    ]

    async def use(session, url, server):
        found = [await ask(session, url, headers={"Authorization": "Bearer key"}, **body) for body, _ in cases]
        return found, await ask(session, url, input=[3])

    found, without_key = serve(folder, use, max_model_len=64, api_token="key")
    for (status, answer), (_, words) in zip(found, cases, strict=True):
        assert status == 400
        assert words in answer["error"]["message"]
    assert without_key[0] == 401


def test_what_is_no_reward_model_is_refused(folder, tmp_path):
    language = write_tiny_model(tmp_path / "language")
    for path, words in ((language, "it has no score.weight"), (tmp_path / "none", "no reward model can be loaded")):
        with pytest.raises(ModelFolderError, match=words):
            serve(path, None)
    for settings, words in (({"host": "0.0.0.0"}, "reachable from outside"), ({"options": {"a": 1}}, "do nothing")):
        with pytest.raises(ConfigError, match=words):
            ScoreServer(ServerConfig(model_path=str(folder), **settings))


def test_a_pass_that_fails_is_told_and_the_next_one_works(folder, monkeypatch):
    async def use(session, url, server):
        model = server.model
        score, model.score = model.score, lambda rows: 1 / 0
        failed = await ask(session, url, input=[3])
        model.score = score
        return failed, await ask(session, url, input=[3])

    (status, answer), (again, _) = serve(folder, use)
    assert (status, again) == (500, 200)
    assert "scoring failed: ZeroDivisionError" in answer["error"]["message"]


def test_a_score_that_is_no_number_is_an_error_of_its_request(folder, monkeypatch):
    async def use(session, url, server):
        monkeypatch.setattr(server.model, "score", lambda rows: [math.nan if len(row) == 1 else 0.5 for row in rows])
        return await asyncio.gather(ask(session, url, input=[3]), ask(session, url, input=[3, 4]))

    (status, answer), (good, scored) = serve(folder, use)
    assert (status, good) == (500, 200)
    assert "gave nan for a score" in answer["error"]["message"]
    assert scored["data"][0]["data"] == [0.5]


def test_frequencies_depending_on_other_rows_are_refused(tmp_path):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0, 5.0, 6.0, 7.0]}
    folder = write_tiny_model(tmp_path, family="llama", rope_parameters=rope)
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    with pytest.raises(ConfigError, match="set it to 64 at most"):
        serve(folder, None)


@pytest.mark.process
def test_the_command_line_serves_it(folder, wanted):
    command = [sys.executable, "-m", "rl_rollout.cli", str(folder), "--task", "score", "--port", "0"]
    command += ["--num-threads", "1"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--exit-with-stdin"], **pipes) as process:
        try:
            line = next(line for line in process.stdout if line.startswith(READY))

            async def call():
                async with asyncio.timeout(120), aiohttp.ClientSession() as session:
                    return await ask(session, json.loads(line[len(READY) :])["url"], input=[5, 6])

            _, answer = asyncio.run(call())
            assert answer["data"][0]["data"] == pytest.approx([wanted([5, 6])], abs=1e-5)
            process.stdin.close()
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("backend", ["embedded", "vllm"])
def test_a_reward_model_is_not_served_as_a_language_model(folder, backend, capsys):
    assert main([str(folder), "--backend", backend]) == 2
    told = capsys.readouterr().err
    assert "Qwen3ForSequenceClassification, which scores and generates nothing; serve it by rl-serve --task" in told


def test_a_backend_of_generation_is_none_of_scores(capsys):
    assert main(["model", "--task", "score", "--backend", "vllm"]) == 2
    assert "--backend vllm does nothing with --task score" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["max-num-seqs", "seed", "timeout-s", "kv-cache-bytes"])
def test_a_setting_of_generation_is_none_of_scores(option, capsys):
    assert main(["model", "--task", "score", f"--{option}", "7"]) == 2
    assert "it does nothing with a reward model" in capsys.readouterr().err


def test_what_waits_for_a_score_ends_with_the_server(folder, monkeypatch):
    goes_on = threading.Event()

    async def main():
        server = ScoreServer(ServerConfig(model_path=str(folder), num_threads=1))
        await server.start()
        monkeypatch.setattr(server.model, "score", lambda rows: goes_on.wait(20))
        waiting = [asyncio.create_task(server.score([row])) for row in ROWS]
        await asyncio.sleep(0.05)
        await server.stop()
        goes_on.set()
        async with asyncio.timeout(10):
            ends = await asyncio.gather(*waiting, server.score(ROWS), return_exceptions=True)
        assert [type(end) for end in ends] == [ServerLostError] * (len(ROWS) + 1)

    asyncio.run(main())
