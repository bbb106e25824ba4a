"""One training run: check the configuration, place the components, follow the loop, write checkpoints."""

from __future__ import annotations

import math
import signal
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import PositiveInt, TypeAdapter, ValidationError
from rich.console import Console

from rl_trainer import checkpoints
from rl_trainer.checkpoints import RunState
from rl_trainer.config import as_tree
from rl_trainer.data import load_datasets
from rl_trainer.errors import FULL, InputError, PlacementError, RolloutFailedError, WorkerDiedError
from rl_trainer.inputs import digest_inputs
from rl_trainer.metrics import PhaseTimer, Report
from rl_trainer.output_dir import locked_output_dir, write_whole
from rl_trainer.pipeline.elastic import Elastic
from rl_trainer.pipeline.roles import with_model
from rl_trainer.pipeline.rollout_source import StopRequestedError
from rl_trainer.planning.prepare import finished, prepare, resumed
from rl_trainer.planning.speed import first_rows
from rl_trainer.runtime import create_runtime
from rl_trainer.runtime.network import without_launcher
from rl_trainer.runtime.processes import quiet_libraries
from rl_trainer.runtime.profiling import Profiles
from rl_trainer.runtime.tracing import profiled
from rl_trainer.trackers import RunInfo, TrackerGroup
from rl_trainer.trackers.console import progress_lines, status

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
    from types import FrameType

    from rl_trainer.config import Config
    from rl_trainer.data.datasets import Datasets
    from rl_trainer.metrics import StepRecord
    from rl_trainer.pipeline.components import Components
    from rl_trainer.planning.prepare import Prepared, Resume
    from rl_trainer.planning.row_checks import RowCheck
    from rl_trainer.runtime.base import ReplicaSet, Runtime

STOP_GRACE_S = 10.0
"""Seconds that a step, or an evaluation, has to end after the run was asked to stop."""

_SAME_SIGNAL_S = 1.0

_ENDS_OF_ROLLOUTS = (StopRequestedError, RolloutFailedError, WorkerDiedError)

_DEATH_WAIT_S = 2.0
"""Seconds that an error waits for a death that may be its cause: a peer's socket closes before Ray's report."""


def run(
    config: Config,
    console: Console | None = None,
    *,
    resume: Resume = False,
    on_step: Callable[[StepRecord], object] | None = None,
    stop: threading.Event | None = None,
) -> dict[str, Any]:
    """Run a job and return its summary.

    Args:
        config: Configuration of the run.
        console: Shows its plan and its steps.
        resume: Resume the run in `output_dir`, see `resumed`; if that is finished, say so and start nothing. "anyway"
            also resumes with other data, models or code than the checkpoint's run had.
        on_step: Called with every step's record, and that of the evaluation at the start.
        stop: Set by anyone, ends the run after its step.

    Raises:
        InputError: something cannot work, or another run holds `output_dir`; nothing was started or written.
        TrainerError: the run failed; every worker was ended.
    """
    console = console or Console()
    quiet_libraries()
    with without_launcher(), locked_output_dir(config) as output_dir:
        config = resumed(config, console) if resume else config
        if resume and (sentence := finished(config)) is not None:
            console.print(f"rl-train: {sentence}", highlight=False, soft_wrap=True)
            return {"interrupted": False, "checkpoint": config.resume_from, "output_dir": config.output_dir}
        prepared = prepare(config, resume=resume)
        prepared.show(console)
        prepared = replace(prepared, config=prepared.with_weights())
        try:
            return _run(prepared, output_dir, console, on_step or (lambda record: None), stop or threading.Event())
        except OSError as error:
            if error.errno in FULL and error.filename is None:  # of a library's write, which names no file
                error.filename = str(output_dir)
            raise


