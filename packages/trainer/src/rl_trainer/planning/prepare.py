"""Preparation of a run: settles its configuration, reads its rows, and checks all that can be known before the start.

One pass, for `rl-train` with and without `--dry-run`, for a resumed run and for `rl-eval`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from rich.console import Console

from rl_trainer import checkpoints
from rl_trainer.checkpoints import RunState
from rl_trainer.data import load_datasets
from rl_trainer.errors import ConfigError, PlanError, naming_policy
from rl_trainer.pipeline.roles import facts_of_each, of_each, policies_of, with_model, with_policies
from rl_trainer.planning import preflight
from rl_trainer.planning.gpus import (
    check_gpus,
    count_gpus,
    gpu_facts,
    gpu_gib,
    placement_facts,
    precision_facts,
    settle,
)
from rl_trainer.planning.memory import checkpoint_facts, memory_facts, memory_of_pools
from rl_trainer.planning.plan import make_plan, show_table
from rl_trainer.planning.row_checks import RowCheck
from rl_trainer.planning.speed import speed_facts
from rl_trainer.rewards.checks import reward_source
from rl_trainer.rewards.code import sandbox_facts
from rl_trainer.runtime.processes import rare_collections

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_trainer.config import Config
    from rl_trainer.data import Datasets

Resume: TypeAlias = 'bool | Literal["anyway"]'
"""Whether to resume the run in `output_dir`; "anyway": also if its inputs changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A prepared run: what it starts with, and the plan."""

    config: Config
    """Configuration with its steps counted, what is left to the machine settled, and folders for the hub's names."""
    datasets: Datasets
    facts: tuple[tuple[str, str], ...]
    rows: RowCheck
    """Check of the rows, of which a sample is done."""
    models: Mapping[str, str | None]
    """`model.path` of each policy as it was given; another than in `config` if it is the hub's id of a model without
    weights yet."""
    resume: Resume = False

    def show(self, console: Console) -> None:
        """Print the plan."""
        show_table(console, "batch plan", self.facts)

    def with_weights(self) -> Config:
        """Configuration with the policies' weights in their folders, downloaded if they are the hub's.

        Raises:
            InputError: the hub does not have them, or they are not those of the run that is resumed.
        """
        policies = policies_of(self.config)
        if {name: own.model.path for name, own in policies.items()} == self.models:
            return self.config
        config = with_policies({name: preflight.with_policy(own, self.models[name]) for name, own in policies.items()})
        checkpoints.check_inputs(config, self.datasets, is_forced=self.resume == "anyway")
        for own in policies_of(config).values():
            preflight.check_model(own)
        return config


@rare_collections()
def prepare(config: Config, *, resume: Resume = False) -> Prepared:
    """Prepare a run: check all that can be known before a process starts.

    With `resume`, `resumed` gave the configuration, and has compared the checkpoint's files with their digests; with
    "anyway" the run may read other data, models and code than the checkpoint's run did.

    Raises:
        InputError: something cannot work.
    """
    config.check_runtime()
    datasets = _rows(config) if config.epochs else None
    named = settle(config if datasets is None else counted(config, datasets))
    counts = make_plan(named)
    check_gpus(named)
    with preflight.backends_asked(named):
        datasets = datasets or _rows(named)
        config = of_each(named, preflight.with_models)
        rows = [*datasets.train, *datasets.eval]
        models = {name: own.model.path for name, own in policies_of(named).items()}
        for name, own in policies_of(config).items():
            with naming_policy(name):
                has_weights = own.model.path == models[name]
                preflight.check(own, rows, is_resumed=bool(resume), has_weights=has_weights, is_one_of=bool(name))
        preflight.check_given(datasets.train, config.batch.given)
        checkpoints.check_resume(config, len(datasets.train), is_known_whole=bool(resume))  # no rows of a stream
        others = checkpoints.check_inputs(named, datasets, is_forced=resume == "anyway")
        backends = facts_of_each(config, preflight.check_backends)
        backends += preflight.video_facts(config, rows)
        known = _facts(config, datasets)  # reads the chat template, before a row is rendered
    check = RowCheck(config, datasets, takes_videos=preflight.serves_videos(config))
    resumed_at = list[tuple[str, str]]()
    if config.resume_from is not None:
        state = RunState.read(Path(config.resume_from))
        resumed_at = [("resumed", f"after step {state.step}"), *(("changed", each) for each in state.changes(config))]
    facts = [
        *known,
        *check.sample(),
        *resumed_at,
        *(("changed", f"{name}: not as in the checkpoint's run (resume=anyway)") for name in others),
        *backends,
        *facts_of_each(config, preflight.program_facts),
        *counts.lines(config),
    ]
    return Prepared(config=config, datasets=datasets, facts=tuple(facts), rows=check, models=models, resume=resume)


