"""A checkpoint knows what its run read: rows, model folder, files of code."""

import json
import shutil
from dataclasses import replace

import pytest

from rl_engine import write_manifest
from rl_engine.testing import write_tiny_model
from rl_trainer.checkpoints import check_inputs
from rl_trainer.config import load_config
from rl_trainer.data import load_datasets
from rl_trainer.errors import InputError
from rl_trainer.inputs import digest_inputs


def chat(number, answer=None):
    truth = str(number if answer is None else answer)
    prompt = [{"role": "user", "content": f"say {number}"}]
    return {"prompt": prompt, "data_source": "mine", "reward_model": {"style": "rule", "ground_truth": truth}}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with data, a model, a reward and a module."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "game_of_tests.py").write_text("class Game: ...\n")
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.jsonl", [chat(n) for n in range(40)])
    write(tmp_path / "data" / "test.jsonl", [chat(n) for n in range(100, 104)])
    write_tiny_model(tmp_path / "model")
    (tmp_path / "reward.py").write_text("def score(text, row):\n    return 1.0\n")
    return tmp_path


def checkpoint(files, *overrides, drops=False):
    """The configuration of a run that resumes from a checkpoint of step 2, after 8 prompts."""
    config = load_config(
        "gsm8k",
        [f"data.path={files / 'data'}", "data.format=rows", f"model.path={files / 'model'}",
         f"reward.path={files / 'reward.py'}:score", "algorithm.stages=[game_of_tests:Game]", *overrides],
    )  # fmt: skip
    datasets = load_datasets(config.data, seed=config.seed)
    folder = files / "checkpoint-2"
    (folder / "engine").mkdir(parents=True)
    order = {}
    if datasets.stream is not None:
        from rl_trainer.data.sampler import StreamOrder

        sampler = StreamOrder(rows=datasets.stream, measure=lambda rows: [1 for _ in rows], longest=9, drops=drops)
        sampler.take(8)
        order = sampler.state_dict()
    state = {"step": 2, "position": 8, "num_rows": len(datasets.train), "seed": config.seed, "order": order}
    write_manifest(folder / "trainer_state.json", state | {"inputs": digest_inputs(config, datasets)}, {})
    return replace(config, resume_from=str(folder))


def reorder(files):
    write(files / "data" / "train.jsonl", [chat(n) for n in reversed(range(40))])


def edit_an_answer(files):
    write(files / "data" / "train.jsonl", [chat(n, 7 if n == 3 else None) for n in range(40)])


def edit_a_held_out_row(files):
    write(files / "data" / "test.jsonl", [chat(n, 1) for n in range(100, 104)])


def train_the_base(files):
    write_tiny_model(files / "model", seed=5)


def add_a_token(files):
    path = files / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 17}))


def change_the_template(files):
    (files / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}!")


def change_the_reward(files):
    (files / "reward.py").write_text("def score(text, row):\n    return 0.0\n")


def change_the_game(files):
    (files / "game_of_tests.py").write_text("class Game:\n    moves = 3\n")


CHANGES = [
    (reorder, "training rows"),
    (edit_an_answer, "training rows"),
    (edit_a_held_out_row, "held-out rows"),
    (train_the_base, "base model"),
    (add_a_token, "tokenizer"),
    (change_the_template, "chat template"),
    (change_the_reward, "code of reward.py"),
    (change_the_game, "code of game_of_tests.py"),
]


@pytest.mark.parametrize(("change", "name"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_a_changed_input_is_named_and_refused(files, change, name):
    config = checkpoint(files)
    change(files)
    with pytest.raises(InputError, match=rf"^{name}: no longer as when .*--resume=anyway"):
        check_inputs(config, load_datasets(config.data, seed=config.seed))
    assert check_inputs(config, load_datasets(config.data, seed=config.seed), is_forced=True) == [name]


def test_plug_ins_of_one_file_name_are_all_compared(files):
    for folder in ("a", "z"):
        (files / folder).mkdir()
        (files / folder / "rules.py").write_text("def score(text, row):\n    return 1.0\n")
    names = {each: f"{files / each / 'rules.py'}:score" for each in "az"}
    config = checkpoint(files, f"reward.path={names['a']}", f"algorithm.stages=[{names['z']}]")
    (files / "a" / "rules.py").write_text("def score(text, row):\n    return 0.0\n")
    with pytest.raises(InputError, match=r"^code of rules\.py: no longer as when "):
        check_inputs(config, load_datasets(config.data, seed=config.seed))


def test_unchanged_inputs_pass_wherever_they_are(files):
    config = checkpoint(files)
    moved = files / "moved"
    shutil.copytree(files / "model", moved)
    config = replace(config, model=replace(config.model, path=str(moved)))
    assert check_inputs(config, load_datasets(config.data, seed=config.seed)) == []


@pytest.mark.parametrize(("change", "found"), [(reorder, ["training rows"]), (edit_an_answer, ["training rows"])])
def test_a_stream_is_compared_by_position(files, change, found):
    config = checkpoint(files, "data.options.stream_buffer=4")
    assert check_inputs(config, load_datasets(config.data, seed=config.seed)) == []
    change(files)
    assert check_inputs(config, load_datasets(config.data, seed=config.seed), is_forced=True) == found


def test_a_checkpoint_without_digests_passes(files):
    config = checkpoint(files)
    write_manifest(files / "checkpoint-2" / "trainer_state.json", {"step": 2, "num_rows": 40, "seed": 0}, {})
    reorder(files)
    assert check_inputs(config, load_datasets(config.data, seed=config.seed)) == []


def test_a_stream_with_rows_that_were_dropped_resumes(files):
    rows = [chat(n) for n in range(40)]
    rows[2] = {"prompt": 7}
    write(files / "data" / "train.jsonl", rows)
    config = checkpoint(files, "data.options.stream_buffer=1", "data.on_bad_row=drop", drops=True)
    assert check_inputs(config, load_datasets(config.data, seed=config.seed)) == []
