from dataclasses import replace

import pytest
from packages.trainer.tests.support.stand_ins import FakeAgents, QueueJob

from rl_tq.types import BatchMeta
from rl_trainer.checkpoints import RunState
from rl_trainer.config import load_config
from rl_trainer.config.schema import ReplaySection
from rl_trainer.errors import PlanError, RolloutFailedError, StaleWeightsError
from rl_trainer.loop import run_loop
from rl_trainer.metrics import HeldGroup
from rl_trainer.pipeline.rollout_source import Generated
from rl_trainer.pipeline.staleness import AgeBound
from rl_trainer.pipeline.step_record import ages_of
from rl_trainer.planning.plan import make_plan


def config(*overrides, staleness=1):
    sizes = ["batch.batch_size=4", "batch.mini_batch_size=2", "batch.group_size=2", "steps=6", "eval_every=0"]
    how = ["pipeline=fully_async", f"staleness.max_staleness={staleness}", "timeout_s=5", "batch.max_refills=2"]
    return load_config("quickstart", [*how, *sizes, *overrides])


class Job(QueueJob):
    """Notes the groups whose rows were learned from."""

    def __init__(self, config, agents, *, position=0, returned=(), step=0):
        super().__init__(
            config, agents, RunState(seed=0, num_rows=1000, step=step, position=position, pending=returned)
        )
        self.cleared, finish = [], self.source.finish

        def noting(generated, step):
            self.cleared += [tags["group_id"] for tags in generated.batch.tags]
            finish(generated, step)

        self.source.finish = noting


def run(settings, *, start_step=0, position=0, returned=(), **agents):
    job = Job(settings, FakeAgents(settings, **agents), position=position, returned=returned, step=start_step)
    return job, list(run_loop(job.components(), settings, [{}] * 3, start_step=start_step))


def test_without_staleness_seeds_and_weights_match_sync():
    settings = config(staleness=0)
    job, records = run(settings, per_poll=3)
    assert [r.step for r in records] == list(range(7))
    assert all(r.metrics["staleness_0"] == 1.0 for r in records[1:])
    assert [r.position for r in records] == [0, 8, 12, 16, 20, 24, 24]
    source = QueueJob(settings, FakeAgents(settings)).source
    seeds = [source.sampling(f"{step}/0")["seed"] for step in range(1, 7)]
    want = [(row, place, seed) for seed in seeds for place, row in enumerate(source.order.take(4))]
    assert [(j.row_index, j.place, seed) for j, seed in job.agents.submitted] == want


@pytest.mark.parametrize("staleness", [1, 2])
def test_generation_runs_ahead_as_far_as_it_may(staleness):
    job, records = run(config(staleness=staleness), per_poll=2, slow=[1, 6])
    ages = [r.metrics["staleness_mean"] for r in records[1:]]
    assert max(ages) > 0
    assert all(sum(r.metrics.get(f"staleness_{age}", 0) for age in range(staleness + 1)) == 1.0 for r in records[1:])
    assert len(job.agents.submitted) == 6 * 4  # whole steps and no more
    assert sorted(set(job.cleared)) == list(range(1, 25))  # every group was learned from once, the slow ones too
    assert len(job.cleared) == 6 * 4 * 2


def test_a_failed_group_is_replaced_and_counted():
    job, records = run(config(), per_poll=2, fails=[3, 9])
    assert sum(r.failures.get("tool", 0) for r in records) == 2
    assert len(job.agents.submitted) == 26
    assert not {3, 9} & set(job.cleared)
    assert [len(set(places)) for places in zip(*[iter(job.cleared)] * 8, strict=True)] == [4] * 6


def test_what_comes_too_late_is_thrown_away_counted_and_replaced():
    job, records = run(config("staleness.policy=group_age"), per_poll=1, slow=[1])
    num_late = sum(r.metrics["late_groups"] for r in records[1:])
    assert num_late >= 1
    assert len(job.agents.submitted) == 24 + num_late
    assert [r.step for r in records] == list(range(7))


