"""Chaos testing: short runs under a seeded schedule of faults, over every process and every phase of a step.

    python tests/chaos.py --trials 200 --seed 1 --stages standins,inline --output chaos.json

A trial starts a run of a tiny model, lets one fault strike when a phase begins or a little later, and waits for the
run's end. A run that did not reach its last step then goes on with `--resume`. After both it asks: did everything end
within the deadline, with success or one sentence; was every prompt learned from exactly once; are the losses of `sync`,
bit for bit, those of a run without faults; is every checkpoint whole; is no process and no shared memory left?

| stage | what is real |
|---|---|
| `standins` | controller, queue, checkpoints and logs; engine, servers and agents answer at once. All three pipelines |
| `inline` | everything, in one process (`runtime=inline`). `sync` alone |
| `ray` | everything, each in its own process (`runtime=ray`). All three pipelines |

With `--chain N` a run takes up to N faults one after the other: the next one strikes when a whole step has been
taken since, in the same process or in the one that `--resume` made of it. Everything is asked at the end of the chain.

Run as root on Linux, it has a /dev/shm and a small disk of its own (a mount namespace); as anybody else it leaves out
full disks, and does not look for shared memory that was left.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import os
import platform
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).parents[1]))  # stand-ins of rl-trainer's tests
from rl_trainer.runtime.reaper import LOOK_EVERY_S, find_processes, start_time

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

PIPELINES = ("sync", "one_step_off", "fully_async")
STEPS, BATCH = 4, 2
STEPS_OF_A_LINK = 4
"""Of a chain, for each of its trials; those that do not come to their turn are the next chain's."""
DISK_BYTES = 256 << 20
_MARK = "RL_CHAOS_TRIAL"
_STEP_PHASES = {
    "sync": ("generate", "yield_memory", "advantage", "update", "weight_sync", "checkpoint", "state file"),
    "one_step_off": ("wait_generate", "advantage", "update", "weight_sync", "checkpoint", "state file"),
    "fully_async": ("wait_generate", "advantage", "update", "weight_sync", "checkpoint", "state file"),
}
_ROLES = {"engine": "ray::engine", "agent": "ray::agent", "rollout": "ray::rollout", "node": "/raylet/raylet"}
"""What the command line of a process begins with, or holds, by role."""
_PLACES = {"standins": PIPELINES, "inline": ("sync",), "ray": PIPELINES}
_FAULTS = {
    "standins": ("kill", "kill", "bit flip", "full disk"),
    "inline": ("kill", "bit flip", "full disk", "stop", "dropped connections"),
    "ray": ("kill", "kill", "stop", "bit flip", "full disk", "dropped connections", "dead node"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One fault, and when it strikes."""

    number: int
    """From 1."""
    stage: str
    """What is real: `standins`, `inline` or `ray`."""
    pipeline: str
    """Schedule of the run."""
    fault: str
    """What happens."""
    target: str
    """Role of the process to which it happens."""
    phase: str
    """Where the controller is."""
    occurrence: int
    """The how-manieth beginning of that phase, from 1."""
    delay_s: float
    """Seconds after that."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of a trial."""

    trial: Trial
    fired: bool = False
    """Whether the phase was reached, and the target was there."""
    ended: str = ""
    """How the first process ended: `recovered`, `sentence`, `killed`, `stopped`, or what it should not have."""
    sentence: str = ""
    """The last line that it wrote, if it failed."""
    seconds: float = 0.0
    """From the fault to the end of the first process; from its start to its end for `--resume`, where that ended. In a
    chain: to the end of the first whole step after it, of the same process or, from its start, of the next one."""
    resumed: bool = False
    """Whether a second process went on."""
    problems: list[str] = field(default_factory=list[str])
    """What must not be; empty where everything held."""


def draw_trials(count: int, seed: int, stages: Sequence[str], shares: Mapping[str, int]) -> list[Trial]:
    """The schedule of a seed: `count` trials over `stages`, by their shares."""
    draw = random.Random(seed)
    order = [stage for stage in stages for _ in range(shares.get(stage, 1))]
    return [_draw_trial(number, order[(number - 1) % len(order)], draw) for number in range(1, count + 1)]


def _draw_trial(number: int, stage: str, draw: random.Random) -> Trial:
    pipeline, fault = draw.choice(_PLACES[stage]), draw.choice(_FAULTS[stage])
    target = "controller"
    if stage == "ray" and fault in ("kill", "stop", "dropped connections"):
        target = draw.choice(("controller", "engine", "agent", "rollout"))
    if fault == "dead node":
        target = "node"
    return Trial(
        number=number,
        stage=stage,
        pipeline=pipeline,
        fault=fault,
        target=target,
        phase=draw.choice(_STEP_PHASES[pipeline]),
        occurrence=draw.randint(1, STEPS),
        delay_s=draw.choice((0.0, draw.uniform(0.0, 0.002), draw.uniform(0.0, 0.03))),
    )


# Inside the run


class _Faults:
    """Strike one after the other, each when the controller has reached its phase often enough.

    Args:
        trials: In their order. The next one counts from when a whole step was taken after the one before.
        output_dir: Of the run.
        notes: Folder of what happened when: `fired-NUMBER`, `missed-NUMBER` if the target was not there,
            `settled-NUMBER` when a whole step was taken since, and `began` when this process had taken its first.
    """

    def __init__(self, trials: Sequence[Trial], output_dir: Path, notes: Path) -> None:
        self._trials, self._output_dir, self._notes = list(trials), output_dir, notes
        self._count = self._num_checkpoints = 0
        self._unsettled: Trial | None = None
        self._has_struck = False

    def at(self, phase: str) -> None:
        """The controller begins a phase."""
        if phase == "checkpoint":
            self._end_of_step()
        if self._unsettled is not None or not self._trials or phase != self._trials[0].phase:
            return
        self._count += 1
        if self._count != self._trials[0].occurrence:
            return
        trial = self._unsettled = self._trials.pop(0)
        self._count, self._has_struck = 0, False
        if trial.delay_s:
            threading.Timer(trial.delay_s, self._strike, [trial]).start()
        else:
            self._strike(trial)

    def _end_of_step(self) -> None:
        if not (self._notes / "began").exists():
            _note(self._notes / "began", str(time.time()))
        self._num_checkpoints += 1
        if (
            self._unsettled is not None and self._has_struck and self._num_checkpoints == 2
        ):  # of the step that was under way, and one more
            _note(self._notes / f"settled-{self._unsettled.number}", str(time.time()))
            self._unsettled = None

    def _strike(self, trial: Trial) -> None:
        fault, me = trial.fault, os.getpid()
        self._num_checkpoints, self._has_struck = 0, True
        target = me if trial.target == "controller" else _process_of(trial.target)
        if target is None:
            (self._notes / f"missed-{trial.number}").touch()
            self._unsettled = None
            return
        _note(self._notes / f"fired-{trial.number}", json.dumps({"at": time.time(), "pid": target}))
        if fault in ("kill", "bit flip"):
            os.kill(target, signal.SIGKILL)
        elif fault == "stop":
            os.kill(target, signal.SIGSTOP)
        elif fault == "dead node":
            for pid in find_processes("", {target: start_time(target)}):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif fault == "full disk":
            _fill(self._output_dir.parent)
        elif fault == "dropped connections":
            _drop_connections(target)


def _note(file: Path, text: str) -> None:
    """Write it whole or not at all: a fault of this process may strike in between."""
    draft = file.with_suffix(".part")
    draft.write_text(text)
    draft.rename(file)


def _arm(faults: _Faults) -> None:
    """Let the phases of this process tell `faults`."""
    from rl_trainer import checkpoints
    from rl_trainer.metrics import PhaseTimer

    phase, save, names = PhaseTimer.phase, checkpoints.save, checkpoints.__dict__
    seal = names["write_manifest"]

    @contextmanager
    def told(self: PhaseTimer, name: str) -> Generator[None]:
        with phase(self, name):
            faults.at(name)
            yield

    def saved(*given: Any) -> None:
        faults.at("checkpoint")
        save(*given)

    def sealed(*given: Any) -> None:
        faults.at("state file")
        seal(*given)

    PhaseTimer.phase = told
    checkpoints.save = saved
    names["write_manifest"] = sealed


def _process_of(role: str) -> int | None:
    """A process of this trial with that role."""
    wanted = _ROLES[role]
    me = os.getpid()
    for pid in find_processes(f"{_MARK}={os.environ[_MARK]}", {me: start_time(me)}):
        with suppress(OSError):
            line = _command_of(pid)
            if line.startswith(wanted) or (role == "node" and wanted in line.partition(" ")[0]):
                return pid
    return None


def _fill(folder: Path) -> None:
    """Leave no byte of a file system."""
    with (folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass


def _drop_connections(pid: int) -> None:
    """Shut every connected stream socket of a process, as a network that is gone does; its own pairs stay."""
    calls = ctypes.CDLL(None, use_errno=True)
    handle = os.pidfd_open(pid)
    try:
        for entry in list(Path(f"/proc/{pid}/fd").iterdir()):
            with suppress(OSError):
                if not str(entry.readlink()).startswith("socket:"):
                    continue
                copy = calls.syscall(438, handle, int(entry.name), 0)  # pidfd_getfd
                if copy < 0:
                    continue
                with socket.socket(fileno=copy) as connection:
                    is_pair = connection.family == socket.AF_UNIX and not (
                        connection.getpeername() or connection.getsockname()
                    )
                    if connection.type == socket.SOCK_STREAM and not is_pair:
                        connection.getpeername()  # raises where nobody is connected
                        connection.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(handle)


# Outside of it


class Chaos:
    """Runs trials one after the other and judges them.

    Args:
        work: Folder for runs; emptied as they end.
        model: Folder of a tiny model.
        deadline_s: Longest life of a process with one fault; each further one adds a quarter.
        has_own_disk: Whether the runs' folder is a small disk that may be filled.
        note: Takes one line of progress at a time.
        references: Folder of runs without faults, which are kept for the next time; None: each time anew.
    """

    def __init__(
        self,
        work: Path,
        model: Path,
        *,
        deadline_s: float,
        has_own_disk: bool,
        note: Callable[[str], None],
        references: Path | None = None,
    ) -> None:
        self._work, self._model, self._deadline_s = work, model, deadline_s
        self.has_own_disk, self._note, self._references = has_own_disk, note, references
        self._undisturbed: dict[_Job, tuple[list[Any], dict[int, Any]]] = {}

    def run(self, trials: Sequence[Trial]) -> list[Outcome]:
        """One trial, or a chain of them on one run, and everything that is asked after it.

        Returns:
            Of each that struck, or whose target was not there; of a single trial in any case.
        """
        outcomes = [Outcome(trial=trial) for trial in trials]
        is_chain, folder = len(trials) > 1, self._work / f"trial-{trials[0].number}"
        disk = folder / "disk"
        disk.mkdir(parents=True)
        try:
            job = _Job(trials[0].stage, trials[0].pipeline, STEPS_OF_A_LINK * len(trials) if is_chain else STEPS)
            self._reference(job)
            needs_disk = self.has_own_disk and any(trial.fault == "full disk" for trial in trials)
            with _small_disk(disk) if needs_disk else _nothing():
                self._run(job, outcomes, folder, disk / "out")
        except Exception:  # noqa: BLE001 - a trial that cannot be judged is a problem to be looked at
            outcomes[-1].problems.append(traceback.format_exc())
        if not any(outcome.problems for outcome in outcomes):
            shutil.rmtree(folder, ignore_errors=True)
        seen = [one for one in outcomes if one.ended or one.problems]
        return seen if is_chain else outcomes

    def _run(self, job: _Job, outcomes: list[Outcome], folder: Path, output_dir: Path) -> None:
        before, waiting = _shared_memory(), list(outcomes)
        unsettled: Outcome | None = None
        for number in range(len(outcomes) + 2):
            notes = folder / f"notes-{number}"
            notes.mkdir()
            log, start = folder / f"{number}.log", time.time()
            status, seconds = self._process(job, [one.trial for one in waiting], output_dir, log, notes)
            if unsettled is not None:
                began = notes / "began"
                is_chain = len(outcomes) > 1 and began.exists()
                unsettled.seconds = float(began.read_text()) - start if is_chain else seconds
            unsettled = self._take_notes(waiting, notes, log, status)
            how, sentence = self._ended(unsettled and unsettled.trial, status, log)
            if how == "recovered":
                break
            struck = [one for one in outcomes if one.fired]
            blamed = unsettled or (struck[-1] if struck else outcomes[0])
            if how == "sentence" and struck:  # a fault may show later than after a whole step
                blamed.ended, blamed.sentence = how, sentence
            elif unsettled is None or how not in ("killed", "stopped"):
                blamed.problems.append(f"process {number} {how}: {sentence}")
            if not struck:
                break
            unsettled = blamed
            with suppress(FileNotFoundError):
                (output_dir.parent / "filler").unlink()
            if unsettled.trial.fault == "bit flip":
                self._flip(job, unsettled, output_dir, folder)
            unsettled.resumed = True
        last = next((one for one in reversed(outcomes) if one.ended), outcomes[-1])
        problems = self._judge(job, output_dir)
        problems += [f"left in /dev/shm: {name}" for name in _shared_memory() - before]
        if len(outcomes) == 1:
            outcomes[0].ended = outcomes[0].ended or "recovered"
        elif problems:
            problems.append(f"after trials {[one.trial.number for one in outcomes if one.ended]} in this order")
        last.problems += problems

    def _take_notes(self, waiting: list[Outcome], notes: Path, log: Path, status: int) -> Outcome | None:
        """Take those that had their turn off `waiting`; returns the one after which no whole step was taken."""
        unsettled: Outcome | None = None
        ended = time.time()
        while waiting:
            outcome, number = waiting[0], waiting[0].trial.number
            fired, settled = notes / f"fired-{number}", notes / f"settled-{number}"
            if (notes / f"missed-{number}").exists():
                outcome.ended = "recovered"
            elif not fired.exists():
                break
            else:
                at, outcome.fired = json.loads(fired.read_text())["at"], True
                outcome.ended, outcome.seconds = "recovered", ended - at
                if settled.exists():
                    outcome.seconds = float(settled.read_text()) - at
                else:
                    outcome.ended, outcome.sentence = self._ended(outcome.trial, status, log)
                    unsettled = None if outcome.ended == "recovered" else outcome
            waiting.pop(0)
        return unsettled

    def _process(
        self, job: _Job, trials: Sequence[Trial], output_dir: Path, log: Path, notes: Path
    ) -> tuple[int, float]:
        """A run to its end, or to the deadline: wait status and seconds. What it leaves is a problem, and ended."""
        gc.collect()
        mark, start = f"{os.getpid()}-{log.parent.name}-{log.stem}", time.monotonic()
        deadline_s = self._deadline_s * (1 + max(len(trials) - 1, 0) / 4)  # each fault takes its time
        pid = os.fork()
        if pid == 0:
            self._child(job, trials, output_dir, log, notes, mark)
        status: int | None = None
        stopped: float | None = None
        family, next_look = {pid: start_time(pid)}, start
        while status is None:
            if time.monotonic() > next_look:
                family, next_look = find_processes(f"{_MARK}={mark}", family), time.monotonic() + LOOK_EVERY_S
            found, now = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if found and os.WIFSTOPPED(now):
                stopped = time.monotonic()
            elif found:
                status = now
            late = time.monotonic() - start > deadline_s
            if status is None and (late or (stopped is not None and time.monotonic() - stopped > 1)):
                with suppress(OSError):
                    self._stacks(pid, log, is_late=late)
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                status = -1 if late and stopped is None else status
            time.sleep(0.01)
        seconds = time.monotonic() - start
        left = _wait_for_end(mark, family, 60.0)
        if left:
            with log.open("a") as file:
                file.writelines(f"\nchaos: left behind: {one} {_command_of(one)}" for one in left)
        for one in left:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        return (-2 if left else status), seconds

    def _stacks(self, pid: int, log: Path, *, is_late: bool) -> None:
        if is_late and shutil.which("py-spy"):
            dump = subprocess.run(["py-spy", "dump", "--pid", str(pid)], capture_output=True, text=True, check=False)
            with log.open("a") as file:
                file.write(f"\nchaos: at the deadline\n{dump.stdout}\n")

    def _child(self, job: _Job, trials: Sequence[Trial], output_dir: Path, log: Path, notes: Path, mark: str) -> None:
        code = 70
        try:
            os.setsid()
            os.environ[_MARK] = mark
            target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            for stream in (1, 2):
                os.dup2(target, stream)
            _arm(_Faults(trials, output_dir, notes))
            if job.stage == "standins":
                code = _run_standins(_settings(job, output_dir, self._model), seed=trials[0].number if trials else 0)
            else:
                from rl_trainer import cli

                code = cli.main(["quickstart", *_settings(job, output_dir, self._model), "--resume"])
        except BaseException:  # noqa: BLE001 - written to the log, where the parent looks
            traceback.print_exc()
        finally:
            with suppress(BaseException):
                import atexit

                threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType] - as at exit
                atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage] - what is registered, before os._exit
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _ended(self, trial: Trial | None, status: int, log: Path) -> tuple[str, str]:
        """In one word, and the last line."""
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
        last = lines[-1][:500] if lines else ""
        if status == -1:
            return "did not end within its deadline", last
        if status == -2:
            left = [line.partition("behind: ")[2] for line in lines if line.startswith("chaos: left behind")]
            return "left processes behind", ", ".join(left)
        if os.WIFSIGNALED(status):
            is_asked = trial and trial.target == "controller" and os.WTERMSIG(status) == signal.SIGKILL
            how = "stopped" if trial and trial.fault == "stop" else "killed"
            return (how if is_asked else f"was ended by signal {os.WTERMSIG(status)}"), last
        if os.WEXITSTATUS(status) == 0:
            return "recovered", last
        found = [line for line in lines if line.startswith(("rl-train: ", "standins: "))]
        is_sentence = bool(found) and "Traceback" not in last and os.WEXITSTATUS(status) in (1, 2)
        return ("sentence", found[-1][:500]) if is_sentence else (f"ended with {os.WEXITSTATUS(status)}", last)

    def _flip(self, job: _Job, outcome: Outcome, output_dir: Path, folder: Path) -> None:
        """Flip a bit of the newest checkpoint; where it is the only one, `--resume` has to refuse, and it is healed."""
        from rl_trainer import checkpoints

        found = checkpoints.complete(output_dir)
        if not found:
            return
        number = outcome.trial.number
        draw = random.Random(number)
        files = sorted(path for path in found[0].rglob("*") if path.is_file() and path.stat().st_size)
        file = draw.choice(files)
        written = file.read_bytes()
        data = bytearray(written)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
        if not checkpoints.damage(found[0]):
            outcome.problems.append(f"a flipped bit of {file} was not found")
        if len(found) == 1:
            log, notes = folder / f"refused-{number}.log", folder / f"refused-{number}"
            notes.mkdir()
            status, _ = self._process(job, [], output_dir, log, notes)
            how, sentence = self._ended(outcome.trial, status, log)
            if how != "sentence" or file.name not in sentence:
                outcome.problems.append(f"with its only checkpoint damaged ({file}), --resume {how}: {sentence}")
            file.write_bytes(written)

    def _judge(self, job: _Job, output_dir: Path) -> list[str]:
        """What must not be, at the end of a run."""
        from rl_trainer import checkpoints

        found, num_rows = list[str](), job.steps * BATCH
        prompts, losses = logs_of(output_dir)
        wanted_prompts, wanted_losses = self._undisturbed[job]
        steps = [line["step"] for line in prompts]
        rows = [row for line in prompts for row in line["rows"]]
        if steps != list(range(1, job.steps + 1)):
            found.append(f"steps of prompts.jsonl: {steps}")
        if len(set(rows)) != len(rows) or len(rows) != num_rows:
            found.append(f"rows of prompts.jsonl, of which each should be there once: {rows}")
        if job.stage == "standins" and set(rows) != set(range(num_rows)):
            found.append(f"rows of prompts.jsonl: {sorted(rows)}")
        if job.is_bitwise and (prompts, losses) != (wanted_prompts, wanted_losses):
            found.append(f"losses {losses}, rows {rows}; without a fault {wanted_losses}")
        for folder in checkpoints.complete(output_dir):
            found += [f"at the end {line}" for line in checkpoints.damage(folder)]
        return found

    def _reference(self, job: _Job) -> None:
        """Run the same without a fault, once."""
        if job in self._undisturbed:
            return
        if job.stage == "ray" and not job.is_bitwise:  # minutes, and nothing is compared with it
            self._undisturbed[job] = [], {}
            return
        kept = None if self._references is None else self._references / f"{job.stage}-{job.pipeline}-{job.steps}"
        folder = kept or self._work / f"undisturbed-{job.stage}-{job.pipeline}-{job.steps}"
        if not (folder / "whole").exists():
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "notes").mkdir(parents=True)
            status, seconds = self._process(job, [], folder / "out", folder / "log", folder / "notes")
            how, sentence = self._ended(None, status, folder / "log")
            if how != "recovered":
                raise RuntimeError(f"the run without a fault {how}: {sentence} ({folder / 'log'})")
            (folder / "whole").touch()
            self._note(f"{job.stage} {job.pipeline} of {job.steps} steps without a fault: {seconds:.1f} s")
        self._undisturbed[job] = logs_of(folder / "out")


