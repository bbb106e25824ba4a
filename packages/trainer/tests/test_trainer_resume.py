"""Killed at any moment, a run goes on: every prompt of the epoch is learned from exactly once."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from packages.trainer.tests.support.stand_ins import FakeAgents, QueueJob

import rl_tq
from rl_trainer import checkpoints
from rl_trainer.checkpoints import RunState
from rl_trainer.config import as_tree, load_config
from rl_trainer.errors import InputError
from rl_trainer.loop import run_loop
from rl_trainer.metrics import HeldGroup
from rl_trainer.planning.prepare import resumed
from rl_trainer.run import follow

BATCH, STEPS = 4, 6


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


class Job(QueueJob):
    """Fake engine, real queue, real checkpoints; ends at a named point."""

    def __init__(self, config, queue, state, kill_at, seed):
        super().__init__(config, FakeAgents(config, queue, seed=seed, per_poll=2), state, num_rows=BATCH * STEPS)
        self.kill_at = kill_at

    def at(self, point):
        if self.kill_at == point:
            raise Killed

    def sync(self, version):
        self.agents.version = version
        self.at(("sync", version))
        return super().sync(version)

    def update_actor(self, batch):
        self.at(("update", self._version))
        return super().update_actor(batch)

    def save_checkpoint(self, path, step):
        self.at(("before the engine's checkpoint", step))
        super().save_checkpoint(path, step)
        self.at(("before the state file", step))


def one_process(settings, tmp_path, kill_at=None, seed=0):
    """A process's life: the records it wrote."""
    settings = resumed(settings)
    if settings.resume_from is None:
        checkpoints.forget_after(tmp_path, -1)
    state = RunState(seed=0, num_rows=BATCH * STEPS)
    if settings.resume_from is not None:
        state = RunState.read(Path(settings.resume_from)).for_run(settings)
        checkpoints.forget_after(tmp_path, state.step)
    with rl_tq.serve("inproc://", snapshot=checkpoints.queue_snapshot(settings, state)) as queue:
        job = Job(settings, queue, state, kill_at, seed)
        records = run_loop(job.components(), settings, [{}], start_step=state.step)

        def add(record):
            if record.rows:
                with (tmp_path / "prompts.jsonl").open("a") as file:
                    file.write(json.dumps({"step": record.step, "rows": record.rows}) + "\n")

        try:
            follow(records, job.components(), settings, state, tmp_path, add=add, should_stop=lambda: False)
        except Killed:
            return state.step
    return settings.steps