def prepare_policy(config: Config, *, is_served: bool = False) -> tuple[Config, Datasets]:
    """Prepare the evaluation of a policy on a recipe's held-out rows: its settled configuration, and its rows.

    Raises:
        InputError: something cannot work.
    """
    if config.policies:
        raise ConfigError(
            f"the recipe has the policies {', '.join(config.policies)}, and a single policy can be evaluated here; "
            "rl-train evaluates them together, every eval_every steps"
        )
    if config.model.path is None:
        raise ConfigError("model.path is not set: give the folder of the policy, or the hub's id of it")
    config = preflight.with_policy(settle(config), config.model.path)
    datasets = _rows(config)
    preflight.check_policy(config, datasets.eval, is_served=is_served)
    return config, datasets


def _rows(config: Config) -> Datasets:
    return load_datasets(config.data, seed=config.seed, agent=config.agent)


def counted(config: Config, datasets: Datasets) -> Config:
    """The configuration with the number of steps that its `epochs` take.

    Raises:
        PlanError: the rows are streamed, so that they cannot be counted.
    """
    if datasets.stream is not None:
        raise PlanError(f"epochs={config.epochs} of rows that are streamed cannot be counted; set steps instead")
    return replace(config, steps=_num_steps(config, len(datasets.train)), epochs=0)


def _num_steps(config: Config, num_rows: int) -> int:
    return math.ceil(config.epochs * num_rows / config.batch.batch_size) if config.epochs else config.steps


def resumed(config: Config, console: Console | None = None) -> Config:
    """Configuration of a resumed run: from the newest undamaged checkpoint in its `output_dir`, or from the start.

    The same command may be given every time. A damaged checkpoint is named and passed over.

    Raises:
        ConfigError: `output_dir` is not set, so there is nothing to look for.
        InputError: it has checkpoints, and all of them are damaged.
    """
    if config.output_dir is None:
        raise ConfigError("--resume goes on with the run in output_dir, which is not set; set it, or resume_from")
    folder = Path(config.output_dir)
    checkpoint, damaged = checkpoints.newest_whole(folder)
    for newer, lines in damaged.items():
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        found = f"{newer.name} is damaged: {lines[0]}{more}; going on from {checkpoint and checkpoint.name}"
        (console or Console()).print(found, highlight=False, soft_wrap=True)
    if checkpoint is None:
        return config
    return replace(with_model(config, folder / "model"), resume_from=str(checkpoint))


def finished(config: Config) -> str | None:
    """Sentence for a resumed run that has taken all of its steps; None if there are some left."""
    if config.resume_from is None:
        return None
    state = RunState.read(Path(config.resume_from))
    steps = _num_steps(config, state.num_rows)
    if state.step < steps:
        return None
    return f"the run is finished: {config.resume_from} is of step {state.step} of steps={steps}; raise steps to go on"


def _facts(config: Config, datasets: Datasets) -> list[tuple[str, str]]:
    storage = config.queue_storage or "shm, or ray over several nodes"
    num_prompts = "streamed" if datasets.stream is not None else f"{len(datasets.train):,}"
    return [
        ("run", f"{config.name}, seed {config.seed}, {config.steps} steps, runtime {config.runtime}"),
        *facts_of_each(config, lambda own: _component_facts(own, storage)),
        *facts_of_each(config, precision_facts),
        *gpu_facts(config),
        *placement_facts(config, memory_of_pools(config), gpus=count_gpus(config)),
        *facts_of_each(config, lambda own: memory_facts(own, there=gpu_gib())),
        *facts_of_each(config, checkpoint_facts),
        *facts_of_each(config, lambda own: speed_facts(own, datasets)),
        ("data", f"{num_prompts} training prompts, {len(datasets.eval):,} held out"),
        *([("rows left out", f"{datasets.num_bad}: {'; '.join(datasets.bad)}")] if datasets.num_bad else []),
        ("reward", reward_source(config.reward, [*datasets.train, *datasets.eval])),
        *sandbox_facts(config.reward, config.agent),
        *facts_of_each(config, preflight.folder_facts),
    ]


def _component_facts(config: Config, storage: str) -> list[tuple[str, str]]:
    engine, rollout = config.engine, config.rollout
    components = f"{engine.backend} x {engine.world_size}, {rollout.backend} x {rollout.num_replicas}"
    return [("components", f"{components}, weights by {config.weights_transport}, samples by {storage}")]
