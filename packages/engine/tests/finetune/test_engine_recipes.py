"""Recipes of rl-sft, rl-dpo and rl-rm, models by their hub id, and datasets by name."""

import json
import os
import subprocess
import sys

import pytest
from packages.engine.tests.support.hub_server import COMMIT, serve_hub

from rl_engine.errors import ConfigError, ModelFolderError
from rl_engine.finetune.cli import RECIPES, parse_config
from rl_engine.finetune.loop import _refuse_idle
from rl_engine.finetune.preferences import DpoConfig, RmConfig
from rl_engine.finetune.sft import SftConfig
from rl_engine.testing import write_tiny_model

PROGRAMS = {"sft": SftConfig, "dpo": DpoConfig, "rm": RmConfig}
NEEDED = ("model.path=m", "data.path=d.jsonl", "output_dir=o")


def test_every_recipe_belongs_to_a_program():
    assert {file.stem for file in RECIPES.glob("*.yaml")} == {*PROGRAMS, *(f"{name}-vlm" for name in PROGRAMS)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_recipe_gives_values_and_the_command_line_wins(name):
    program, kind = f"rl-{name}", PROGRAMS[name]
    config = parse_config(kind, [name, *NEEDED, "lr=0.5"], program=program)
    assert (config.epochs, config.precision, config.activation_checkpointing) == (1, "auto", None)
    assert config.lr == 0.5
    _refuse_idle(config)
    vision = parse_config(kind, [f"{name}-vlm", *NEEDED], program=program)
    assert (vision.lora_rank, vision.freeze_vision) == (16, True)
    _refuse_idle(vision)
    shorter = parse_config(kind, [name, *NEEDED, "steps=7"], program=program)
    assert (shorter.steps, shorter.epochs) == (7, 0)


def test_paths_of_a_recipe_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (mine := tmp_path / "mine.yaml").write_text("model.path: ~/m\ndata.path: ~/d.jsonl\noutput_dir: ~/out\n")
    config = parse_config(SftConfig, [str(mine)])
    assert (config.model_path, config.data_path) == (f"{tmp_path}/m", f"{tmp_path}/d.jsonl")
    assert config.output_dir == f"{tmp_path}/out"


def test_a_recipe_of_ones_own_and_what_is_none(tmp_path):
    (mine := tmp_path / "mine.yaml").write_text("lora.rank: 8\nresume: true\nsave_every: 5\neval_path: null\n")
    config = parse_config(SftConfig, [str(mine), *NEEDED])
    assert (config.lora_rank, config.resume, config.save_every, config.eval_path) == (8, True, 5, None)
    mine.write_text("[1, 2]")
    with pytest.raises(ConfigError, match="must hold keys and values"):
        parse_config(SftConfig, [str(mine), *NEEDED])
    mine.write_text("lr: 1e-5\nepochs: 1\nlr: 1e-6\n")
    with pytest.raises(ConfigError, match="has the key 'lr' twice"):
        parse_config(SftConfig, [str(mine), *NEEDED])
    mine.write_text("learning_rate: 1\n")
    with pytest.raises(ConfigError, match="nearest"):
        parse_config(SftConfig, [str(mine), *NEEDED])
    for other in ("dpo", "dpo-vlm", "nothing", "nothing.yaml"):
        with pytest.raises(ConfigError, match=f"no recipe '{other}' of rl-sft: give sft, sft-vlm, or"):
            parse_config(SftConfig, [other, *NEEDED])


@pytest.mark.promise("`rl-sft` takes a recipe, the hub's id of a model and a dataset's name")
@pytest.mark.process
def test_a_model_by_its_hub_id_and_a_dataset_by_its_name(tmp_path):
    model, data = write_tiny_model(tmp_path / "model"), tmp_path / "rows"
    (model / "pytorch_model.bin").write_bytes(b"the same again")
    data.mkdir()
    rows = [{"prompt_token_ids": [n % 9 + 3], "completion_token_ids": [5, 6]} for n in range(4)]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = [
        *("sft", "model.path=some/model", f"data.path=hf:{data}", f"output_dir={tmp_path / 'out'}"),
        *("steps=1", "batch_size=2", "precision=float32", "save_every=0"),
    ]
    with serve_hub({"some/model": model}) as (url, sent):
        known = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
        known.pop("HF_HUB_OFFLINE", None)
        command = [sys.executable, "-m", "rl_engine.finetune.cli", *line]
        done = subprocess.run(command, env=known, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "model.safetensors" in sent
        assert "pytorch_model.bin" not in sent
        told = []
        for name, endpoint in (("some/other", url), ("some/model@v2", url), ("else/where", "http://127.0.0.1:9")):
            code = f"import rl_engine; rl_engine.model_folder({name!r})"
            answer = subprocess.run(
                [sys.executable, "-c", code], env={**known, "HF_ENDPOINT": endpoint}, capture_output=True, text=True
            )
            told.append(answer.stderr.splitlines()[-1])
    assert all(ModelFolderError.__name__ in each for each in told), told
    assert "the hub has no model some/other" in told[0]
    assert "has no revision v2" in told[1]
    assert "cannot be downloaded from the hub" in told[2]
    assert "HF_ENDPOINT" in told[2]
    snapshot = tmp_path / "home" / "hub" / "models--some--model" / "snapshots" / COMMIT
    assert json.loads((tmp_path / "out.run" / "config.yaml").read_text())["model_path"] == str(snapshot)