def _run(
    prepared: Prepared,
    output_dir: Path,
    console: Console,
    on_step: Callable[[StepRecord], object],
    stop: threading.Event,
) -> dict[str, Any]:
    config = prepared.config
    start = None if config.resume_from is None else Path(config.resume_from)
    if prepared.resume and start is None:  # killed before its first checkpoint
        checkpoints.forget_after(output_dir, -1)
    if start is not None and start.resolve().parent == output_dir.resolve():
        for folder in checkpoints.set_aside(output_dir, start):
            console.print(f"the damaged checkpoint is {folder} now", highlight=False, soft_wrap=True)
    values = as_tree(config)
    write_whole(output_dir / "config.yaml", yaml.safe_dump(values, sort_keys=False))
    about = RunInfo(
        name=config.name,
        output_dir=output_dir,
        num_steps=config.steps,
        start_step=0 if start is None else RunState.read(start).step,
        config=values,
        console=console,
    )
    traced = profiled(output_dir if config.tracking.profile else None)
    with TrackerGroup(about, config.tracking.trackers) as trackers, traced:
        began = time.perf_counter()
        run = _Run(
            output_dir=output_dir,
            model_path=_model(config, prepared.datasets, output_dir, console),
            console=console,
            trackers=trackers,
            progress=Report(output_dir),
            stop=stop,
            on_step=on_step,
            rows=prepared.rows,
        )
        warmup_s = time.perf_counter() - began
        found = _train(config, prepared.datasets, run)
        found |= {"warmup_s": warmup_s, "total_s": time.perf_counter() - began, "output_dir": str(output_dir)}
        summary = run.progress.finish(found)
        trackers.finish(summary)
        return summary


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Values that all attempts of a run share; a restart inside the job is a new attempt."""

    output_dir: Path
    model_path: Path
    console: Console
    trackers: TrackerGroup
    progress: Report
    stop: threading.Event
    """Set when the run was asked to stop."""
    on_step: Callable[[StepRecord], object]
    rows: RowCheck


def _train(config: Config, datasets: Datasets, run: _Run) -> dict[str, Any]:
    """Attempt the run until one attempt ends well; returns lines of the summary."""
    num_restarts = 0
    while True:
        try:
            found = _attempt(config, datasets, run)
            return found | {"interrupted": run.stop.is_set(), "restarts": num_restarts}
        except WorkerDiedError as error:
            if num_restarts == config.max_restarts or run.stop.is_set() or not run.progress.has_begun:
                raise  # what dies before anything was measured has a reason that another start does not cure
            num_restarts += 1
            config, datasets = _again(config, run)
            since = "the start" if config.resume_from is None else Path(config.resume_from).name
            line = f"restart {num_restarts} of max_restarts={config.max_restarts}, from {since}, because {error}"
            run.console.print(line, highlight=False, markup=False, soft_wrap=True)


def _again(config: Config, run: _Run) -> tuple[Config, Datasets]:
    """Configuration and data of the next attempt: from this run's newest checkpoint, else as the run began."""
    config = with_model(config, run.model_path)
    newest, _ = checkpoints.newest_whole(run.output_dir)
    if newest is not None:
        config = replace(config, resume_from=str(newest))
        checkpoints.set_aside(run.output_dir, newest)
    step = -1 if config.resume_from is None else RunState.read(Path(config.resume_from)).step
    checkpoints.forget_after(run.output_dir, step)
    run.progress.forget_after(step)
    return config, load_datasets(config.data, seed=config.seed, agent=config.agent)


def _attempt(config: Config, datasets: Datasets, run: _Run) -> dict[str, Any]:
    """Place the components and follow the loop to its end, for lines of the summary; no worker outlives the attempt.

    Raises:
        WorkerDiedError: a worker died that the run needs, whatever error its peers raised for that.
    """
    from rl_trainer.loop import run_loop

    start, output_dir = time.perf_counter(), run.output_dir
    inputs = digest_inputs(with_model(config, run.model_path), datasets)
    state = RunState(seed=config.seed, num_rows=len(datasets.train), inputs=inputs)
    if config.resume_from is not None:
        state = replace(RunState.read(Path(config.resume_from)).for_run(config), inputs=inputs)
        checkpoints.forget_after(output_dir, state.step)
    with ExitStack() as stack:
        components = _start(stack, config, datasets, run, state)
        start_s, timer = time.perf_counter() - start, PhaseTimer()
        if config.batch.replay is None:  # whose draws for a step cannot be taken back
            components.source.should_stop = _patience(run.stop)
        doing = _doing(config, components, run, timer, state.step)
        profiles = _profiles(config, components, run)
        profiles.begin(state.step + 1)
        with _stop_when_asked(run.console, run.stop, timer), progress_lines(run.console, doing) as renew:
            records = run_loop(
                components,
                config,
                components.eval_rows,
                start_step=state.step,
                timer=timer,
                first_rows=first_rows(config, components.eval_rows),
            )
            add = _recorder(config, components, run, renew, profiles)
            checkpoint = follow(records, components, config, state, output_dir, add=add, should_stop=run.stop.is_set)
            if config.engine.async_checkpoints:
                checkpoints.finish(components)
        return {
            "start_s": start_s,
            "rows_too_long": components.num_too_long + components.source.num_too_long,
            "rows_bad": datasets.num_bad + components.num_bad + components.source.order.num_bad,
            "checkpoint": str(checkpoint),
            **({"profiles": profiles.files} if config.tracking.profiler.tools else {}),
        }


