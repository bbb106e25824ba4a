"""Runs under random faults recover, or end with a sentence and go on; nothing is lost, doubled, leaked or wrong."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[3] / "tests" / "chaos.py"
_spec = importlib.util.spec_from_file_location("chaos_under_test", CHAOS)
faults = sys.modules["chaos_under_test"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(faults)
STAGES = ["standins", "inline", "ray"]


def chaos(tmp_path, *arguments, timeout_s):
    """As a process of its own: it forks runs, and takes a /dev/shm of its own where it may."""
    output = tmp_path / "chaos.json"
    ended = subprocess.run(
        [sys.executable, CHAOS, "--output", output, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    told = " ".join(arguments) + ended.stdout[-6000:] + ended.stderr[-3000:]
    assert ended.returncode == 0, told
    trials = json.loads(output.read_text())["trials"]
    assert sum(trial["fired"] for trial in trials) > len(trials) / 2, told
    return trials


@pytest.mark.process
def test_a_few_faults_on_controllers_one_by_one_and_in_chains(tmp_path):
    trials = chaos(tmp_path, "--trials", "2", "--seed", "7", "--stages", "standins", timeout_s=280)
    assert {trial["ended"] for trial in trials} <= {"recovered", "sentence", "killed"}
    trials = chaos(tmp_path, "--trials", "2", "--seed", "9", "--stages", "standins", "--chain", "3", timeout_s=280)
    assert {trial["ended"] for trial in trials} <= {"recovered", "sentence", "killed"}
    assert not list(Path(tmp_path).glob("rl-chaos-*"))


@pytest.mark.promise("Random faults: nothing lost, doubled, wrong, leaked or hung")
@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_two_hundred_faults(tmp_path):
    seed = str(int.from_bytes(os.urandom(3)))
    chaos(tmp_path, "--trials", "200", "--seed", seed, "--stages", "standins,inline,ray", timeout_s=5300)


def test_a_schedule_is_its_seed_s():
    shares = {"standins": 3, "inline": 2, "ray": 1}
    assert faults.draw_trials(50, 3, STAGES, shares) == faults.draw_trials(50, 3, STAGES, shares)[:50]
    assert faults.draw_trials(50, 3, STAGES, shares) != faults.draw_trials(50, 4, STAGES, shares)
    many = faults.draw_trials(2000, 3, STAGES, shares)
    assert {trial.stage for trial in many} == set(STAGES)
    assert {trial.pipeline for trial in many if trial.stage == "inline"} == {"sync"}
    assert {trial.target for trial in many if trial.stage != "ray"} == {"controller"}
    for stage, count in (("inline", 5), ("ray", 6)):
        assert len({trial.fault for trial in many if trial.stage == stage}) == count


def test_the_table_counts_what_struck():
    trial = faults.Trial(
        number=1, stage="ray", pipeline="sync", fault="kill", target="engine", phase="update", occurrence=1, delay_s=0.0
    )
    outcomes = [
        faults.Outcome(trial=trial, fired=True, ended="recovered", seconds=3.0),
        faults.Outcome(trial=trial, fired=True, ended="sentence", seconds=5.0, resumed=True, problems=["lost"]),
        faults.Outcome(trial=trial, fired=False, ended="recovered", seconds=0.0),
    ]
    assert (
        faults.table(outcomes).splitlines()[2]
        == "| ray | sync | kill (engine) | update | 3 | 2 | 1 | 1 | 1 | 4.0 | 5.0 | 1 |"
    )
    told = faults.summary(outcomes).splitlines()
    assert told[0] == "3 trials. The fault struck in 2; 1 trials had a problem."
    assert told[1:3] == ["3 trials with Ray: 3 of `sync`;", "the fault struck engine 3."]
    assert told[-1] == "| `ray` | kill | 3 | 2 | 1 | 1 | 0 | 4.0 | 5.0 | 1 |"