def _run_standins(overrides: Sequence[str], *, seed: int) -> int:
    """Run the quickstart's pipeline with `QueueJob` in the place of workers, from where `output_dir` stands.

    Everything that the controller keeps is real: its lock, its logs, its checkpoints, the queue. Returns the exit code;
    a failure is one sentence.
    """
    from packages.trainer.tests.support.stand_ins import FakeAgents, QueueJob

    import rl_tq
    from rl_csrc import hold_lock
    from rl_trainer import checkpoints
    from rl_trainer.checkpoints import RunState
    from rl_trainer.config import load_config
    from rl_trainer.errors import sentence_of
    from rl_trainer.loop import run_loop
    from rl_trainer.metrics import Report
    from rl_trainer.planning.prepare import resumed
    from rl_trainer.run import follow

    config = load_config("quickstart", overrides)
    output_dir, num_rows = Path(str(config.output_dir)), config.steps * config.batch.batch_size
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with hold_lock(output_dir / "run.lock", f"output_dir={output_dir}"):
            config = resumed(config)
            state = RunState(seed=0, num_rows=num_rows)
            if config.resume_from is not None:
                state = RunState.read(Path(config.resume_from)).for_run(config)
                checkpoints.set_aside(output_dir, Path(config.resume_from))
            if state.step >= config.steps:
                return 0
            checkpoints.forget_after(output_dir, state.step or -1)
            with rl_tq.serve("inproc://", snapshot=checkpoints.queue_snapshot(config, state)) as queue:
                job = QueueJob(config, FakeAgents(config, queue, seed=seed, per_poll=2), state, num_rows=num_rows)
                records = run_loop(job.components(), config, [{}], start_step=state.step)
                progress = Report(output_dir)
                follow(
                    records, job.components(), config, state, output_dir, add=progress.add, should_stop=lambda: False
                )
    except Exception as error:
        if (told := sentence_of(error)) is None:
            raise
        print(f"standins: {told}", file=sys.stderr)
        return 1
    return 0


