"""Each tracker's own reader finds the numbers again; one that fails costs the run nothing but itself."""

import io
import itertools
import json
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from rich.console import Console

from rl_trainer import checkpoints
from rl_trainer.config import load_config
from rl_trainer.errors import InputError
from rl_trainer.metrics import Evaluation, StepRecord
from rl_trainer.pipeline.step_record import completion_metrics
from rl_trainer.trackers import RunInfo, Tracker, TrackerGroup
from rl_trainer.trackers.console import progress_lines, sparkline, status


def record(step, **values):
    given = {
        "position": 4 * step, "reward": 0.25 * step, "accuracy": None, "num_tokens": 10, "num_truncated": 1,
        "failures": {"timeout": 2}, "metrics": {"policy_loss": -0.5}, "phase_s": {"generate": 1.5, "update": 0.5},
    }  # fmt: skip
    return StepRecord(step=step, **(given | values))


@pytest.fixture
def run(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    return RunInfo(name="mine", output_dir=tmp_path, num_steps=3, config={"seed": 1, "batch": {}}, console=console)


def logged(run, *names, options=None):
    with TrackerGroup(run, {name: {} for name in names} | (options or {})) as trackers:
        trackers.log(record(1))
        trackers.log(record(2, accuracy=0.75, eval_reward=0.5))
        trackers.finish({"steps": 2, "phase_s": {"update": 1.0}})


def test_a_record_s_numbers_have_flat_names():
    assert record(2, accuracy=0.75).scalars() == {
        "reward": 0.5, "accuracy": 0.75, "num_tokens": 10, "num_truncated": 1, "tokens_per_s": 5.0, "wall_s": 2.0,
        "policy_loss": -0.5, "phase_s/generate": 1.5, "phase_s/update": 0.5, "failures/timeout": 2,
    }  # fmt: skip
    assert "accuracy" not in record(1).scalars()
    assert record(2, eval_reward=0.5).scalars()["eval_reward"] == 0.5


def test_console_and_jsonl(run):
    logged(run, "console")
    shown = run.console.file.getvalue()
    assert "step 1/3  reward 0.250  5 tok/s  generate 1.50s  update 0.50s" in shown
    assert "step 2/3  reward 0.500  held-out 0.750" in shown
    assert "update 1.0" in shown.split("summary")[1]
    lines = [json.loads(line) for line in (run.output_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["metrics"] == {"policy_loss": -0.5}


def test_the_terminal_says_reward_if_nothing_measures_accuracy(run):
    with TrackerGroup(run, {"console": {}}) as trackers:
        trackers.log(record(1, eval_reward=-2.5))
    assert "held-out reward -2.500" in run.console.file.getvalue()


@pytest.mark.promise("Without a terminal a long step says once in ten seconds what it is at")
@pytest.mark.process
def test_without_a_terminal_a_line_says_what_a_long_step_is_at():
    console, asked = Console(file=io.StringIO(), width=40), []

    def doing():
        asked.append(time.monotonic())
        return f"step 3/140: generate, {len(asked)} of 128 groups complete" + "!" * 120

    with progress_lines(console, doing, silence_s=0.1) as renew:
        for _ in range(5):  # lines of steps come in time
            time.sleep(0.02)
            renew()
        assert not asked
        time.sleep(0.35)
    lines = console.file.getvalue().splitlines()
    assert 2 <= len(lines) == len(asked) <= 3
    assert lines[0].startswith("step 3/140: generate, 1 of 128 groups complete")
    assert all(len(line) == 120 for line in lines)
    assert min(b - a for a, b in itertools.pairwise(asked)) >= 0.1
    with progress_lines(Console(file=io.StringIO(), force_terminal=True), doing, silence_s=0.01):
        time.sleep(0.05)
    assert len(asked) == len(lines), "a terminal has its panel"


def test_the_start_is_told_at_once_without_a_terminal():
    console = Console(file=io.StringIO())
    with status(console, "starting the workers"):
        assert console.file.getvalue() == "starting the workers\n"


def test_a_step_is_one_line_of_at_most_120_characters(run):
    phases = {f"phase_with_a_long_name_{n}": float(n) for n in range(9)}
    with TrackerGroup(run, {"console": {}}) as trackers:
        trackers.log(record(1, phase_s=phases, accuracy=0.5, eval_reward=0.5))
    (line,) = run.console.file.getvalue().splitlines()
    assert len(line) <= 120
    assert "phase_with_a_long_name_8" in line, "the longest phase comes first"
    assert "phase_with_a_long_name_0" not in line


def test_a_terminal_shows_a_panel(run):
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    ages = {"staleness_mean": 0.5, "staleness_max": 2.0}
    with TrackerGroup(replace(run, console=console), {"console": {}}) as trackers:
        for step in (1, 2, 3):
            trackers.log(record(step, metrics=ages))
    shown = console.file.getvalue()
    for words in ("▁▅█", "mean 0.50, at most 2 versions", "timeout 6", "3/3", "█"):
        assert words in shown, words


def test_a_sparkline_scales_itself():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([]) == ""


def test_completions_are_measured_from_their_tags():
    tags = [
        {"group_id": 0, "reward": 1.0, "num_tokens": 4, "finish_reason": "stop"},
        {"group_id": 0, "reward": 1.0, "num_tokens": 8, "finish_reason": "length"},
        {"group_id": 1, "reward": 0.0, "num_tokens": 2, "finish_reason": "stop"},
        {"group_id": 1, "reward": 2.0, "num_tokens": 2, "finish_reason": "timeout"},
    ]
    assert completion_metrics(tags) == {
        "completion_tokens_mean": 4.0, "completion_tokens_max": 8.0, "truncated_share": 0.5,
        "reward_std": 0.5**0.5, "groups_without_signal": 0.5,
    }  # fmt: skip
    assert completion_metrics([]) == {}


def test_the_evaluation_with_which_a_run_goes_on_is_there_once(run):
    def steps():
        lines = [json.loads(line) for line in (run.output_dir / "metrics.jsonl").read_text().splitlines()]
        return [(line["step"], line["accuracy"]) for line in lines]

    again = {
        step: StepRecord.of_evaluation(step, Evaluation(reward=0.6, accuracy=0.7), {}, position=0) for step in (0, 1, 2)
    }
    with TrackerGroup(run, {}) as trackers:
        trackers.log(again[0])
        trackers.log(record(1))
        for _ in range(2):  # it went on from step 1 twice
            checkpoints.forget_after(run.output_dir, 1)
            trackers.log(again[1])
        trackers.log(record(2, accuracy=0.75, eval_reward=0.5))
        trackers.log(again[2])
    assert steps() == [(0, 0.7), (1, None), (1, 0.7), (2, 0.75)]


def test_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged(run, "tensorboard")
    events = EventAccumulator(str(run.output_dir / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.25), (2, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("accuracy")] == [(2, 0.75)]
    assert events.Scalars("phase_s/generate")[0].value == 1.5


def test_tensorboard_hides_logs_of_steps_taken_again(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged(run, "tensorboard")
    with TrackerGroup(replace(run, start_step=1), {"tensorboard": {}}) as trackers:
        trackers.log(record(2, reward=0.9))
    events = EventAccumulator(str(run.output_dir / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.25), (2, pytest.approx(0.9))]
    with TrackerGroup(run, {"tensorboard": {}}) as trackers:  # killed before its first checkpoint
        trackers.log(record(1, reward=0.8))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, pytest.approx(0.8))]


@pytest.mark.process
def test_wandb_offline(run, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged(run, "wandb", options={"wandb": {"mode": "offline", "project": "theirs"}})
    import wandb

    wandb.teardown()  # as at the end of the process: its own process writes what it still holds
    (file,) = (run.output_dir / "wandb").glob("offline-run-*/run-*.wandb")
    raw = file.read_bytes()
    for text in (b"policy_loss", b"phase_s/generate", b"theirs"):
        assert text in raw


def test_trackio(run, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(run.output_dir / "trackio"))
    logged(run, "trackio", options={"trackio": {"project": "theirs"}})
    with closing(sqlite3.connect(run.output_dir / "trackio" / "theirs.db")) as database:
        found = dict(database.execute("select step, metrics from metrics").fetchall())
    assert {step: json.loads(metrics)["reward"] for step, metrics in found.items()} == {1: 0.25, 2: 0.5}


@pytest.mark.integration
def test_mlflow(run, monkeypatch):
    """`uv pip install mlflow-skinny` first: a run with its numbers, its configuration and how it ended."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (run.output_dir / "mlruns").as_uri()
    for _ in range(2):  # the experiment exists then
        logged(run, "mlflow", options={"mlflow": {"tracking_uri": uri, "experiment": "theirs"}})
    client = MlflowClient(uri)
    found, _ = client.search_runs([client.get_experiment_by_name("theirs").experiment_id])
    assert (found.info.status, found.data.params["seed"]) == ("FINISHED", "1")
    history = client.get_metric_history(found.info.run_id, "reward")
    assert {metric.step: metric.value for metric in history} == {1: 0.25, 2: 0.5}
    assert found.data.metrics["phase_s/generate"] == 1.5


@pytest.mark.integration
def test_swanlab_offline(run):
    """`uv pip install swanlab` first."""
    logged(run, "swanlab", options={"swanlab": {"project": "theirs", "mode": "offline"}})
    (file,) = (run.output_dir / "swanlab").glob("run-*/run-*.swanlab")
    raw = file.read_bytes()
    for text in (b"policy_loss", b"phase_s/generate", b"theirs"):
        assert text in raw


def test_several_at_once_and_one_of_your_own(run, monkeypatch):
    seen = []

    class Mine(Tracker):
        def __init__(self, run, *, greeting):
            seen.append(greeting)

        def log(self, record):
            seen.append(record.step)

        def close(self, summary):
            seen.append(summary["steps"])

    point = EntryPoint("mine", "unused", "rl_trainer.trackers")
    monkeypatch.setattr(EntryPoint, "load", lambda self: Mine)
    monkeypatch.setattr("rl_trainer.plugins.entry_points", lambda **_: EntryPoints([point]))
    logged(run, "mine", options={"mine": {"greeting": "hello"}})
    assert seen == ["hello", 1, 2, 2]


class Fails(Tracker):
    def __init__(self, run, *, at):
        self.at, self.calls = at, 0
        if at == "start":
            raise RuntimeError("no network")

    def log(self, record):
        self.calls += 1
        assert self.calls == 1, "it was to be left out"
        if self.at == "log":
            raise RuntimeError("no network")

    def close(self, summary):
        raise RuntimeError("no network")


@pytest.mark.promise("A tracker that fails is told once; `metrics.jsonl` is written whatever happens")
@pytest.mark.parametrize(
    ("at", "words"), [("log", "failed at step 1 and is left out"), ("close", "could not be closed")]
)
def test_a_tracker_that_fails_is_told_once_and_loses_nothing(run, monkeypatch, at, words):
    monkeypatch.setattr(EntryPoint, "load", lambda self: Fails)
    with TrackerGroup(run, {"console": {"at": at}}) as trackers:
        for step in (1, 2, 3) if at == "log" else (1,):
            trackers.log(record(step))
    assert run.console.file.getvalue().count("no network; all numbers are in metrics.jsonl") == 1
    assert words in run.console.file.getvalue()
    assert len((run.output_dir / "metrics.jsonl").read_text().splitlines()) == (3 if at == "log" else 1)


@pytest.mark.parametrize("error", [SystemExit(3), BaseExceptionGroup("two", [SystemExit(1)]), ValueError("a\ud800b")])
def test_whatever_a_tracker_raises_ends_no_run(run, monkeypatch, error):
    class Leaves(Tracker):
        def __init__(self, run):
            pass

        def log(self, record):
            raise error

        def close(self, summary):
            raise error

    monkeypatch.setattr(EntryPoint, "load", lambda self: Leaves)
    with TrackerGroup(run, {"console": {}}) as trackers:
        trackers.log(record(1, last_failure="a\ud800b\0", metrics={"reward/a\ud800": 1.0}))
    said = run.console.file.getvalue()
    assert f"failed at step 1 and is left out from here on: {type(error).__name__}: " in said
    said.encode()


def test_a_tracker_that_cannot_start_stops_the_run_early(run):
    with pytest.raises(
        InputError, match=r"tracker 'console' cannot start with tracking.trackers.console=\{'colour': 1\}"
    ):
        TrackerGroup(run, {"console": {"colour": 1}})


def test_trackers_are_names_or_names_with_options():
    def trackers(*overrides):
        return load_config("gsm8k", overrides).tracking.trackers

    assert trackers() == {"console": {}}
    assert trackers("tracking.trackers=[console, wandb]") == {"console": {}, "wandb": {}}
    assert trackers("tracking.trackers.wandb.mode=offline") == {"wandb": {"mode": "offline"}}
