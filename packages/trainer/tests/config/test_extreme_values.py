"""Rows that are nested deeply and numbers that float32 does not hold: refused by name, or counted."""

import asyncio
import json

import pytest

import rl_agent
from rl_trainer.config import load_config
from rl_trainer.config.schema import DataConfig
from rl_trainer.data import load_datasets
from rl_trainer.errors import ConfigError, DataError, InputError
from rl_trainer.rewards import Score
from rl_trainer.workers.grading import Grading

pytestmark = pytest.mark.process  # seconds of computation


def nested(depth, kind):
    opening, closing = {"mapping": ('{"a": ', "}"), "list": ("[", "]")}[kind]
    return opening * depth + "1" + closing * depth


@pytest.mark.parametrize("kind", ["mapping", "list"])
@pytest.mark.parametrize("depth", [101, 300, 900, 3000, 100_000])
def test_a_deep_row_is_named(tmp_path, depth, kind):
    file = tmp_path / "rows.jsonl"
    good = '{"prompt": "1 + 1", "answer": "2"}\n'
    deep = f'{{"prompt": "1 + 1", "answer": "2", "extra_info": {nested(depth, kind)}}}\n'
    file.write_text(good * 3 + deep)
    with pytest.raises(DataError, match=r"rows.jsonl, row 4(: field 'extra_info' is nested more than| is not JSON)"):
        load_datasets(DataConfig(path=str(file), eval_size=1), seed=0)
    found = load_datasets(DataConfig(path=str(file), eval_size=1, on_bad_row="drop"), seed=0)
    assert (found.num_bad, len(found.train) + len(found.eval)) == (1, 3)


def test_a_deep_parquet_row_is_named(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    value = 1
    for _ in range(150):
        value = [value]
    parquet.write_table(pa.table({"prompt": ["1 + 1"] * 2, "deep": [value] * 2}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows.parquet cannot be read as parquet: .* too deeply nested"):
        load_datasets(DataConfig(path=str(tmp_path / "rows.parquet"), eval_size=1), seed=0)


def test_rows_of_a_usual_depth_are_read_as_they_are(tmp_path):
    value = json.loads(nested(90, "mapping"))
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": "1 + 1", "extra_info": value}) + "\n" + '{"prompt": "2"}\n'
    )
    found = load_datasets(DataConfig(path=str(tmp_path / "rows.jsonl"), eval_size=1), seed=0)
    assert found.train[0]["extra_info"] == value


@pytest.mark.parametrize("value", ["1e308", ".inf", "-.inf", ".nan", "99999999999999999999999"])
@pytest.mark.parametrize(
    "key",
    [
        "engine.optimizer.lr",
        "engine.optimizer.weight_decay",
        "algorithm.kl_coef",
        "algorithm.entropy_coef",
        "rollout.temperature",
        "batch.batch_size",
        "batch.over_sampling",
        "data.eval_size",
        "seed",
        "steps",
        "timeout_s",
        "heartbeat_s",
        "algorithm.loss_options.clip_low",
        "model.warmup.lr",
    ],
)
def test_a_number_that_cannot_be_meant_is_refused_by_its_key(key, value):
    with pytest.raises(ConfigError) as raised:
        load_config("quickstart", [f"{key}={value}"])
    assert key.rpartition(".")[2] in str(raised.value)


@pytest.mark.parametrize("key", ["rollout.temperature", "rollout.eval_temperature"])
@pytest.mark.parametrize("value", ["1e-300", "0.009", "-1"])
def test_a_temperature_that_no_server_keeps_is_refused(key, value):
    with pytest.raises(InputError, match=rf"{key}.*0"):
        load_config("quickstart", [f"{key}={value}"])


def test_no_clipping_is_an_infinite_norm():
    assert load_config("quickstart", ["engine.optimizer.max_grad_norm=.inf"]).engine.optimizer.max_grad_norm == float(
        "inf"
    )


def test_a_deep_value_of_the_command_line_is_refused():
    with pytest.raises(ConfigError, match="is not valid YAML"):
        load_config("quickstart", [f"data.options={nested(5000, 'list')}"])


class Fixed:
    step = 0

    def __init__(self, score):
        self.score = score

    async def values(self, completion, row):
        return 0.0

    async def scores(self, completions, values, row):
        return [self.score for _ in completions]


@pytest.mark.parametrize("value", [1e308, float("inf"), float("nan"), -1e16])
@pytest.mark.parametrize("is_component", [False, True])
def test_a_reward_that_float32_cannot_square_is_counted(value, is_component):
    class Loop(rl_agent.AgentLoop):
        async def run(self, sampling_params, row):
            return rl_agent.AgentLoopOutput(
                prompt_token_ids=(1,),
                completion_token_ids=(2,),
                loss_mask=(1,),
                rollout_logprobs=(-1.0,),
                weight_versions=(1,),
                finish_reason="stop",
                num_turns=1,
                text="x",
            )

    score = Score(reward=0.0, components={"length": value}) if is_component else Score(reward=value)
    rows = [{"data_source": "mine"}]

    async def main():
        grading = Grading(rows, Fixed(score))
        runner = rl_agent.AgentRunner(lambda _: Loop(None, None))
        hooks = {"grade": grading.grade, "complete": grading.complete}
        return [group async for group in runner.run_groups(rows, {}, group_size=2, **hooks)]

    (group,) = asyncio.run(main())
    assert group.is_dropped
    assert f"is {value:g}; a number of at most 1e+15 is needed" in group.failures[0].message
