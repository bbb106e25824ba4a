"""The single-turn loop on a real model, served by rl-rollout's embedded server in this process."""

import asyncio
import math

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
