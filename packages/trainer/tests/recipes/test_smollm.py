"""The recipe of a pretrained model: its rows, its reward, and the hub's id that it starts from."""

import asyncio
import json
import os
import re
import subprocess
import sys

import pytest
from packages.engine.tests.support.hub_server import serve_hub

from rl_trainer.config import load_config
from rl_trainer.data import load_datasets
from rl_trainer.errors import DataError
from rl_trainer.rewards import Scorer


def rows_of(seed, *overrides):
    data = load_datasets(load_config("smollm", overrides).data, seed=seed)
    return [[row["prompt"][0]["content"] for row in part] for part in (data.train, data.eval)], data


def operands(question):
    return frozenset(re.findall(r"\d+", question))


def test_no_pair_of_operands_is_trained_and_held_out():
    (train, held_out), data = rows_of(1)
    assert len(held_out) == 128
    assert not {*map(operands, train)} & {*map(operands, held_out)}
    for row in [*data.train, *data.eval]:
        a, b = map(int, re.findall(r"\d+", row["prompt"][0]["content"]))
        assert row["reward_model"]["ground_truth"] == str(a + b)


@pytest.mark.process
def test_seeds_order_the_rows_and_hold_out_the_same():
    (first, held_first), _ = rows_of(1)
    (second, held_second), _ = rows_of(2)
    assert held_first == held_second
    assert first != second
    assert sorted(first) == sorted(second)


def test_rows_of_sums_have_no_options():
    with pytest.raises(DataError, match=r"data.options has 'digits'.*takes none"):
        rows_of(0, "data.options.digits=3")


@pytest.mark.process
@pytest.mark.parametrize(
    ("text", "reward", "is_right"),
    [("31", 1.2, True), ("23 + 8 = 31.", 1.0, True), ("30", 0.2, False), ("no", 0, False)],
)
def test_accuracy_is_the_last_number_whatever_the_format(text, reward, is_right):
    async def score():
        scorer = Scorer(load_config("smollm").reward)
        try:
            return await scorer.score(text, {"reward_model": {"ground_truth": "31"}, "data_source": "sums"})
        finally:
            await scorer.close()

    found = asyncio.run(score())
    assert (found.reward, found.is_right) == (pytest.approx(reward), is_right)


@pytest.mark.promise("`rl-train smollm` starts from the hub's id of its model")
@pytest.mark.process
def test_the_recipe_trains_the_model_of_its_hub_id(model, tmp_path):
    small = ["steps=1", "eval_every=0", "save_every=0", "data.eval_size=2", "batch.batch_size=2", "batch.group_size=2"]
    line = ["smollm", *small, "batch.mini_batch_size=2", "data.max_prompt_tokens=128", "rollout.max_model_len=160"]
    with serve_hub({"HuggingFaceTB/SmolLM2-135M-Instruct": model}) as (url, sent):
        known = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home")}
        known.pop("HF_HUB_OFFLINE", None)
        command = [sys.executable, "-m", "rl_trainer.cli", *line, f"output_dir={tmp_path / 'out'}"]
        done = subprocess.run(command, env=known, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "model.safetensors" in sent
    steps = [json.loads(line)["step"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1]
