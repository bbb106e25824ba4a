"""The record of a run of rl-engine's commands: which lines survive a resumption, and trackers that are refused."""

import json

import pytest

from rl_engine import BackendError, ConfigError
from rl_engine.finetune.record import RunRecord, run_folder, tracker_names

CONFIG = {"name": "rl-sft", "steps": 4}


def record_of(output, done):
    return RunRecord(str(output), CONFIG, [], done=done)


def lines_of(output):
    return [json.loads(line) for line in (run_folder(str(output)) / "metrics.jsonl").read_text().splitlines()]


def test_steps_taken_again_replace_their_lines(tmp_path):
    first = record_of(tmp_path / "out", 0)
    for step in (1, 2, 3):
        first.add(step, {"loss": 1.0 / step}, wall_s=0.5)
    (first.folder / "summary.json").write_text("{}")
    metrics = run_folder(str(tmp_path / "out")) / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 4, "met')  # killed while it wrote
    second = record_of(tmp_path / "out", 2)
    assert not (second.folder / "summary.json").exists()
    second.add(3, {"loss": 9.0}, wall_s=0.5)
    assert [(line["step"], line["metrics"]["loss"]) for line in lines_of(tmp_path / "out")] == [
        (1, 1.0),
        (2, 0.5),
        (3, 9.0),
    ]
    assert lines_of(tmp_path / "out")[2]["phase_s"] == {"update": 0.5}
    assert second.folder == tmp_path / "out.run"
    assert json.loads((second.folder / "config.yaml").read_text()) == CONFIG


def test_trackers_are_known_and_installed(monkeypatch):
    assert tracker_names(" , ") == []
    with pytest.raises(ConfigError, match="trackers names 'mlflow'; wanted tensorboard or wandb"):
        tracker_names("mlflow")
    monkeypatch.setattr("rl_engine.finetune.record.find_spec", lambda name: None)
    with pytest.raises(BackendError, match="pip install wandb"):
        tracker_names("wandb")
