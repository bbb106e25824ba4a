"""One training run: check everything, make the model if there is none, place the parts, drive the pipeline."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from rl_trainer import preflight, report
from rl_trainer.data import PromptOrder, load_datasets
from rl_trainer.plan import make_plan
from rl_trainer.runtime import create_runtime

if TYPE_CHECKING:
    from rl_trainer.config import Config
    from rl_trainer.data.datasets import Datasets
    from rl_trainer.pipelines.parts import Parts
    from rl_trainer.plan import BatchPlan

_STATE = "trainer_state.json"


def run(config: Config, console: Console | None = None) -> dict[str, Any]:
    """Run a job and return its summary.

    Raises:
        InputError: something cannot work; nothing was started or written.
        TrainerError: the run failed; every worker was ended.
    """
    console = console or Console()
    plan = make_plan(config)
    datasets = load_datasets(config.data, seed=config.seed)
    preflight.check(config, [*datasets.train, *datasets.eval])
    report.show_plan(console, plan, _facts(config, datasets))
    output_dir = Path(config.output_dir or f"outputs/{config.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(asdict(config))), sort_keys=False))
    return _train(config, plan, datasets, output_dir, console)


def _facts(config: Config, datasets: Datasets) -> list[tuple[str, str]]:
    engine, rollout = config.engine, config.rollout
    parts = f"{engine.backend} x {engine.world_size}, {rollout.backend} x {rollout.num_replicas}"
    return [
        ("run", f"{config.name}, seed {config.seed}, {config.steps} steps, runtime {config.runtime}"),
        ("parts", f"{parts}, weights by {config.weights_transport}, samples by {config.queue_storage}"),
        ("data", f"{len(datasets.train):,} training prompts, {len(datasets.eval):,} held out"),
    ]


def _train(config: Config, plan: BatchPlan, datasets: Datasets, output_dir: Path, console: Console) -> dict[str, Any]:
    from rl_trainer.pipelines.parts import place
    from rl_trainer.pipelines.sync import run_sync

    start = time.perf_counter()
    model_path = _model(config, datasets, output_dir, console)
    warmup_s = time.perf_counter() - start
    state = _read_state(config)
    order = PromptOrder(num_rows=len(datasets.train), seed=config.seed, position=state["position"])
    with ExitStack() as stack:
        runtime = stack.enter_context(create_runtime(config.runtime, timeout_s=config.timeout_s))
        with console.status("starting the workers"):
            parts = place(config, runtime, model_path, datasets.train, order)
        stack.callback(parts.queue.close)
        if config.resume_from is not None:
            parts.actor.load_checkpoint(str(Path(config.resume_from) / "engine"))
        start_s = time.perf_counter() - start - warmup_s
        progress = report.Report(console, output_dir, config.steps)
        interrupted = False
        with progress.progress():
            try:
                for record in run_sync(parts, config, datasets.eval, start_step=state["step"]):
                    progress.add(record)
                    if config.save_every and record.step and record.step % config.save_every == 0:
                        _save(parts, order, output_dir, record.step)
            except KeyboardInterrupt:
                interrupted = True
        step = progress.summary()["steps"]
        checkpoint = _save(parts, order, output_dir, step)
        extra = {
            "warmup_s": warmup_s,
            "start_s": start_s,
            "total_s": time.perf_counter() - start,
            "interrupted": interrupted,
            "checkpoint": str(checkpoint),
            "output_dir": str(output_dir),
        }
        return progress.finish(extra)


def _save(parts: Parts, order: PromptOrder, output_dir: Path, step: int) -> Path:
    """Write everything that `resume_from` needs; the state file is last, so that a folder which has it is complete."""
    folder = output_dir / f"checkpoint-{step}"
    parts.actor.save_checkpoint(str(folder / "engine"), step)
    parts.actor.save_model(str(folder / "model"))
    (folder / _STATE).write_text(
        json.dumps({"step": step, "position": order.position, "num_rows": order.num_rows}) + "\n"
    )
    return folder


def _read_state(config: Config) -> dict[str, int]:
    if config.resume_from is None:
        return {"step": 0, "position": 0}
    return json.loads((Path(config.resume_from) / _STATE).read_text())


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