@dataclass(frozen=True, slots=True)
class _Job:
    """The run that faults strike."""

    stage: str
    pipeline: str
    steps: int

    @property
    def is_bitwise(self) -> bool:
        """Whether its losses are those of a run without faults."""
        return self.stage != "standins" and self.pipeline == "sync"


def logs_of(output_dir: Path) -> tuple[list[Any], dict[int, Any]]:
    """Lines of prompts.jsonl; policy loss and gradient norm by step."""
    prompts, metrics = (
        [json.loads(line) for line in (output_dir / name).read_text().splitlines()]
        if (output_dir / name).exists()
        else []
        for name in ("prompts.jsonl", "metrics.jsonl")
    )
    rows = [{"step": line["step"], "rows": line["rows"]} for line in prompts]
    return rows, {
        line["step"]: (line["metrics"]["policy_loss"], line["metrics"]["grad_norm"])
        for line in metrics
        if line.get("metrics")
    }


def _settings(job: _Job, output_dir: Path, model: Path) -> list[str]:
    is_ray, num_rows = job.stage == "ray", max(60, job.steps * BATCH + 10)
    found = [
        f"model.path={model}", f"output_dir={output_dir}", f"pipeline={job.pipeline}", f"steps={job.steps}",
        f"batch.batch_size={BATCH}", f"batch.mini_batch_size={BATCH}", "batch.group_size=2", "data.eval_size=2",
        f"data.options.num_rows={num_rows}", "save_every=1", "eval_every=0", "tracking.trackers=[]",
        "engine.optimizer.lr=1e-2", "engine.optimizer.warmup_steps=0", "algorithm.entropy_coef=0.1",
        f"heartbeat_s={20 if is_ray else 30}", f"timeout_s={300 if is_ray else 60}", f"max_restarts={job.steps}",
    ]  # fmt: skip
    found += ["staleness.max_staleness=2"] if job.pipeline == "fully_async" else []
    return [*found, f"runtime={'ray' if is_ray else 'inline'}"] if job.stage != "standins" else found


