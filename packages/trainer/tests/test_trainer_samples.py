"""What a run kept can be read and looked at; a whole run with every real part keeps what it learned from."""

import json

import pyarrow as pa
import pytest
import torch
from rich.console import Console

import rl_tq
from rl_trainer import checkpoints
from rl_trainer.cli import main_sample
from rl_trainer.config import load_config
from rl_trainer.errors import DataError
from rl_trainer.pipeline.replicas import SomeSamples
from rl_trainer.run import run
from rl_trainer.samples import FOLDER, file_of, read_samples, steps_of, write_samples


def write(run, step, rewards):
    (run / FOLDER).mkdir(exist_ok=True)
    ids = torch.nested.nested_tensor_from_jagged(torch.arange(6), torch.tensor([0, 2, 2, 6]))
    columns = {
        "completion_token_ids": ids, "group_id": torch.tensor([7, 7, 8]), "prompt": ["a", "b", "[red]c"],
        "completion": ["x", "y", "z"], "reward": rewards, "finish_reason": ["stop"] * 3,
        "weight_version_min": torch.tensor([1, 2, 3]),
    }  # fmt: skip
    assert write_samples(file_of(run / FOLDER, step), columns) > 0


def test_ragged_columns_come_back_as_they_went(tmp_path):
    write(tmp_path, 2, [0.0, 1.0, 0.5])
    write(tmp_path, 10, [1.0, 1.0, 1.0])
    assert steps_of(tmp_path) == [2, 10]
    table = read_samples(tmp_path)
    assert table["step"].to_pylist() == [2, 2, 2, 10, 10, 10]
    assert table["completion_token_ids"].to_pylist()[:3] == [[0, 1], [], [2, 3, 4, 5]]
    assert table.schema.field("completion_token_ids").type == pa.list_(pa.int64())
    assert read_samples(tmp_path, steps=[10], columns=["reward"]).to_pydict() == {"step": [10] * 3, "reward": [1.0] * 3}
    with pytest.raises(DataError, match="has no samples of step 3; there are 2 steps from 2 to 10"):
        read_samples(tmp_path, steps=[3])


def test_columns_of_several_numbers_come_back_too(tmp_path):
    """Parts of rewards, one row of them per sample, and a teacher's candidates, one per token."""
    offsets = torch.tensor([0, 1, 3])
    columns = {
        "components": torch.tensor([[1.0, 0.5], [0.0, 2.0]]),
        "candidate_token_ids": torch.nested.nested_tensor_from_jagged(torch.arange(6).reshape(3, 2), offsets),
    }
    (tmp_path / FOLDER).mkdir()
    write_samples(file_of(tmp_path / FOLDER, 1), columns)
    found = read_samples(tmp_path).to_pydict()
    assert found["components"] == [[1.0, 0.5], [0.0, 2.0]]
    assert found["candidate_token_ids"] == [[[0, 1]], [[2, 3], [4, 5]]]


def test_samples_of_steps_that_are_taken_again_are_taken_away(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step, [0.0, 1.0, 0.5])
    checkpoints.forget_after(tmp_path, 2)
    assert steps_of(tmp_path) == [1, 2]


def test_rl_sample_shows_the_best_of_the_last_step(tmp_path, capsys):
    write(tmp_path, 1, [0.0, 1.0, 0.5])
    assert main_sample([str(tmp_path), "--order", "best", "--count", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("reward 1.000") < shown.index("reward 0.500")
    assert "step 1, group 8, weights 3, stop" in shown
    assert "[red]c" in shown
    assert "reward 0.000" not in shown


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["{run}"], "holds no samples: tracking.keep_samples=true keeps them all, `some` a few"),
        (["{run}", "--samples", "2"], "is a run: --samples, --url and key=value are of a recipe"),
        (["quickstart"], "model.path is not set"),
        (["quickstart", "--step", "2"], "--step is of a run"),
        (["quickstart", "--count", "0"], "--count=0 and --samples=1 must be at least 1"),
        (["quickstart", "--samples", "0"], "--count=4 and --samples=0 must be at least 1"),
    ],
)
def test_rl_sample_refuses_in_a_sentence(tmp_path, capsys, argv, words):
    assert main_sample([word.format(run=tmp_path) for word in argv]) == 2
    assert words in capsys.readouterr().err


def test_samples_are_eight_groups_per_hundred_steps_and_the_last(tmp_path):
    written = []

    class Agents:
        def write_samples(self, batch, step, folder):
            written.append((step, {tags["group_id"] for tags in batch.tags}, folder))

    with rl_tq.serve("inproc://") as queue:
        tags = [{"group_id": index // 2} for index in range(20)]
        batch = queue.put({"x": list(range(20))}, partition="train", tags=tags)
        some = SomeSamples(Agents(), tmp_path, num_steps=250)
        for step in range(1, 251):
            some.write(batch, step)
    assert all(groups == set(range(8)) for _, groups, _ in written)
    assert [step for step, _, _ in written] == [2, *range(3, 250, 3), 250]


@pytest.mark.process
def test_a_run_keeps_every_sample_and_can_ask_for_fresh_ones(model, tmp_path, capsys):
    sizes = [
        "data.options.num_rows=200",
        "data.eval_size=4",
        "batch.batch_size=4",
        "batch.mini_batch_size=2",
        "steps=2",
    ]
    settings = [*sizes, "batch.group_size=2", "eval_every=0", "runtime=inline", f"model.path={model}"]
    out = tmp_path / "out"
    run(load_config("quickstart", [*settings, "tracking.keep_samples=true", f"output_dir={out}"]), Console(quiet=True))
    table = read_samples(out)
    assert table["step"].to_pylist() == [1] * 8 + [2] * 8
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for row in table.to_pylist():
        num_tokens = len(row["completion_token_ids"])
        assert num_tokens == len(row["loss_mask"]) == len(row["rollout_logprobs"]) == len(row["advantages"]) > 0
        assert sum(row["rewards"]) == pytest.approx(row["reward"])
        assert row["weight_version_min"] == row["weight_version_max"] == row["step"]
        assert " =" in row["prompt"]
        assert row["completion"] or not num_tokens
    for step in (1, 2):
        rewards = [row["reward"] for row in table.to_pylist() if row["step"] == step]
        assert sum(rewards) / 8 == pytest.approx(records[step]["reward"])
    some = tmp_path / "some"
    run(load_config("quickstart", [*settings, f"output_dir={some}"]), Console(quiet=True))
    assert read_samples(some)["step"].to_pylist() == [2] * 8, "eight groups, not of the first step"
    capsys.readouterr()
    assert main_sample([str(out)]) == 0
    assert capsys.readouterr().out.count("reward ") == 4
    assert main_sample(["quickstart", *settings, "--count", "2", "--samples", "3"]) == 0
    assert capsys.readouterr().out.count("reward ") == 6
