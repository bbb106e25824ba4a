"""A run whose processes die, hang or are interrupted: it recovers by itself, or ends with one sentence."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_trainer import checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = ["data.options.num_rows=64", "data.eval_size=8", "batch.batch_size=4", "batch.mini_batch_size=2"]
SMALL += ["batch.group_size=4", "eval_every=0", "timeout_s=300"]


def start(model, output_dir, *overrides):
    command = [sys.executable, "-m", "rl_trainer.cli", "quickstart", "runtime=ray", *SMALL]
    with Path(f"{output_dir}.log").open("a") as log:
        return subprocess.Popen(
            [*command, f"model.path={model}", f"output_dir={output_dir}", *overrides],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def log_of(output_dir):
    return Path(f"{output_dir}.log").read_text()


def records_of(output_dir):
    file = output_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def trained(output_dir):
    return {r["step"]: r["metrics"] for r in records_of(output_dir) if r["metrics"]}


def until(condition, process, output_dir):
    deadline = time.monotonic() + 400
    while not condition():
        assert process.poll() is None, log_of(output_dir)[-3000:]
        assert time.monotonic() < deadline, log_of(output_dir)[-3000:]
        time.sleep(0.02)


def processes_of(session, title=""):
    """Processes of a run whose command line contains `title`; Ray's processes stay in the session of its driver."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            is_ended = fields[0] in "ZX"
            if int(fields[3]) == session and not is_ended and title.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def nothing_left(model, session):
    deadline = time.monotonic() + 60
    while left := [*processes_of(session), *servers_of(model)]:
        assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
        time.sleep(0.2)


def servers_of(model):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(model).encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


@pytest.fixture
def own_model(model, tmp_path):
    """A folder whose name is on the command lines of this test's servers alone."""
    folder = tmp_path / "own-model"
    folder.symlink_to(model)
    return folder


@pytest.mark.promise("Without an engine or queue the run goes on from its checkpoint, with the same losses")
def test_losses_survive_killed_engines_and_queues(own_model, tmp_path):
    num_steps = 6
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    common = ["save_every=2", f"steps={num_steps}", "engine.optimizer.lr=1e-2", "engine.optimizer.warmup_steps=0"]
    assert start(own_model, whole, *common).wait(400) == 0, log_of(whole)
    process = start(own_model, killed, *common, "heartbeat_s=10")
    for step, role, number in ((3, "engine", signal.SIGKILL), (5, "queue", signal.SIGKILL), (6, "engine", None)):
        if number is None:
            break
        until(lambda step=step: step in trained(killed), process, killed)
        (victim,) = processes_of(process.pid, f"ray::{role}")
        os.kill(victim, number)
    assert process.wait(400) == 0, log_of(killed)
    told = re.findall(r"restart (\d) of max_restarts=3, from (\S+), because a worker of pool '(\w+)'", log_of(killed))
    assert [number for number, *_ in told] == ["1", "2"], log_of(killed)
    assert [role for *_, role in told] == ["engine", "queue"]
    expected, found = trained(whole), trained(killed)
    assert list(found) == list(range(1, num_steps + 1)), "a step is missing, or there twice"
    for step, metrics in expected.items():
        assert metrics["policy_loss"] == found[step]["policy_loss"], f"step {step} differs"
        assert metrics["grad_norm"] == found[step]["grad_norm"], f"step {step} differs"
    assert rows_of(killed) == rows_of(whole)
    nothing_left(own_model, process.pid)
    again = start(own_model, killed, *common, "--resume")
    assert again.wait(200) == 0
    assert log_of(killed).splitlines()[-1].startswith("rl-train: the run is finished: ")
    assert trained(killed) == found


def rows_of(output_dir):
    lines = [json.loads(line) for line in (output_dir / "prompts.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), "a step is missing, or there twice"
    return [line["rows"] for line in lines]


def test_the_only_replica_dies_while_it_generates(own_model, tmp_path):
    output_dir = tmp_path / "out"
    process = start(own_model, output_dir, "save_every=1", "steps=4", "rollout.num_replicas=1")
    until(lambda: 2 in trained(output_dir), process, output_dir)
    os.kill(servers_with(own_model, "rl_rollout")[0], signal.SIGKILL)
    assert process.wait(500) == 0, log_of(output_dir)
    assert list(trained(output_dir)) == [1, 2, 3, 4]
    rows_of(output_dir)
    nothing_left(own_model, process.pid)


def servers_with(model, title):
    return [pid for pid in servers_of(model) if title.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.promise("Ctrl-C at any moment is one line and exit code 130")
@pytest.mark.parametrize("seed", range(4))
def test_ctrl_c_at_any_moment_is_one_line_and_130(own_model, tmp_path, seed):
    draw, output_dir = random.Random(f"interrupt {seed}"), tmp_path / "out"
    process = start(own_model, output_dir, "steps=100000")
    if seed % 2:
        until(lambda: 1 in trained(output_dir), process, output_dir)
        time.sleep(draw.uniform(0.0, 2.0))
    else:
        time.sleep(draw.uniform(3.0, 40.0))
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(200) == 130, log_of(output_dir)
    assert "Traceback" not in log_of(output_dir)
    assert "KeyboardInterrupt" not in log_of(output_dir)
    nothing_left(own_model, process.pid)


@pytest.mark.promise("A full disk is a sentence, and the run goes on from there")
def test_a_full_disk_is_reported_and_the_run_can_continue(own_model, tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        output_dir = folder / "out"
        log = tmp_path / "out"
        process = start_into(own_model, output_dir, log, "steps=3", "save_every=1")
        assert process.wait(400) == 1, log_of(log)
        last = log_of(log).splitlines()[-2]
        assert re.fullmatch(
            r"rl-train: .*: No space left on device; make room on that disk, then go on with --resume", last
        )
        assert "Traceback" not in log_of(log)
        assert checkpoints.newest(output_dir) is None
        nothing_left(own_model, process.pid)
        subprocess.run(["mount", "-o", "remount,size=200m", folder], check=True)
        process = start_into(own_model, output_dir, log, "steps=3", "save_every=1", "--resume")
        assert process.wait(400) == 0, log_of(log)
        assert list(trained(output_dir)) == [1, 2, 3]
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def start_into(model, output_dir, log, *overrides):
    command = [sys.executable, "-m", "rl_trainer.cli", "quickstart", "runtime=ray", *SMALL, f"model.path={model}"]
    with Path(f"{log}.log").open("a") as file:
        return subprocess.Popen(
            [*command, f"output_dir={output_dir}", *overrides],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
