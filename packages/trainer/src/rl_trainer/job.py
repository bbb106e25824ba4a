"""One training run: check everything, make the model if there is none, place the parts, drive the pipeline."""

from __future__ import annotations

import json
import signal
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from rl_trainer import preflight, report, samples
from rl_trainer.data import load_datasets
from rl_trainer.plan import make_plan
from rl_trainer.preflight import STATE_FILE
from rl_trainer.profiling import profiled
from rl_trainer.runtime import create_runtime
from rl_trainer.trackers import RunInfo, TrackerGroup

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from types import FrameType

    from rl_trainer.config import Config
    from rl_trainer.data.datasets import Datasets
    from rl_trainer.pipelines.parts import Parts


def plan(config: Config, console: Console | None = None) -> Datasets:
    """Check everything that can be known before a process starts, show what would run, and return its data.

    Raises:
        InputError: something cannot work.
    """
    counts = make_plan(config)
    datasets = load_datasets(config.data, seed=config.seed)
    preflight.check(config, [*datasets.train, *datasets.eval])
    preflight.check_resume(config, len(datasets.train))  # none of a stream
    report.show_plan(console or Console(), counts, _facts(config, datasets))
    return datasets


def run(config: Config, console: Console | None = None) -> dict[str, Any]:
    """Run a job and return its summary.

    Raises:
        InputError: something cannot work; nothing was started or written.
        TrainerError: the run failed; every worker was ended.
    """
    console = console or Console()
    datasets = plan(config, console)
    output_dir = Path(config.output_dir or f"outputs/{config.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    output_dir.mkdir(parents=True, exist_ok=True)
    values = json.loads(json.dumps(asdict(config)))
    (output_dir / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    about = RunInfo(name=config.name, output_dir=output_dir, num_steps=config.steps, config=values, console=console)
    traced = profiled(output_dir if config.tracking.profile else None)
    with TrackerGroup(about, config.tracking.trackers, config.tracking.options) as trackers, traced:
        return _train(config, datasets, output_dir, console, trackers)


def _facts(config: Config, datasets: Datasets) -> list[tuple[str, str]]:
    engine, rollout = config.engine, config.rollout
    parts = f"{engine.backend} x {engine.world_size}, {rollout.backend} x {rollout.num_replicas}"
    return [
        ("run", f"{config.name}, seed {config.seed}, {config.steps} steps, runtime {config.runtime}"),
        ("parts", f"{parts}, weights by {config.weights_transport}, samples by {config.queue_storage}"),
        ("memory", preflight.memory_estimate(config)),
        ("data", f"{_num_prompts(datasets)} training prompts, {len(datasets.eval):,} held out"),
    ]


def _num_prompts(datasets: Datasets) -> str:
    return "streamed" if datasets.stream is not None else f"{len(datasets.train):,}"


def _train(
    config: Config, datasets: Datasets, output_dir: Path, console: Console, trackers: TrackerGroup
) -> dict[str, Any]:
    from rl_trainer.pipelines.fully_async import run_fully_async
    from rl_trainer.pipelines.one_step_off import run_one_step_off
    from rl_trainer.pipelines.parts import place
    from rl_trainer.pipelines.sync import run_sync

    pipelines = {"sync": run_sync, "one_step_off": run_one_step_off, "fully_async": run_fully_async}
    run_pipeline = pipelines[config.pipeline]

    start = time.perf_counter()
    model_path = _model(config, datasets, output_dir, console)
    warmup_s = time.perf_counter() - start
    state = _first_state(config, datasets)
    with ExitStack() as stack:
        runtime = stack.enter_context(create_runtime(config.runtime, timeout_s=config.timeout_s))
        with console.status("starting the workers"):
            where = {"position": state["position"], "pending": state["pending"], "kl_coef": state["kl_coef"]}
            samples_folder = output_dir / samples.FOLDER if config.tracking.keep_samples else None
            parts = place(config, runtime, model_path, datasets, samples_folder=samples_folder, **where)
        stack.callback(parts.queue.close)
        if parts.num_too_long:
            console.print(
                f"left out {parts.num_too_long} rows whose prompts are longer than data.max_prompt_tokens="
                f"{config.data.max_prompt_tokens}"
            )
        if config.resume_from is not None:
            parts.actor.load_checkpoint(str(Path(config.resume_from) / "engine"))
            if parts.critic is not None:
                parts.critic.load_checkpoint(str(Path(config.resume_from) / "critic"))
        start_s = time.perf_counter() - start - warmup_s
        progress = report.Report(output_dir)
        checkpoint: Path | None = None
        with _stop_when_asked(console) as stop:
            for record in run_pipeline(parts, config, parts.eval_rows, start_step=state["step"]):
                progress.add(record)
                trackers.log(record)
                state |= {"step": record.step, "position": record.position, "pending": list(record.pending)}
                state["kl_coef"] = parts.kl.coef
                is_last = stop.is_set() or record.step == config.steps
                if is_last or (config.save_every and record.step and record.step % config.save_every == 0):
                    checkpoint = _save(parts, output_dir, state)
                if is_last:
                    break
        extra = {
            "warmup_s": warmup_s,
            "start_s": start_s,
            "total_s": time.perf_counter() - start,
            "interrupted": stop.is_set(),
            "rows_too_long": parts.num_too_long + parts.rollout_manager.num_too_long,
            "checkpoint": str(checkpoint),
            "output_dir": str(output_dir),
        }
        summary = progress.finish(extra)
        trackers.finish(summary)
        return summary


@contextmanager
def _stop_when_asked(console: Console) -> Generator[threading.Event]:
    """Set on the first Ctrl-C or SIGTERM, so that the step in progress ends and a checkpoint holds whole steps only.

    A second one raises KeyboardInterrupt where it strikes, and nothing is saved.
    """
    asked = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        console.print("stopping after this step; once more stops at once, without a checkpoint")

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _save(parts: Parts, output_dir: Path, state: Mapping[str, Any]) -> Path:
    """Write everything that `resume_from` needs; the state file is last, so that a folder which has it is complete."""
    folder = output_dir / f"checkpoint-{state['step']}"
    parts.actor.save_checkpoint(str(folder / "engine"), state["step"])
    parts.actor.save_model(str(folder / "model"))
    if parts.critic is not None:
        parts.critic.save_checkpoint(str(folder / "critic"), state["step"])
    (folder / STATE_FILE).write_text(json.dumps(state) + "\n")
    return folder


def _first_state(config: Config, datasets: Datasets) -> dict[str, Any]:
    """What has been done: nothing, or what the checkpoint says; preflight has checked that it is of this data."""
    if config.resume_from is None:
        state = {"step": 0, "position": 0, "pending": [], "kl_coef": None}
        return state | {"seed": config.seed, "num_rows": len(datasets.train)}
    return {"pending": [], "kl_coef": None} | json.loads((Path(config.resume_from) / STATE_FILE).read_text())


def _model(config: Config, datasets: Datasets, output_dir: Path, console: Console) -> Path:
    if config.model.path is not None:
        return Path(config.model.path)
    from rl_trainer.warmup import make_small_model

    assert config.model.warmup is not None, "preflight has checked it"
    with console.status("making the small model") as status:
        return make_small_model(
            output_dir,
            config.model.warmup,
            datasets.train,
            seed=config.seed,
            timeout_s=config.timeout_s,
            on_line=lambda line: status.update(f"making the small model: {line}"),
        )