# Processes, memory, disks


def _wait_for_end(mark: str, family: Mapping[int, int], timeout_s: float) -> list[int]:
    """Those of a trial's processes that are there after `timeout_s`; `family` are those that were seen before."""
    deadline = time.monotonic() + timeout_s
    while family := find_processes(f"{_MARK}={mark}", family):
        if time.monotonic() > deadline:
            return list(family)
        time.sleep(0.1)
    return []


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:150]
    except OSError:
        return "(gone)"


def _shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()} if _OWN_SHM else set()


_OWN_SHM: list[bool] = []
"""Not empty: /dev/shm is this process's and its children's alone."""


def _own_mounts() -> bool:
    """Give this process a /dev/shm of its own, and the right to mount disks; False where it may not."""
    calls = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or calls.unshare(0x20000) != 0:  # CLONE_NEWNS
        return False
    private, shm = ["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    if any(subprocess.run(line, check=False, capture_output=True).returncode for line in (private, shm)):
        return False
    _OWN_SHM.append(True)
    return True


@contextmanager
def _small_disk(folder: Path) -> Generator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


@contextmanager
def _nothing() -> Generator[None]:
    yield


def _preload(stages: Iterable[str]) -> None:
    """Import what runs import, so that they fork with it: seconds of each otherwise."""
    names = ["rl_trainer.run", "rl_trainer.cli", "rl_trainer.checkpoints", "rl_trainer.setup"]
    names += ["packages.trainer.tests.support.stand_ins"] if "standins" in stages else []
    if "inline" in stages or "ray" in stages:
        names += ["rl_trainer.loop"]
        names += [
            "transformers.models.qwen3.modeling_qwen3",
            "reasoning_gym",
            "math_verify",
            "rl_engine.training_worker",
        ]
        names += ["rl_rollout", "rl_agent", "rl_tq", "rl_ckpt", "torch.distributed.fsdp", "rl_trainer.runtime.inline"]
        names += ["transformers.models.auto.modeling_auto", "transformers.tokenization_utils_tokenizers", "matplotlib"]
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)


