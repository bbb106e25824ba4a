"""Every kind of plug-in is found in every way that it may be given: a table of ten kinds and four ways."""

import asyncio
import importlib
import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import rl_agent
import rl_tq
from rl_trainer.algorithms import AdvantageInput, PolicyLossInput, estimator_named, loss_named
from rl_trainer.api import _config
from rl_trainer.data import load_datasets
from rl_trainer.errors import ConfigError
from rl_trainer.pipeline.staleness import create_schedule
from rl_trainer.planning.preflight import check_loop_options
from rl_trainer.plugins import filter_named, loop_named, stage_named
from rl_trainer.rewards import Scorer
from rl_trainer.trackers import RunInfo, TrackerGroup

MODULE = '''
"""One plug-in of every kind, each of which says 7 where it is used."""

import torch

from rl_agent import AgentLoop
from rl_tq.types import StalenessPolicy
from rl_trainer.pipeline.staleness import Schedule
from rl_trainer.trackers import Tracker


def advantage(data):
    return torch.full_like(data.rewards, 7.0)


def loss(data):
    return torch.full_like(data.logprobs, 7.0)


def stage(rows):
    return {"column": torch.tensor([7])}


def filter(samples):
    return samples[0]["reward"] == 7


def reward(text, row):
    return 7.0


def schedule(config):
    return Schedule(policy=Staleness(max_staleness=0, batch_size=config.batch.batch_size), lag=7)


class Staleness(StalenessPolicy):
    name = "mine_Staleness"

    def admit(self, num_outstanding):
        return 7


class Loop(AgentLoop):
    async def run(self, sampling_params, row):
        return 7


class Dataset:
    def __init__(self, config, *, seed):
        prompt = [{"role": "user", "content": "?"}]
        row = {"prompt": prompt, "data_source": "own", "reward_model": {"ground_truth": "7"}, "extra_info": {"n": 7}}
        self.train = self.eval = [row]


class Recorder(Tracker):
    def __init__(self, run):
        run.console.print("tracker 7")

    def log(self, record):
        pass

    def close(self, summary):
        pass
'''

POINTS = """
[rl_trainer.advantages]
mine_advantage = mine:advantage
[rl_trainer.policy_losses]
mine_loss = mine:loss
[rl_trainer.stages]
mine_stage = mine:stage
[rl_trainer.filters]
mine_filter = mine:filter
[rl_trainer.rewards]
mine_reward = mine:reward
[rl_trainer.schedules]
mine_schedule = mine:schedule
[rl_tq.policies]
mine_Staleness = mine:Staleness
[rl_agent.loops]
mine_Loop = mine:Loop
[rl_trainer.datasets]
mine_Dataset = mine:Dataset
[rl_trainer.trackers]
mine_Recorder = mine:Recorder
"""


def of_advantage(config, folder):
    data = AdvantageInput(
        rewards=torch.zeros(1), loss_mask=torch.ones(1), cu_seqlens=torch.tensor([0, 1]), group_ids=torch.tensor([0])
    )
    return estimator_named(config.algorithm.advantage).compute(data).item()


def of_loss(config, folder):
    zeros = torch.zeros(1)
    data = PolicyLossInput(logprobs=zeros, old_logprobs=zeros, advantages=zeros, loss_mask=zeros, **_unused())
    return loss_named(config.algorithm.loss).compute(data).item()


def _unused():
    """Whatever else a loss may read, which this one does not."""
    from dataclasses import MISSING, fields

    given = {"logprobs", "old_logprobs", "advantages", "loss_mask"}
    lacking = [f for f in fields(PolicyLossInput) if f.default is MISSING and f.default_factory is MISSING]
    return {f.name: None for f in lacking if f.name not in given}


def of_reward(config, folder):
    async def score():
        scorer = Scorer(config.reward)
        try:
            return (await scorer.score("text", {})).reward
        finally:
            await scorer.close()

    return asyncio.run(score())


def of_loop(config, folder):
    check_loop_options(config.agent)
    return asyncio.run(rl_agent.create_loop(loop_named(config.agent.loop), None, None).run({}, {}))


def of_tracker(config, folder):
    console = Console(record=True, file=io.StringIO())
    run = RunInfo(name="run", output_dir=folder, num_steps=1, start_step=0, config={}, console=console)
    with TrackerGroup(run, config.tracking.trackers):
        return int(console.export_text().split()[-1])


def of_policy(config, folder):
    with rl_tq.serve("inproc://") as queue:
        queue.configure(
            "train", staleness=create_schedule(replace(config, pipeline="fully_async")).policy, tasks=["train"]
        )
        admitted = [queue.admit(partition="train", num_rows=1, group_id=group, timeout_s=0) for group in range(7)]
        return len(admitted)


KINDS = {
    "advantage": ("algorithm.advantage", of_advantage),
    "loss": ("algorithm.loss", of_loss),
    "stage": ("algorithm.stages", lambda config, _: stage_named(config.algorithm.stages[0]).compute({})["column"]),
    "filter": ("batch.filter", lambda config, _: 7 * filter_named(config.batch.filter)([{"reward": 7}])),
    "reward": ("reward.path", of_reward),
    "schedule": ("pipeline", lambda config, _: create_schedule(config).lag),
    "Staleness": ("staleness.policy", of_policy),
    "Loop": ("agent.loop", of_loop),
    "Dataset": ("data.format", lambda config, _: load_datasets(config.data, seed=0).train[0]["extra_info"]["n"]),
    "Recorder": ("tracking.trackers", of_tracker),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A distribution that is installed in a folder of its own."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "mine.py").write_text(MODULE)
    info = folder / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    return folder


WAYS = ["entry point", "file", "module", "object"]
BY_DEFAULT = [(kind, WAYS[place % len(WAYS)]) for place, kind in enumerate(KINDS)]
"""Every kind, and every way more than once."""
MORE = [
    pytest.param(kind, way, marks=pytest.mark.slow) for kind in KINDS for way in WAYS if (kind, way) not in BY_DEFAULT
]


@pytest.mark.promise("Every kind of plug-in is found by entry point, file, module or as an object")
@pytest.mark.process
@pytest.mark.parametrize(("kind", "way"), [*BY_DEFAULT, *MORE])
def test_a_plug_in_is_found_and_used(folder, kind, way, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))  # a reward has a process of its own
    given = {
        "entry point": f"mine_{kind}",
        "file": f"{folder}/mine.py:{kind}",
        "module": f"mine:{kind}",
        "object": getattr(importlib.import_module("mine"), kind),
    }[way]
    key, use = KINDS[kind]
    value = [given] if key in ("algorithm.stages", "tracking.trackers") else given
    config = _config("quickstart", {key: value, **({"data.options": {}} if kind == "Dataset" else {})})
    assert use(config, tmp_path) == 7


@pytest.mark.process
def test_tracker_objects_combine_with_names_and_take_no_options():
    from rl_trainer.config import as_tree

    class Silent:
        pass

    config = _config("quickstart", {"tracking.trackers": ["console", Silent]})
    names = list(as_tree(config)["tracking"]["trackers"])
    assert names[0] == "console"
    assert names[1].startswith("<test_tracker_objects")
    with pytest.raises(ConfigError, match="two trackers of one name"):
        _config("quickstart", {"tracking.trackers": [Silent, Silent]})


def test_the_examples_of_the_way_by_path_are_those_that_ship():
    names = {file.stem for file in (Path(__file__).parents[3] / "examples").glob("own_*.py")}
    assert names == {f"own_{kind}" for kind in ("advantage", "loss", "stage", "schedule", "filter", "loop")}
