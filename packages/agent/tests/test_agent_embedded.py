"""The single-turn loop on a real model, served by rl-rollout's embedded server in this process."""

import asyncio
import math
import re

import pytest

from rl_agent import AgentRunner, Failure, create_loop, load_tokenizer
from rl_rollout import ServerConfig, create_server
from rl_rollout.testing import write_tiny_model

pytest.importorskip("transformers", reason="needs the extra rl-agent[hf]")

ROWS = [{"prompt": [{"role": "user", "content": f"{a} + {b} = ?"}]} for a, b in ((1, 2), (30, 4), (5, 67))]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model")))


async def rollouts(model_path, rows, params, group_size):
    server = create_server("embedded", ServerConfig(model_path=model_path, num_threads=1))
    tokenizer = load_tokenizer(model_path)
    await server.start()
    try:
        agents = AgentRunner(lambda name: create_loop(name, server, tokenizer), timeout_s=60)
        return [result async for result in agents.run(rows, params, group_size=group_size)]
    finally:
        await server.stop()


def test_groups_are_sampled_validated_and_repeatable(model_path):
    params = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3}
    first, second = (asyncio.run(rollouts(model_path, ROWS, params, 4)) for _ in range(2))
    assert sorted((r.row_index, r.rollout_index) for r in first) == [(i, k) for i in range(3) for k in range(4)]
    outputs = {(r.row_index, r.rollout_index): r.outputs[0] for r in first}  # validated by the runner
    assert all(math.isfinite(sum(output.rollout_logprobs)) for output in outputs.values())
    for i in range(3):
        group = [outputs[i, k] for k in range(4)]
        assert len({output.prompt_token_ids for output in group}) == 1
        assert len({output.completion_token_ids for output in group}) > 1, "every rollout has a seed of its own"
    again = {(r.row_index, r.rollout_index): r.outputs[0].completion_token_ids for r in second}
    assert again == {place: output.completion_token_ids for place, output in outputs.items()}


def test_a_prompt_that_is_too_long_fails_alone(model_path):
    long = {"prompt": [{"role": "user", "content": "1" * 10_000}]}
    results = {r.row_index: r for r in asyncio.run(rollouts(model_path, [ROWS[0], long], {"max_new_tokens": 4}, 1))}
    assert isinstance(results[0].outputs, tuple)
    assert isinstance(results[1].outputs, Failure)
    assert (results[1].outputs.kind, results[1].outputs.is_retryable) == ("generation", False)


class Echo:
    """Says back what it was told."""

    def reset(self, *, seed):
        return "1", {}

    def step(self, action):
        return str(len(action)), 0.5, False, False, {}


async def episodes(model_path, count):
    server = create_server("embedded", ServerConfig(model_path=model_path, num_threads=1))
    tokenizer = load_tokenizer(model_path)
    await server.start()
    try:
        loop = create_loop("gym", server, tokenizer, environments={"echo": Echo}, max_turns=3)
        vocabulary = range(len(tokenizer.get_vocab()))
        params = {
            "max_new_tokens": 64,
            "seed": 1,
            "stop_token_ids": tuple(vocabulary[::2]),
        }  # a random model stops soon
        agents = AgentRunner(lambda _: loop, timeout_s=60)
        return tokenizer, [result async for result in agents.run([{}] * count, params)]
    finally:
        await server.stop()


def context_of(output):
    return [i for i, m in zip(output.completion_token_ids, output.loss_mask, strict=True) if not m]


def test_turns_on_a_real_model_keep_every_emitted_token(model_path):
    tokenizer, results = asyncio.run(episodes(model_path, 4))
    for result in results:
        (output,) = result.outputs  # validated by the runner
        assert (output.num_turns, output.reward) == (3, 1.5)
        runs = "".join(map(str, output.loss_mask)).split("0")
        assert len([run for run in runs if run]) == 3, "three turns of the model with context between them"
        assert re.fullmatch(r"\d{2,4}", tokenizer.decode(context_of(output))), "the two observations, whole"


@pytest.mark.process
def test_play_shows_what_training_sees(model_path, capsys, monkeypatch):
    import io
    import sys

    from rl_agent.cli import main

    async def serve(*arguments):
        server = create_server("embedded", ServerConfig(model_path=model_path, num_threads=1))
        address = await server.start()
        try:
            return await asyncio.to_thread(main, ["play", "--server", address.url, "--model", model_path, *arguments])
        finally:
            await server.stop()

    sampling = ("--sampling", '{"max_new_tokens": 5, "seed": 1}')
    row = '{"prompt": [{"role": "user", "content": "1 + 2 = ?"}]}'
    assert asyncio.run(serve(*sampling, "--row", row)) == 0
    told = capsys.readouterr().out
    assert "1 + 2 = ?" in told.splitlines()[0]
    assert "weight versions [0]" in told
    assert "reward: none (the trainer grades it); turns: 1" in told
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n2\n\n"))
    assert asyncio.run(serve(*sampling)) == 0
    assert "turns: 2" in capsys.readouterr().out
    assert asyncio.run(serve("--row", "{}")) == 1
    assert "rl-agent: field 'prompt' of the row is None" in capsys.readouterr().err
