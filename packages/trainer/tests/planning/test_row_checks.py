"""Rows, rewards and servers are tried before the start, and the plan says where the reward comes from."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from packages.engine.tests.support.hub_server import serve_hub
from rich.console import Console

from rl_rollout.testing import write_tiny_model
from rl_trainer.config import load_config
from rl_trainer.config.schema import RewardPart, RewardSection
from rl_trainer.data.datasets import Datasets
from rl_trainer.errors import ConfigError, InputError, RewardError
from rl_trainer.planning import row_checks
from rl_trainer.planning.preflight import program_facts
from rl_trainer.planning.row_checks import RowCheck
from rl_trainer.rewards.checks import check_signature, reward_source
from rl_trainer.rewards.scorer import Scorer, unusable_truth
from rl_trainer.run import run

ROW = {
    "prompt": [{"role": "user", "content": "2+2="}],
    "data_source": "gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {},
}


@pytest.fixture
def model(tmp_path):
    return write_tiny_model(tmp_path / "model", max_position_embeddings=4096)


def check(config, rows, **more):
    """Lines of the plan about rows, of which the last is held out."""
    rows = RowCheck(config, Datasets(train=rows[:-1] or rows, eval=rows[-1:], **more))
    lines = rows.sample()
    rows.rest()  # what a busy machine did not reach
    return dict(lines)


def config_of(model, *overrides):
    return load_config("gsm8k", [f"model.path={model}", *overrides])


@pytest.mark.process
def test_the_chat_template_and_the_reward_are_tried(model):
    told = check(config_of(model), [ROW])
    assert "; the first prompt has " in told["rows"]
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
        check(config_of(model), [ROW])
    assert "\n" not in str(error.value)


@pytest.mark.process
def test_an_uncallable_reward_is_found_before_the_start(model, tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text(
        "def broken(text, row):\n    return text + 1\n\n"
        "def picky(text, row):\n    raise ValueError('no number')\n\n"
        "def three(prompt, completion, answer):\n    return 1\n\n"
        "def fine(text, row, weight=1.0):\n    return 1\n"
    )
    with pytest.raises(InputError, match="the reward cannot be used: .* raised TypeError"):
        check(config_of(model, f"reward.path={file}:broken"), [ROW])
    told = check(config_of(model, f"reward.path={file}:picky"), [ROW])
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
        program_facts(config_of(model, "rollout.backend=sglang", override))


def test_the_plan_says_where_the_reward_comes_from():
    rows = [ROW, {**ROW, "data_source": "reasoning_gym/x"}]
    own = reward_source(load_config("gsm8k").reward, rows)
    assert "rule gsm8k for data_source=gsm8k" in own
    assert "rule exact_match for data_source=reasoning_gym/x" in own
    by_function = load_config("gsm8k", ["reward.path=mine.py:score"]).reward
    assert reward_source(by_function, rows).endswith("mine.py:score (reward.path)")


@pytest.mark.promise("`model.path` takes the hub's id of a model; a dry run fetches no weights")
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
        pytest.param("trl", {"city": None}, "TypeError", marks=pytest.mark.slow),
        ("ours", {"extra_info": {}}, "KeyError: 'level'"),
        pytest.param("ours", {"extra_info": {"level": "high"}}, "could not convert", marks=pytest.mark.slow),
        (None, {"reward_model": {"style": "rule", "ground_truth": None}}, "no ground truth"),
    ],
)
def test_a_reward_is_tried_on_every_kind_of_row(model, tmp_path, reward, bad, words):
    (tmp_path / "rewards.py").write_text(COLUMN)
    path = [] if reward is None else [f"reward.path={tmp_path}/rewards.py:{reward}"]
    good = {**ROW, "city": "paris", "extra_info": {"level": 1}}
    lacking = {name: value for name, value in good.items() if name != "city" or reward != "trl"} | bad
    rows = [good] * 499 + [lacking] + [good] * 100
    numbers = ([f"f.jsonl, row {index + 1}" for index in range(599)], ["g.jsonl, row 1"])
    with pytest.raises(InputError, match=f"f.jsonl, row 500: .*{words}"):
        check(config_of(model, *path), rows, numbers=numbers)
    told = check(config_of(model, *path, "data.on_bad_row=drop"), rows, numbers=numbers)
    assert told["reward tried"]
    assert told["rows not usable"].startswith("1, left out; for example f.jsonl, row 500: ")


@pytest.mark.process
def test_a_slow_start_of_a_reward_leaves_its_rows_their_time(model, monkeypatch):
    clock = SimpleNamespace(now=0.0)

    class SlowToStart(Scorer):
        async def start(self):
            clock.now += 600

        async def score(self, text, row, loop_reward=None):
            if "level" in row["extra_info"]:
                raise RewardError("no such level")
            return await super().score(text, row, loop_reward)

    monkeypatch.setattr(row_checks, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(row_checks, "Scorer", SlowToStart)
    with pytest.raises(InputError, match="no such level"):
        check(config_of(model), [*[ROW] * 30, {**ROW, "extra_info": {"level": 9}}, ROW])


class Room:
    """Opens with another text each time."""

    opened = iter(range(1000, 9000))

    def reset(self, *, seed):
        return f"door {next(self.opened) if seed is None else seed}", {}


def test_prompts_that_differ_when_made_again_are_in_the_plan(model, monkeypatch):
    monkeypatch.setattr("rl_agent.loops.gym.load_plugin", lambda *_: Room)
    for fields, is_random in (({}, True), ({"seed": 3}, False)):
        row = {**ROW, "environment": "room", **fields}
        told = check(config_of(model, "agent.loop=gym"), [row] * 4)
        assert ("random prompts" in told) is is_random
        assert told.get("random prompts", "4 of 4 differ").startswith("4 of 4 differ")


BAD_TRUTHS = ["", " ", None, ["4"], {"a": 4}]


@pytest.mark.parametrize("rule", ["gsm8k", "math"])
@pytest.mark.parametrize("truth", BAD_TRUTHS)
def test_truths_that_a_rule_cannot_read_are_named(rule, truth):
    row = {**ROW, "data_source": rule, "reward_model": {"style": "rule", "ground_truth": truth}}
    why = unusable_truth(RewardSection(), row, is_by_source=True)
    assert why is not None
    assert f"rule {rule}" in why
    by_name = RewardSection(parts={"answer": RewardPart(kind="rule", rule=rule)})
    assert unusable_truth(by_name, {**row, "data_source": "mine"}, is_by_source=False) == why
    assert unusable_truth(RewardSection(path="mine.py:f"), row, is_by_source=False) is None


@pytest.mark.parametrize(
    ("rule", "truth", "is_fine"),
    [
        ("gsm8k", 72, True),
        ("gsm8k", 0.5, True),
        ("math", "\\frac{1}{2}", True),
        ("exact_match", "", True),
        ("exact_match", ["4"], False),
        ("qa", ["Paris", "paris"], True),
        ("qa", {"target": ["Paris"]}, True),
        ("qa", [], False),
        ("qa", {"target": [""]}, False),
        ("qa", None, False),
        ("verl/prime_math", "", False),
        ("verl/search_r1", 7, False),
        ("format", None, True),
    ],
)
def test_each_rule_says_which_truths_it_reads(rule, truth, is_fine):
    section = RewardSection(parts={"answer": RewardPart(kind="rule", rule=rule)})
    row = {**ROW, "reward_model": {"style": "rule", "ground_truth": truth}}
    assert (unusable_truth(section, row, is_by_source=False) is None) is is_fine


def test_at_most_five_rows_are_named_and_dropped_ones_counted():
    """Without a model: the one of the quickstart is made of the rows."""
    bad = [{**ROW, "reward_model": {"style": "rule", "ground_truth": truth}} for truth in BAD_TRUTHS * 2]
    rows = [ROW] * 20 + bad + [ROW] * 3
    numbers = ([f"f.jsonl, row {index + 1}" for index in range(32)], ["g.jsonl, row 1"])
    plain = load_config("quickstart", ["reward.parts.a.kind=rule", "reward.parts.a.rule=exact_match"])
    section = RewardSection(parts={"a": RewardPart(kind="rule", rule="exact_match")})
    config = replace(plain, reward=section)
    with pytest.raises(InputError, match="6 of 33 checked rows cannot be used") as error:
        check(config, rows, numbers=numbers)
    assert str(error.value).count("f.jsonl, row ") == 5
    assert "and 1 more" in str(error.value)
    dropped = replace(config, data=replace(config.data, on_bad_row="drop"))
    assert check(dropped, rows, numbers=numbers)["rows not usable"].startswith("6, left out")


@pytest.mark.process
def test_a_truth_that_the_parser_cannot_read_is_found(model):
    row = {**ROW, "reward_model": {"style": "rule", "ground_truth": "$$"}}
    with pytest.raises(InputError, match="held-out row 1: .*nothing that math-verify can compare with"):
        check(config_of(model), [ROW, ROW, row])


class Streamed:
    """Stream of rows, of which one has no truth."""

    epoch_size = None

    def __getitem__(self, index):
        truth = "4" if index != 70 else ""
        return {**ROW, "reward_model": {"style": "rule", "ground_truth": truth}}

    def where(self, index):
        return f"s.jsonl, row {index + 1}"


@pytest.mark.process
def test_rows_of_a_stream_are_tried_too(model):
    with pytest.raises(InputError, match=r"s.jsonl, row 71: rule gsm8k cannot compare with the ground truth ''"):
        RowCheck(config_of(model), Datasets(train=[], eval=[ROW], stream=Streamed())).sample()


@pytest.mark.process
def test_the_rest_is_tried_while_workers_start(model, monkeypatch, tmp_path):
    (tmp_path / "rewards.py").write_text(COLUMN)
    good = {**ROW, "extra_info": {"level": 1}}
    rows = [good] * 300 + [{**good, "extra_info": {"level": "high"}}]
    config = config_of(model, f"reward.path={tmp_path}/rewards.py:ours")
    monkeypatch.setattr("rl_trainer.planning.row_checks._SAMPLE_S", 0.0)
    checked = RowCheck(config, Datasets(train=[good], eval=rows))
    checked.sample()
    with pytest.raises(InputError, match="held-out row 301: .*could not convert"), checked.going_on():
        pass


@pytest.mark.process
def test_an_ordinary_start_tries_the_reward(model, tmp_path):
    (tmp_path / "rewards.py").write_text("def broken(text, row):\n    return text + 1\n")
    rows = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1), "data_source": "sums"}) for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    settings = [f"data.path={tmp_path}/rows.jsonl", "data.format=rows", "data.options={}"]
    settings += [f"reward.path={tmp_path}/rewards.py:broken"]
    config = load_config("quickstart", [f"model.path={model}", *settings, f"output_dir={tmp_path}/out"])
    with pytest.raises(InputError, match="the reward cannot be used: .* raised TypeError"):
        run(config, Console(quiet=True))
    assert not (tmp_path / "out").exists()