def test_a_run_that_may_replace_nothing_needs_to_replace_nothing():
    assert len(run(config("batch.max_refills=0"), per_poll=1)[1]) == 7


def test_a_run_that_cannot_fill_a_batch_says_what_failed():
    with pytest.raises(RolloutFailedError, match=r"the last failure: the tool broke"):
        run(config(), fails=range(1, 500), per_poll=4)


def test_a_resumed_run_takes_pending_prompts_first_and_once():
    straight, records = run(config(staleness=2), per_poll=3)
    second = records[2]
    ahead = (*second.pending, *(group.row_index for group in second.held))
    assert len(ahead) == 12  # three batches ahead: the one to come and two behind it
    resumed, _ = run(config(staleness=2), start_step=2, position=second.position, returned=ahead, per_poll=3)
    learned_before = {j.row_index for j, _ in straight.agents.submitted if j.group_id in straight.cleared[: 2 * 8]}
    learned_after = [j.row_index for j, _ in resumed.agents.submitted]
    assert learned_after[: len(ahead)] == list(ahead)
    assert len(learned_after) == len(set(learned_after)) == 16
    assert not learned_before & set(learned_after)
    assert learned_before | set(learned_after) == {j.row_index for j, _ in straight.agents.submitted}


def test_a_sample_that_is_too_old_stops_the_run():
    settings = config(staleness=0)

    class Lagging(FakeAgents):
        def submit(self, *arguments):
            self.version -= 1
            super().submit(*arguments)
            self.version += 1

    with pytest.raises(StaleWeightsError, match="weights of version 1 may learn from 1 to 1"):
        list(run_loop(Job(settings, Lagging(settings)).components(), settings, [{}]))


def rows_of(num_groups, oldest, newest):
    """A reference to rows of so many groups, of tokens from one weight version to another."""
    ages = {"weight_version_min": oldest, "weight_version_max": newest}
    tags = tuple({"group_id": group, **ages} for group in range(num_groups) for _ in range(2))
    return BatchMeta(partition="train", sample_ids=tuple(map(str, range(len(tags)))), columns=(), tags=tags)


def test_ages_by_hand():
    _, records = run(config())
    assert set(records[1].metrics) >= {"staleness_0", "staleness_mean", "staleness_max"}
    made = Generated(batch=rows_of(2, 3, 4), reward=0.5, failures={}, dropped_groups=0)
    assert ages_of(made, version=4, bound=AgeBound(0, 2)) == {
        "staleness_0": 0.0, "staleness_1": 1.0, "staleness_mean": 1.0, "staleness_max": 1.0
    }  # fmt: skip


def test_only_what_is_replayed_may_be_as_old_as_replay_allows():
    batch = rows_of(2, 3, 3)
    groups = [
        HeldGroup(group_id=g, row_index=g, place=g, released=3) for g in sorted({t["group_id"] for t in batch.tags})
    ]
    made = Generated(batch=batch, reward=0.5, failures={}, dropped_groups=0, reused=tuple(groups))
    assert ages_of(made, version=5, bound=AgeBound(0, 0), replay=ReplaySection(max_age=2))["staleness_2"] == 1.0
    with pytest.raises(StaleWeightsError, match="weights of version 6 may learn from 4 to 6"):
        ages_of(made, version=6, bound=AgeBound(0, 0), replay=ReplaySection(max_age=2))
    with pytest.raises(StaleWeightsError, match="weights of version 5 may learn from 5 to 5"):
        ages_of(replace(made, reused=(groups[0],)), version=5, bound=AgeBound(0, 0), replay=ReplaySection(max_age=2))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["runtime=inline"], "takes runtime=ray"),
        (["algorithm.old_logprobs=recompute", "staleness.max_staleness=1"], "set algorithm.correction=tis"),
        (["pipeline=sync", "staleness.max_staleness=2"], r"pipeline=sync takes staleness.max_staleness=0 \(the"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(overrides, message):
    with pytest.raises(PlanError, match=message):
        make_plan(config(*overrides))


def test_on_policy_needs_no_correction():
    make_plan(config("algorithm.old_logprobs=recompute", staleness=0))
