"""How a batch is filled when rollouts fail or groups have no signal."""

from dataclasses import replace

import pytest
from packages.trainer.tests.support.stand_ins import FakeAgents

from rl_trainer.config import load_config
from rl_trainer.data import PromptOrder
from rl_trainer.data.datasets import Datasets
from rl_trainer.data.sampler import make_prompts
from rl_trainer.errors import RolloutFailedError
from rl_trainer.pipeline.rollout_source import RolloutSource
from rl_trainer.pipeline.staleness import create_schedule

ROWS = [{"rewards": (1.0, 1.0)}, {"rewards": (0.0, 1.0)}, {"rewards": (0.0, 0.0)}, {"rewards": None}]


class Agents(FakeAgents):
    """Gives each row's completions the rewards that the row says; None is a group with a failed rollout."""

    def submit(self, jobs, *rest):
        super().submit(jobs, *rest)
        self._fails |= {job.group_id for job in jobs if job.row["rewards"] is None}

    def rewards_of(self, group):
        return next(job.row["rewards"] for job, _ in self.submitted if job.group_id == group)


def batch_of(rows, *overrides):
    """The first batch, and how many prompts it took."""
    sizes = ["batch.batch_size=4", "batch.mini_batch_size=4", "batch.group_size=2"]
    config = load_config("quickstart", [*sizes, *overrides])
    agents, order = Agents(config, per_poll=4), PromptOrder(num_rows=len(rows), seed=0, position=0)
    source = RolloutSource(agents, rows, order, agents.queue, config, create_schedule(config).policy, poll_s=0.0)
    source.release(1)
    return source.take(1), source.position


def test_jobs_know_the_files_and_numbers_of_their_rows():
    """Rows that are left out before do not shift the numbers."""
    rows = [{"text": "x" * size} for size in (9, 1, 9, 2)]
    datasets = Datasets(train=rows, eval=[{"text": ""}], numbers=([f"f, row {n}" for n in (1, 2, 4, 5)], ["g, row 3"]))
    config = load_config("quickstart", ["data.max_prompt_tokens=4", "batch.batch_size=4"])
    prompts = make_prompts(config, datasets, lambda rows: [len(row["text"]) for row in rows])
    agents = FakeAgents(config)
    source = RolloutSource(
        agents, prompts.rows, prompts.order, agents.queue, config, create_schedule(config).policy, poll_s=0.0
    )
    source.release(1)
    assert {(len(job.row["text"]), job.where) for job, _ in agents.submitted} == {(1, "f, row 2"), (2, "f, row 5")}
    asked = []
    agents.evaluate = lambda jobs, sampling: asked.extend(jobs) or FakeAgents.evaluate(agents, jobs, sampling)
    source.evaluate(prompts.eval_rows)
    assert [job.where for job in asked] == ["g, row 3"]


def test_groups_without_signal_are_replaced_but_count_in_rewards():
    made, position = batch_of(ROWS[:3], "batch.dynamic_sampling=true", "batch.max_refills=20")
    assert len(made.batch) == 8
    rewards = {}
    for tags in made.batch.tags:
        rewards.setdefault(tags["group_id"], []).append(tags["reward"])
    assert list(rewards.values()) == [[0.0, 1.0]] * 4
    assert position == 4 + made.dropped_groups
    assert 6 <= made.dropped_groups <= 8  # one row of three has signal, and each comes once per round
    assert 0.3 < made.reward < 0.7


def test_without_dynamic_sampling_every_group_stays():
    made, position = batch_of(ROWS[:3])
    assert (len(made.batch), made.dropped_groups, position) == (8, 0, 4)


def test_a_group_that_nobody_waits_for_is_in_no_batch():
    """Put by a worker that died before it reported, and given up since."""
    config = load_config("quickstart", ["batch.batch_size=4", "batch.mini_batch_size=4", "batch.group_size=2"])
    agents, order = Agents(config, per_poll=4), PromptOrder(num_rows=1, seed=0, position=0)
    policy = create_schedule(config).policy
    source = RolloutSource(agents, ROWS[1:2], order, agents.queue, config, policy, poll_s=0.0)
    source.release(1)
    agents.queue.configure("train", staleness=replace(policy, num_extra=1), tasks=["train"])
    credit = agents.queue.admit(partition="train", num_rows=1, group_id=-1)
    tags = [{"group_id": -1, "attempt": 0, "weight_version_min": 0}]
    agents.queue.put({"group_id": [-1]}, partition="train", tags=tags, credit=credit)
    made = source.take(1)
    assert [group.group_id for group in made.groups] == [1, 2, 3, 4]
    assert agents.queue.stats()["partitions"]["train"]["rows"] == len(made.batch) == 8


def test_failed_groups_are_counted_and_replaced():
    made, position = batch_of([ROWS[1], ROWS[3]], "batch.max_refills=20")
    assert len(made.batch) == 8
    assert made.failures == {"tool": position - 4}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (ROWS[2:3], r"0 of 4 .* failed rollouts \{\}, .* of their rewards (9|1\d), .* = 8\)"),
        (ROWS[3:4], r"failed rollouts \{'tool': (9|1\d)\}, .*; the last failure: the tool broke"),
    ],
)
def test_a_batch_that_cannot_be_filled_says_why(rows, words):
    with pytest.raises(RolloutFailedError, match=words):
        batch_of(rows, "batch.dynamic_sampling=true")