# What is written


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: a row per stage, pipeline, fault and phase."""
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for outcome in outcomes:
        trial = outcome.trial
        who = trial.fault if trial.target == "controller" else f"{trial.fault} ({trial.target})"
        groups.setdefault((trial.stage, trial.pipeline, who, trial.phase), []).append(outcome)
    lines = [
        "| stage | pipeline | fault | phase | trials | struck | recovered | sentence | resumed "
        "| s median | s max | problems |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key in sorted(groups):
        mine = groups[key]
        ended = Counter(outcome.ended for outcome in mine if outcome.fired)
        seconds = [outcome.seconds for outcome in mine if outcome.fired] or [0.0]
        numbers = (len(mine), sum(o.fired for o in mine), ended["recovered"], ended["sentence"])
        numbers += (sum(o.resumed for o in mine),)
        bad = sum(bool(outcome.problems) for outcome in mine)
        times = f"{statistics.median(seconds):.1f} | {max(seconds):.1f}"
        lines.append(f"| {' | '.join(key)} | {' | '.join(map(str, numbers))} | {times} | {bad} |")
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> str:
    """Markdown: the counts in three sentences, and a row per stage and fault."""
    struck, bad = [o for o in outcomes if o.fired], [o for o in outcomes if o.problems]
    on_ray = [o.trial for o in outcomes if o.trial.stage == "ray"]
    schedules, targets = (Counter(getattr(t, name) for t in on_ray) for name in ("pipeline", "target"))
    lines = [
        f"{len(outcomes)} trials. The fault struck in {len(struck)}; {len(bad)} trials had a problem.",
        f"{len(on_ray)} trials with Ray: {', '.join(f'{n} of `{name}`' for name, n in schedules.most_common())};",
        f"the fault struck {', '.join(f'{name} {n}' for name, n in targets.most_common())}.",
        "",
        "| stage | fault | trials | struck | recovered in the run | ended with a sentence "
        "| killed or stopped, then resumed | s median | s max | lost, doubled, wrong, leaked, hung |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for stage, fault in sorted({(o.trial.stage, o.trial.fault) for o in outcomes}):
        mine = [o for o in outcomes if (o.trial.stage, o.trial.fault) == (stage, fault)]
        hit = [o for o in mine if o.fired]
        ended, seconds = Counter(o.ended for o in hit), [o.seconds for o in hit] or [0.0]
        numbers = (len(mine), len(hit), ended["recovered"], ended["sentence"], ended["killed"] + ended["stopped"])
        times = f"{statistics.median(seconds):.1f} | {max(seconds):.1f}"
        num_bad = sum(bool(o.problems) for o in mine)
        lines.append(f"| `{stage}` | {fault} | {' | '.join(map(str, numbers))} | {times} | {num_bad} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run trials; the exit code is 0 where nothing was lost, doubled, leaked, hung or wrong."""
    parser = argparse.ArgumentParser(prog="python tests/chaos.py", description="Runs under a schedule of faults.")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the schedule of faults")
    parser.add_argument("--stages", default="standins,inline", help="of standins, inline, ray; separated by commas")
    parser.add_argument("--first", type=int, default=1, help="number of the first trial of the schedule to run")
    parser.add_argument("--deadline-s", type=float, default=120.0, help="longest life of a process")
    parser.add_argument("--stop-after-s", type=float, default=float("inf"), help="begin no trial after so long")
    parser.add_argument("--chain", type=int, default=1, help="faults that a run takes one after the other")
    parser.add_argument("--keep", type=Path, help="folder of the model and of runs without faults, for the next time")
    parser.add_argument("--output", help="also write every trial to this JSON file, as they end")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="print the tables of such files, and run nothing")
    arguments = parser.parse_args(argv)
    if arguments.table:
        outcomes = [outcome for file in arguments.table for outcome in read_outcomes(Path(file))]
        print(summary(outcomes), table(outcomes), sep="\n\n")
        return 0
    stages = arguments.stages.split(",")
    has_own_disk = _own_mounts()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    start, work = time.monotonic(), Path(tempfile.mkdtemp(prefix="rl-chaos-"))
    _preload(stages)
    kept = arguments.keep or work
    chaos = Chaos(
        work,
        kept / "model" if stages == ["standins"] else _tiny_model(kept / "model"),
        deadline_s=arguments.deadline_s,
        has_own_disk=has_own_disk,
        note=lambda line: print(line, flush=True),
        references=arguments.keep,
    )
    outcomes: list[Outcome] = []
    drawn = draw_trials(arguments.trials, arguments.seed, stages, {"standins": 6, "inline": 3, "ray": 1})
    left = [t for t in drawn if t.number >= arguments.first and (t.fault != "full disk" or has_own_disk)]
    while left and time.monotonic() - start < arguments.stop_after_s:
        links = [t for t in left if (t.stage, t.pipeline) == (left[0].stage, left[0].pipeline)][: arguments.chain]
        found = chaos.run(links)
        done = {outcome.trial.number for outcome in found} | {links[0].number}
        left = [t for t in left if t.number not in done]
        outcomes += found
        for outcome in found:
            _say(outcome)
        if arguments.output:
            _write(Path(arguments.output), arguments.seed, outcomes, time.monotonic() - start)
    print(table(outcomes))
    num_bad = sum(bool(outcome.problems) for outcome in outcomes)
    struck = sum(outcome.fired for outcome in outcomes)
    print(f"{len(outcomes)} trials, {struck} faults struck, {num_bad} with problems")
    if not num_bad:
        shutil.rmtree(work, ignore_errors=True)
    return 1 if num_bad else 0


