"""`agent.environment`: rows, loop and reward of a run come from it, and what it cannot play is refused at the plan."""

import json
import re

import pytest
from rich.console import Console

from rl_rollout.testing import write_tiny_model
from rl_trainer.config import load_config
from rl_trainer.errors import InputError
from rl_trainer.planning.prepare import prepare
from rl_trainer.run import run

pytestmark = pytest.mark.process

FILE = '''
class Count:
    """Say a text, three times; longer ones are better, even where they are cut off."""

    def __init__(self, unit=0.125):
        self.unit, self.num_said = unit, 0

    def reset(self, *, seed):
        return f"say {seed % 7}", {}

    def step(self, action):
        self.num_said += 1
        reward = self.unit * len(action)
        return "more", reward, False, self.num_said == 3, {"rewards": {"length": reward}}
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("environments") / "model")


def settings(model, folder, environment, *more):
    return [
        "runtime=inline", "steps=2", "eval_every=2", "save_every=0", "timeout_s=120", "data.eval_size=4",
        "data.max_prompt_tokens=128", "rollout.max_new_tokens=24", "rollout.max_model_len=256",
        "batch.batch_size=4", "batch.mini_batch_size=4", "batch.group_size=4", f"model.path={model}",
        f"output_dir={folder}", f"agent.environment={environment}", *more,
    ]  # fmt: skip


def trained(model, folder, environment, *more):
    summary = run(load_config("quickstart", settings(model, folder, environment, *more)), Console(quiet=True))
    return summary, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.process
def test_an_environment_of_a_file_trains(model, tmp_path):
    (tmp_path / "count.py").write_text(FILE)
    config = load_config("quickstart", settings(model, tmp_path / "out", f"{tmp_path}/count.py:Count"))
    assert (config.agent.loop, config.reward.parts["environment"].kind) == ("gym", "loop")
    summary, lines = trained(model, tmp_path / "out", f"{tmp_path}/count.py:Count")
    assert (summary["steps"], summary["failed_rollouts"]) == (2, 0)
    assert [line["step"] for line in lines] == [0, 1, 2]
    played = [line["metrics"] for line in lines[1:]]
    assert any(each["reward/length"] > 0 for each in played)
    assert all(each["reward/length"] >= each["reward/environment"] for each in played), "cut ones have no term"


@pytest.mark.process
def test_frozen_lake_trains(model, tmp_path):
    options = "agent.options={environment_args: {is_slippery: false}, max_turns: 4}"
    summary, lines = trained(model, tmp_path / "out", "gymnasium:FrozenLake-v1", options)
    assert (summary["steps"], summary["failed_rollouts"]) == (2, 0)
    assert max(line["metrics"]["completion_tokens_max"] for line in lines[1:]) > 24, "some rollouts have several turns"


@pytest.mark.process
@pytest.mark.parametrize(
    ("environment", "more", "sentence"),
    [
        ("gymnasium:FrozenLake-v99", (), "agent.environment=gymnasium:FrozenLake-v99 cannot be played: environment"),
        ("chess", (), "environment 'chess' is none of gymnasium"),
        ("gymnasium:FrozenLake-v1", ("agent.loop=tool",), "does nothing with agent.loop=tool, which plays none"),
        ("gymnasium:FrozenLake-v1", ("agent.options={environment_args: {size: 3}}",), "environment_args"),
    ],
)
def test_what_cannot_be_played_is_refused_at_the_plan(model, tmp_path, environment, more, sentence):
    config = load_config("quickstart", settings(model, tmp_path / "out", environment, *more))
    with pytest.raises(InputError, match=re.escape(sentence)):
        prepare(config)