def used(output_dir):
    lines = [json.loads(line) for line in (output_dir / "prompts.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), "a step is missing, or there twice"
    return [row for line in lines for row in line["rows"]]


@pytest.mark.promise("Each prompt is learned from once, after a kill at any moment")
@pytest.mark.parametrize("pipeline", ["fully_async", "one_step_off", "sync"])
@pytest.mark.parametrize(
    "kills",
    [
        [("sync", 1)],
        [("update", 3), ("sync", 4), ("before the engine's checkpoint", 4)],
        [("before the state file", 1), ("before the state file", 3), ("update", 6)],
    ],
)
@pytest.mark.process
def test_killed_at_a_named_point_every_prompt_is_used_once(tmp_path, pipeline, kills):
    sizes = [f"batch.batch_size={BATCH}", "batch.mini_batch_size=4", "batch.group_size=2", f"steps={STEPS}"]
    how = [f"pipeline={pipeline}", f"output_dir={tmp_path}", "save_every=1", "eval_every=0", "timeout_s=5"]
    how += ["staleness.max_staleness=2"] if pipeline == "fully_async" else []
    settings = load_config("quickstart", [*how, *sizes])
    for number, kill in enumerate(kills):
        assert one_process(settings, tmp_path, kill, seed=number) < STEPS
    assert one_process(settings, tmp_path, seed=len(kills)) == STEPS
    assert sorted(used(tmp_path)) == list(range(BATCH * STEPS))
    if pipeline != "sync":
        states = [RunState.read(tmp_path / f"checkpoint-{step}") for step in range(1, STEPS)]
        assert any(state.held for state in states), "no finished group outlived a process: the test shows nothing"


@pytest.mark.promise("Old checkpoints are removed once a newer one is whole")
def test_old_checkpoints_are_removed_once_a_newer_one_is_whole(tmp_path):
    sizes = [f"batch.batch_size={BATCH}", "batch.mini_batch_size=4", "batch.group_size=2", f"steps={STEPS}"]
    how = [f"output_dir={tmp_path}", "save_every=1", "eval_every=0", "timeout_s=5", "keep_checkpoints=2"]
    settings = load_config("quickstart", [*how, *sizes])
    assert one_process(settings, tmp_path, ("before the state file", 4), seed=0) < STEPS
    there = sorted(folder.name for folder in tmp_path.glob("checkpoint-*"))
    assert there == ["checkpoint-2", "checkpoint-3", "checkpoint-4"], "one that is not whole makes none old"
    assert one_process(settings, tmp_path, seed=1) == STEPS
    assert [folder.name for folder in checkpoints.complete(tmp_path)] == [
        f"checkpoint-{STEPS}",
        f"checkpoint-{STEPS - 1}",
    ]
    assert sorted(used(tmp_path)) == list(range(BATCH * STEPS))


def test_rows_after_the_step_are_cleared_and_missing_reported():
    settings = load_config("quickstart", ["batch.batch_size=4", "batch.mini_batch_size=4", "batch.group_size=2"])
    held = HeldGroup(group_id=2, row_index=0, place=0, released=1, attempt=1)

    def resume(queue, groups):
        state = RunState(seed=0, num_rows=9, held=tuple(groups))
        job = QueueJob(settings, FakeAgents(settings, queue), state)
        job.source.resume(job.held)
        return job.source

    with rl_tq.serve("inproc://") as queue:
        for group, attempt in ((1, 0), (2, 0), (2, 1)):
            about = {
                "reward": 0.0,
                "weight_version_admitted": 1,
                "weight_version_min": 1,
                "weight_version_max": 1,
                "columns": ["group_id"],
            }
            tags = [{"group_id": group, "attempt": attempt, **about}]
            queue.put({"group_id": [group]}, partition="train", tags=tags)
        assert resume(queue, [held]).held == (held,)
        assert queue.stats()["partitions"]["train"]["rows"] == 1
    with rl_tq.serve("inproc://") as queue:
        queue.put({"group_id": [1]}, partition="train", tags=tags)
        with pytest.raises(InputError, match="no rows of group 7; resume from another"):
            resume(queue, [HeldGroup(7, *held[1:])])


@pytest.mark.process
def test_leftovers_of_another_pipeline_are_generated_again():
    held = (HeldGroup(7, 4, 0, 1), HeldGroup(8, 3, 1, 1))
    state = RunState(seed=0, num_rows=9, pipeline="fully_async", pending=(1, 2), held=held)
    assert state.for_run(load_config("quickstart", ["pipeline=fully_async"])) is state
    other = state.for_run(load_config("quickstart", []))
    assert (other.held, other.pending) == ((), (4, 3, 1, 2))
    one_step = replace(state, pipeline="one_step_off")
    assert one_step.for_run(load_config("quickstart", ["pipeline=one_step_off", "batch.batch_size=2"])) is one_step
    assert not one_step.for_run(load_config("quickstart", ["pipeline=one_step_off", "batch.batch_size=4"])).held
    loose = replace(state, config=as_tree(load_config("quickstart", ["staleness.max_staleness=3"])))
    assert loose.for_run(load_config("quickstart", ["pipeline=fully_async", "staleness.max_staleness=3"])) is loose
    tight = loose.for_run(load_config("quickstart", ["pipeline=fully_async", "staleness.max_staleness=1"]))
    assert (tight.held, tight.pending) == ((), (4, 3, 1, 2))


def test_a_torn_line_and_later_steps_are_taken_out_of_the_logs(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    checkpoints.forget_after(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


# ---- the real thing: processes, Ray, and SIGKILL


def start(model, output_dir, *overrides):
    command = [
        sys.executable,
        "-m",
        "rl_trainer.cli",
        "quickstart",
        "runtime=ray",
        f"model.path={model}",
        f"output_dir={output_dir}",
    ]
    with Path(f"{output_dir}.log").open("a") as log:
        return subprocess.Popen(
            [*command, *overrides, "--resume"],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"RL_TEST_RUN": str(output_dir)},
        )


def steps_done(output_dir):
    try:
        return len((output_dir / "prompts.jsonl").read_text().splitlines())
    except FileNotFoundError:
        return 0


def processes_of(output_dir):
    """Command lines of a run's processes that are there still: Ray's, workers, servers."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"RL_TEST_RUN={output_dir}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ")[:80])
        except OSError:
            continue
    return found


@pytest.mark.promise("The same with real processes, of which none is left")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pipeline", ["fully_async", "one_step_off", "sync"])
def test_kill_9_at_random_moments(model, tmp_path, pipeline):
    draw = random.Random(f"kill {pipeline}")
    output_dir, log = tmp_path / "out", tmp_path / "out.log"
    num_steps, batch_size = 150, 4  # more than are done while it draws its moments
    overrides = [
        f"pipeline={pipeline}", "data.options.num_rows=613", "data.eval_size=8",  # 600 prompts and 13 once more
        f"batch.batch_size={batch_size}", "batch.mini_batch_size=4", "batch.group_size=4", f"steps={num_steps}",
        "save_every=1", "eval_every=0", "engine.optimizer.lr=1e-2", "engine.optimizer.warmup_steps=0",
        "algorithm.entropy_coef=0.1",
    ]  # fmt: skip
    overrides += ["staleness.max_staleness=2"] if pipeline == "fully_async" else []
    for _ in range(3):
        process = start(model, output_dir, *overrides)
        before, deadline = steps_done(output_dir), time.monotonic() + 240
        while steps_done(output_dir) <= before or checkpoints.newest(output_dir) is None:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.02)
        time.sleep(draw.uniform(0.0, 1.0))
        os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
        deadline = time.monotonic() + 60
        while left := processes_of(output_dir):
            assert time.monotonic() < deadline, f"processes {left} of a killed run are there still"
            time.sleep(0.2)
    last = checkpoints.newest(output_dir)
    if RunState.read(last).step < num_steps:
        assert start(model, output_dir, *overrides).wait(300) == 0, log.read_text()[-3000:]
    rows = used(output_dir)
    assert sorted(rows) == list(range(num_steps * batch_size))
    records = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["metrics"]] == list(range(1, num_steps + 1))
    final = RunState.read(checkpoints.newest(output_dir))
    assert (final.step, final.pending, final.held) == (num_steps, (), ())
