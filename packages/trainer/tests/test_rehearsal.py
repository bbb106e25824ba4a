"""`--dry-run` tries what would fail after start-up, and says where the reward comes from."""

import os
import subprocess
import sys

import pytest

from rl_engine.testing.hub import serve_hub
from rl_rollout.testing import write_tiny_model
from rl_trainer.config import load_config
from rl_trainer.data.datasets import Datasets
from rl_trainer.errors import ConfigError, InputError
from rl_trainer.planning.rehearsal import check_rows, check_signature, rehearse, reward_source

ROW = {
    "prompt": [{"role": "user", "content": "2+2="}],
    "data_source": "gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {},
}


@pytest.fixture
def model(tmp_path):
    return write_tiny_model(tmp_path / "model", max_position_embeddings=4096)


def config_of(model, *overrides):
    return load_config("gsm8k", [f"model.path={model}", *overrides])


@pytest.mark.process
def test_the_chat_template_and_the_reward_are_tried(model):
    told = dict(rehearse(config_of(model), [ROW]))
    assert told["chat template"].startswith("the first prompt has ")
    assert told["reward tried"] == "a made-up completion 0, the ground truth 1"


@pytest.mark.process
def test_a_model_without_a_chat_template_is_told_in_a_sentence(model):
    import json

    for file in ("tokenizer_config.json", "chat_template.jinja"):
        if (path := model / file).is_file():
            values = json.loads(path.read_text()) if path.suffix == ".json" else None
            path.unlink() if values is None else path.write_text(json.dumps({**values, "chat_template": None}))
    with pytest.raises(
        InputError, match="prompts cannot be made by the tokenizer of model.path=.*chat template"
    ) as error:
        rehearse(config_of(model), [ROW])
    assert "\n" not in str(error.value)


@pytest.mark.process
def test_a_reward_that_cannot_be_called_is_found_before_anything_starts(model, tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text(
        "def broken(text, row):\n    return text + 1\n\n"
        "def picky(text, row):\n    raise ValueError('no number')\n\n"
        "def three(prompt, completion, answer):\n    return 1\n\n"
        "def fine(text, row, weight=1.0):\n    return 1\n"
    )
    with pytest.raises(InputError, match="the reward cannot be used: .* raised TypeError"):
        rehearse(config_of(model, f"reward.path={file}:broken"), [ROW])
    told = dict(rehearse(config_of(model, f"reward.path={file}:picky"), [ROW]))
    assert told["reward tried"].count("no score") == 2
    with pytest.raises(
        ConfigError, match=r"takes \(prompt, completion, answer\); a reward is called with \(text, row\)"
    ):
        check_signature(f"{file}:three", "reward.path")
    check_signature(f"{file}:fine", "reward.path")


@pytest.mark.process
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.options={}", "rollout.backend=sglang starts sglang, which is not installed here"),
        ("rollout.options={command: no-such-program --port 1}", "starts no-such-program, which is not there"),
    ],
)
def test_a_server_that_is_not_there_is_told(model, override, words):
    with pytest.raises(ConfigError, match=words):
        rehearse(config_of(model, "rollout.backend=sglang", override), [ROW])


def test_the_plan_says_where_the_reward_comes_from():
    rows = [ROW, {**ROW, "data_source": "reasoning_gym/x"}]
    own = reward_source(load_config("gsm8k").reward, rows)
    assert "rule gsm8k for data_source=gsm8k" in own
    assert "rule exact_match for data_source=reasoning_gym/x" in own
    by_function = load_config("gsm8k", ["reward.path=mine.py:score"]).reward
    assert reward_source(by_function, rows).endswith("mine.py:score (reward.path)")


@pytest.mark.process
def test_a_dry_run_of_a_model_by_its_hub_id_fetches_no_weights(model, tmp_path):
    line = ["quickstart", "--dry-run", "model.path=some/model", "data.options.num_rows=200", "data.eval_size=4"]
    with serve_hub({"some/model": model}) as (url, sent):
        known = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home")}
        known.pop("HF_HUB_OFFLINE", None)
        done = subprocess.run(
            [sys.executable, "-m", "rl_trainer.cli", *line], env=known, capture_output=True, text=True, timeout=200
        )
        assert "config.json" in sent
        assert "model.safetensors" not in sent
        other = [sys.executable, "-m", "rl_trainer.cli", *line, "model.path=some/other"]
        refusal = subprocess.run(other, env=known, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert refusal.returncode == 2
    assert "the hub has no model some/other" in refusal.stderr


COLUMN = """
def trl(completions, city, **kwargs):
    return [float(len(each)) for each in city]

def ours(text, row):
    return float(row["extra_info"]["level"])
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("reward", "bad", "words"),
    [
        ("trl", {}, "it takes city"),
        ("trl", {"city": None}, "TypeError"),
        ("ours", {"extra_info": {}}, "KeyError: 'level'"),
        ("ours", {"extra_info": {"level": "high"}}, "could not convert"),
        (None, {"reward_model": {"style": "rule", "ground_truth": None}}, "no ground truth"),
    ],
)
def test_a_reward_is_tried_on_every_kind_of_row(model, tmp_path, reward, bad, words):
    (tmp_path / "rewards.py").write_text(COLUMN)
    path = [] if reward is None else [f"reward.path={tmp_path}/rewards.py:{reward}"]
    good = {**ROW, "city": "paris", "extra_info": {"level": 1}}
    lacking = {name: value for name, value in good.items() if name != "city" or reward != "trl"} | bad
    rows = [good] * 499 + [lacking] + [good] * 100
    with pytest.raises(InputError, match=f"f.jsonl, row 500: the reward cannot be used: .*{words}"):
        rehearse(config_of(model, *path), rows, lambda index: f"f.jsonl, row {index + 1}")
    config = config_of(model, *path, "data.on_bad_row=drop")
    assert "reward tried" in dict(rehearse(config, rows))


class Room:
    """Opens with another text each time."""

    opened = iter(range(1000, 9000))

    def reset(self, *, seed):
        return f"door {next(self.opened) if seed is None else seed}", {}


def test_prompts_that_differ_when_made_again_are_in_the_plan(model, monkeypatch):
    monkeypatch.setattr("rl_agent.loops.gym.load_plugin", lambda *_: Room)
    for fields, is_random in (({}, True), ({"seed": 3}, False)):
        row = {**ROW, "environment": "room", **fields}
        told = dict(check_rows(config_of(model, "agent.loop=gym"), Datasets(train=[row] * 3, eval=[row])))
        assert ("random prompts" in told) is is_random
        assert told.get("random prompts", "4 of 4 differ").startswith("4 of 4 differ")