def _start(stack: ExitStack, config: Config, datasets: Datasets, run: _Run, state: RunState) -> Components:
    """Start the components, which end with `stack`, and load the checkpoint."""
    from rl_trainer.setup import place

    runtime = create_runtime(config.runtime, timeout_s=config.timeout_s, heartbeat_s=config.heartbeat_s)
    stack.enter_context(runtime)
    deaths = stack.enter_context(_blamed_on_a_death(runtime))
    with status(run.console, "starting the workers"), run.rows.going_on():
        components = place(config, runtime, run.model_path, datasets, state, output_dir=run.output_dir)
    stack.callback(components.queue.close)
    deaths.extend(own.weights.death for own in components.by_policy.values())
    if components.num_too_long:
        longest = f"data.max_prompt_tokens={config.data.max_prompt_tokens}"
        run.console.print(f"left out {components.num_too_long} rows whose prompts are longer than {longest}")
    if num_bad := datasets.num_bad + components.num_bad:
        run.console.print(f"left out {num_bad} rows that cannot be used (data.on_bad_row=drop)")
    if config.resume_from is not None:
        checkpoints.load(components, Path(config.resume_from))
    return components


def _doing(config: Config, components: Components, run: _Run, timer: PhaseTimer, start_step: int) -> Callable[[], str]:
    """Gives the line of the screen about the phase under way."""

    def doing() -> str:
        phase, since = timer.current or ("between phases", time.perf_counter())
        done, released = components.source.progress
        groups = f", {done} of {released} groups complete" if "generate" in phase else ""
        if phase == "eval":
            groups = ", {} of {} completions graded".format(*components.source.evaluated)
        step = run.progress.next_step(start_step)
        return f"step {step}/{config.steps}: {phase}, {time.perf_counter() - since:.0f} s{groups}"

    return doing


def _profiles(config: Config, components: Components, run: _Run) -> Profiles:
    """Profilers around steps, in the processes of the roles."""
    servers = components.weights.servers

    def of_servers(tools: Sequence[str], stem: str) -> list[str]:
        from rl_trainer.workers.rollout import RolloutWorker

        given = {member: (tools, f"{stem}-{member}") for member in servers.members}
        files: list[str] = []
        for answer in servers.call(RolloutWorker.profile, given).values():
            if isinstance(answer, Exception):
                raise answer
            files += answer
        return files

    def of_groups(name: str) -> Callable[[Sequence[str], str], list[str]]:
        groups = {policy: getattr(own, name) for policy, own in components.by_policy.items()}

        def call(tools: Sequence[str], stem: str) -> list[str]:
            named = {f"{stem}-{policy}" if policy else stem: group for policy, group in groups.items() if group}
            return [file for each, group in named.items() for file in group.profile(tools, each)]

        return call

    groups = {"engine": "actor", "reference": "reference", "critic": "critic"}
    roles = {role: of_groups(name) for role, name in groups.items()}
    return Profiles(config, run.output_dir / "profile", {**roles, "rollout": of_servers})


def _recorder(
    config: Config, components: Components, run: _Run, renew: Callable[[], object], profiles: Profiles
) -> Callable[[StepRecord], None]:
    """Takes each step's record, and prints what happened to replicas meanwhile."""
    elastic = create_elastic(config, components)
    rollout = {name or "rollout": own.weights.servers for name, own in components.by_policy.items()}
    replica_sets: dict[str, ReplicaSet[Any]] = {"agent": components.agents.replica_set, **rollout}

    def add(record: StepRecord) -> None:
        profiles.end(record.step)
        profiles.begin(record.step + 1)
        run.progress.add(record)
        run.trackers.log(record)
        run.on_step(record)
        renew()
        lines = resize_as_asked(replica_sets, run.output_dir)
        if elastic is not None and not lines:
            lines = elastic.follow(record)
        news = [line for replica_set in replica_sets.values() for line in replica_set.take_news()]
        for line in (*lines, *news):
            run.console.print(line, highlight=False, soft_wrap=True)

    return add


@contextmanager
def _blamed_on_a_death(runtime: Runtime) -> Generator[list[Callable[[], Exception | None]]]:
    """Raise the death of a worker in place of an error that it caused: the peers' errors often come first.

    The body may append further functions that look for a death.
    """
    others: list[Callable[[], Exception | None]] = []
    try:
        yield others
    except (InputError, WorkerDiedError):
        raise
    except Exception as error:
        found = [runtime.death(_DEATH_WAIT_S), *(look() for look in others)]
        death = next((death for death in found if death is not None), None)
        if death is None:
            raise
        raise death from error


