"""A run that is asked to stop leaves a checkpoint, soon, whoever else had the signal too."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from rl_trainer import checkpoints, run
from rl_trainer.config import load_config
from rl_trainer.errors import RolloutFailedError, WorkerDiedError
from rl_trainer.metrics import Evaluation, HeldGroup, StepRecord
from rl_trainer.pipeline.rollout_source import StopRequestedError
from rl_trainer.run import RunState, follow

CONFIG = load_config("quickstart", ["steps=9", "save_every=0"])


def record(step):
    return StepRecord.of_evaluation(step, Evaluation(reward=0.0, accuracy=None), {}, position=0)


@pytest.fixture
def saved(monkeypatch):
    """Checkpoints that `follow` writes: the folder's name and the prompts that a resumed run begins with."""
    found = []
    monkeypatch.setattr(RunState, "after", lambda self, record, components, config: record)
    monkeypatch.setattr(
        checkpoints,
        "save",
        lambda components, folder, record: found.append((folder.name, record.position, record.pending)),
    )
    return found


def followed(tmp_path, error, *, steps=2, should_stop=True, is_at_step_start=True):
    """Follow a loop that raises `error` after some steps, while two prompts are generated and one group waits."""

    def records():
        for step in range(steps + 1):
            yield record(step)
        raise error

    held = (HeldGroup(group_id=7, row_index=70, place=0, released=2),)
    source = SimpleNamespace(is_at_step_start=is_at_step_start, held=held, pending=(71, 72), position=73)
    components = SimpleNamespace(source=source)
    ended = []
    state = RunState(seed=0, num_rows=100)
    stop = iter([False] * (steps + 1))
    return follow(
        records(), components, CONFIG, state, tmp_path, add=ended.append, should_stop=lambda: next(stop, should_stop)
    )


@pytest.mark.parametrize(
    "error", [StopRequestedError(), RolloutFailedError("a server is lost"), WorkerDiedError("gone")]
)
def test_a_step_that_is_given_up_leaves_a_checkpoint(tmp_path, saved, error):
    assert followed(tmp_path, error) == tmp_path / "checkpoint-2"
    assert saved == [("checkpoint-2", 73, (70, 71, 72))]


def test_a_run_that_was_not_asked_to_stop_raises(tmp_path, saved):
    with pytest.raises(WorkerDiedError):
        followed(tmp_path, WorkerDiedError("gone"), should_stop=False)
    assert saved == []


def test_a_step_that_has_learned_is_not_given_up(tmp_path, saved):
    with pytest.raises(WorkerDiedError):
        followed(tmp_path, WorkerDiedError("gone"), is_at_step_start=False)
    assert saved == []


def test_nothing_is_written_where_no_step_was_taken(tmp_path, saved):
    assert followed(tmp_path, StopRequestedError(), steps=0) is None
    assert saved == []


SMALL = ["steps=200", "eval_every=0", "batch.batch_size=16", "batch.mini_batch_size=16", "data.eval_size=16"]
SMALL += ["data.options.num_rows=2000"]
SLOW_REWARD = """
import pathlib, time
def score(text, row):
    if pathlib.Path({mark!r}).exists():
        time.sleep(600)
    return float(len(text))
"""


def quickstart(model, tmp_path, *overrides):
    """A run of the small model in a session of its own, after its first step."""
    command = [sys.executable, "-m", "rl_trainer.cli", "quickstart", f"model.path={model}", *SMALL]
    command.append(f"output_dir={tmp_path / 'out'}")
    process = subprocess.Popen(
        [*command, *overrides], start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    metrics = tmp_path / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        threading.Event().wait(0.1)
    return process


def descendants(pid):
    children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    return [pid, *(each for child in children for each in descendants(int(child)))]


def ended(process):
    """Exit code and output; a busy machine has 90 s for what takes less than 20."""
    output, _ = process.communicate(timeout=90)
    return process.returncode, output


@pytest.mark.process
@pytest.mark.timeout(400)
def test_sigterm_to_every_process_of_a_run_is_a_checkpoint(model, tmp_path):
    process = quickstart(model, tmp_path, "runtime=ray")
    for pid in reversed(descendants(process.pid)):
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            continue
    code, output = ended(process)
    assert code == 130, output
    assert "Failed to connect to GCS" not in output
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_step_that_waits_for_rewards_is_given_up(model, tmp_path):
    mark = tmp_path / "slow"
    (tmp_path / "reward.py").write_text(SLOW_REWARD.format(mark=str(mark)))
    process = quickstart(model, tmp_path, f"reward.path={tmp_path / 'reward.py'}:score")
    mark.touch()
    metrics = tmp_path / "out" / "metrics.jsonl"
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < 3 or seen != metrics.read_text().count("\n"):
        since = time.monotonic() if seen != metrics.read_text().count("\n") else since
        seen = metrics.read_text().count("\n")
        threading.Event().wait(0.2)
    process.send_signal(signal.SIGTERM)
    code, output = ended(process)
    assert code == 130, output
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    assert RunState.read(checkpoint).step == seen - 1
    assert not run._patience(threading.Event())()