def _tiny_model(folder: Path) -> Path:
    from rl_trainer.config import load_config
    from rl_trainer.config.schema import WarmupConfig
    from rl_trainer.data import load_datasets
    from rl_trainer.data.warmup import make_small_model

    if (folder / "model" / "config.json").exists():
        return folder / "model"
    rows = load_datasets(
        load_config("quickstart", ["data.options.num_rows=500", "data.eval_size=4"]).data, seed=0
    ).train
    warmup = WarmupConfig(hidden_size=32, num_layers=1, steps=2, batch_size=16)
    folder.mkdir(parents=True)
    return make_small_model(folder, warmup, rows, seed=0, timeout_s=300, on_line=lambda line: None)


def _say(outcome: Outcome) -> None:
    trial = outcome.trial
    told = re.sub(r"\s+", " ", "; ".join(outcome.problems))[:2000]
    print(
        f"{trial.number} {trial.stage} {trial.pipeline}: {trial.fault} ({trial.target}) at {trial.phase} "
        f"{trial.occurrence}: {outcome.ended if outcome.fired else 'not reached'} {outcome.seconds:.1f} s"
        + (f" PROBLEM {told}" if told else ""),
        flush=True,
    )


def _write(file: Path, seed: int, outcomes: Sequence[Outcome], seconds: float) -> None:
    about = {
        "command": " ".join(["python tests/chaos.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cores": os.cpu_count(), "load": os.getloadavg()[0], "system": platform.platform()},
        "seed": seed,
        "seconds": round(seconds, 1),
    }
    lines = ",\n  ".join(json.dumps(asdict(outcome)) for outcome in outcomes)
    file.write_text(f'{{"about": {json.dumps(about)},\n "trials": [\n  {lines}\n ]}}\n')


def read_outcomes(file: Path) -> list[Outcome]:
    """What `--output` wrote."""
    entries: list[dict[str, Any]] = json.loads(file.read_text())["trials"]
    for entry in entries:
        entry["trial"] = Trial(**entry["trial"])
    return [Outcome(**entry) for entry in entries]


if __name__ == "__main__":
    raise SystemExit(main())