def follow(
    records: Iterator[StepRecord],
    components: Components,
    config: Config,
    state: RunState,
    output_dir: Path,
    *,
    add: Callable[[StepRecord], None],
    should_stop: Callable[[], bool],
) -> Path | None:
    """Follow the loop to its last step, or until asked to stop; saves checkpoints, returns the newest.

    A step that takes long is given up while it waits for rollouts: the policy is still that of the step before, and
    the prompts that were drawn since go back into the checkpoint. The same is done where a component of the rollouts
    ends after the run was asked to stop, as it may have had the same signal.

    Steps after the newest complete checkpoint are taken again by a resumed run.
    """
    checkpoint = None if config.resume_from is None else Path(config.resume_from)
    saved_step, last = state.step, None

    def save(record: StepRecord) -> None:
        nonlocal checkpoint, saved_step
        checkpoint, saved_step = output_dir / f"checkpoint-{record.step}", record.step
        checkpoints.save(components, checkpoint, state.after(record, components, config))
        checkpoints.prune(output_dir, config.keep_checkpoints)

    try:
        for last in records:
            add(last)
            is_last = should_stop() or last.step == config.steps
            is_due = is_last or (config.save_every > 0 and last.step % config.save_every == 0)
            if is_due and last.step > saved_step:  # the first record is of what was there before
                save(last)
            if is_last:
                break
    except Exception as error:
        source = components.source
        if not should_stop() or not source.is_at_step_start or not isinstance(error, _ENDS_OF_ROLLOUTS):
            raise
        if last is not None and last.step > saved_step:
            drawn = (*(group.row_index for group in source.held), *source.pending)
            save(replace(last, position=source.position, pending=drawn, held=()))
    return checkpoint


def resize_as_asked(replica_sets: Mapping[str, ReplicaSet[Any]], output_dir: Path) -> list[str]:
    """Resize replica sets as `replicas.json` in `output_dir` says, and remove the file.

    It holds numbers of members, such as `{"rollout": 3, "agent": 2}`, with the replicas of several policies by name. A
    request that cannot be followed does not end the run: the returned sentences say why.
    """
    file = output_dir / "replicas.json"
    if not file.is_file():
        return []
    try:
        wanted = TypeAdapter(dict[str, PositiveInt]).validate_json(file.read_text())
        if unknown := [name for name in wanted if name not in replica_sets]:
            raise PlacementError(f"{unknown[0]!r} is none of {', '.join(replica_sets)}")
        for name, num_members in wanted.items():
            replica_sets[name].resize(num_members)
    except (ValidationError, PlacementError) as error:
        return [f"{file.name} cannot be followed: {error}"]
    finally:
        file.unlink()
    return [f"{file.name}: {', '.join(f'{name} {count}' for name, count in wanted.items())}"]


def create_elastic(config: Config, components: Components) -> Elastic | None:
    """Elastic replicas that follow `rollout.elastic`; None without it."""
    section, servers = config.rollout.elastic, components.weights.servers
    if section is None:
        return None
    sizes = {"num_replicas": config.rollout.num_replicas, "batch_size": config.batch.batch_size}
    return Elastic(section, servers, **sizes, weights=components.weights)


def _patience(asked: threading.Event) -> Callable[[], bool]:
    """Whether the run was asked to stop `STOP_GRACE_S` ago; the first question after that starts the clock."""
    since = math.inf

    def is_over() -> bool:
        nonlocal since
        since = min(since, time.monotonic()) if asked.is_set() else since
        return time.monotonic() - since > STOP_GRACE_S

    return is_over


@contextmanager
def _stop_when_asked(console: Console, asked: threading.Event, timer: PhaseTimer) -> Generator[None]:
    """Signal handler: the first Ctrl-C or SIGTERM sets `asked`, and the run ends after its step, with a checkpoint.

    A second one raises KeyboardInterrupt at once, and nothing is saved; those within a second are the same one, which
    reached the process and its group. An evaluation that lasts longer than `STOP_GRACE_S` is given up.
    """
    first = math.inf

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if asked.is_set() and time.monotonic() - first > _SAME_SIGNAL_S:
            raise KeyboardInterrupt
        if not asked.is_set():
            first = time.monotonic()
            asked.set()
            signal.setitimer(signal.ITIMER_REAL, STOP_GRACE_S, 1.0)
            console.print("stopping after this step; once more stops at once, without a checkpoint")

    def on_alarm(number: int, frame: FrameType | None) -> None:
        if (timer.current or ("",))[0] == "eval":
            raise StopRequestedError

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, on_alarm)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _model(config: Config, datasets: Datasets, output_dir: Path, console: Console) -> Path:
    if config.model.path is not None:
        return Path(config.model.path)
    from rl_trainer.data.warmup import make_small_model

    assert config.model.warmup is not None, "preflight has checked it"
    with status(console, "making the small model") as show:
        return make_small_model(
            output_dir,
            config.model.warmup,
            datasets.train,
            seed=config.seed,
            timeout_s=config.timeout_s,
            on_line=lambda line: show(f"making the small model: {line}"),
        )
