"""The recipe whose model learns to use a tool: what it is shown, and two steps of it."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

import rl_agent
from rl_agent.testing import FakeGenerator
from rl_trainer.config import load_config
from rl_trainer.data import load_datasets
from rl_trainer.data.warmup import demonstration, write_tokenizer

pytestmark = pytest.mark.process

SMALL = ["data.options.num_rows=300", "data.eval_size=8"]


@pytest.mark.process
def test_the_model_sees_exactly_the_loop_s_tokens(tmp_path):
    """Otherwise the supervised part would teach a format that never comes up again."""
    config = load_config("tool_calculator", SMALL)
    row = load_datasets(config.data, seed=0).train[0]
    write_tokenizer(tmp_path, has_calculator=True)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    tokenizer = rl_agent.load_tokenizer(str(tmp_path))
    messages = demonstration(row, has_call=True, width=7)
    said = iter([message["content"] for message in messages if message["role"] == "assistant"])
    server = FakeGenerator(lambda _: [*tokenizer.encode(next(said)), tokenizer.eos_token_id])
    loop = rl_agent.create_loop(config.agent.loop, server, tokenizer, **config.agent.options)
    params = {"max_new_tokens": config.rollout.max_new_tokens}
    output = asyncio.run(loop.run(params, row))
    assert (output.num_turns, output.text.strip()) == (2, row["reward_model"]["ground_truth"])
    assert output.metrics["num_tool_calls"] == 1.0
    assert output.metrics["num_tool_error"] == output.metrics["num_tool_malformed"] == 0.0
    shown = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert [*output.prompt_token_ids, *output.completion_token_ids] == shown
    assert len(shown) <= config.rollout.max_model_len
    assert [message["role"] for message in demonstration(row, has_call=False)] == ["user", "assistant"]


@pytest.mark.slow
def test_two_steps_in_one_process(tmp_path):
    command = [sys.executable, "-m", "rl_trainer.cli", "tool_calculator", *SMALL, "runtime=inline", "steps=2"]
    command += ["model.warmup.steps=30", "model.warmup.hidden_size=32", "model.warmup.batch_size=32"]
    command += ["model.warmup.calculator_share=0.9", "batch.batch_size=8", "batch.mini_batch_size=8"]
    run = subprocess.run([*command, f"output_dir={tmp_path}"], capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    records = [json.loads(line) for line in Path(tmp_path, "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2]
    assert all(not record["failures"] for record in records)
    assert all(record["num_tokens"] > 0 for record in records[1:])
