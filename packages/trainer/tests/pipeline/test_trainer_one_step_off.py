from itertools import pairwise

import pytest
from packages.trainer.tests.support.stand_ins import FakeAgents, QueueJob

from rl_trainer.config import load_config
from rl_trainer.data import PromptOrder
from rl_trainer.errors import PlanError, StaleWeightsError
from rl_trainer.loop import run_loop
from rl_trainer.planning.plan import make_plan


def config(*overrides):
    sizes = ["batch.batch_size=4", "batch.mini_batch_size=2", "batch.group_size=3", "steps=3", "eval_every=0"]
    return load_config("quickstart", ["pipeline=one_step_off", *sizes, *overrides])


class Job(QueueJob):
    """Writes down when prompts are given to the agents as well."""

    def __init__(self, config, **agents):
        super().__init__(config, FakeAgents(config, per_poll=3, **agents))
        submit = self.agents.submit

        def noting(jobs, *rest):
            self.calls.append(f"submit {len(jobs)}")
            submit(jobs, *rest)

        self.agents.submit = noting


def test_the_next_batch_is_generated_while_this_one_trains():
    """It is complete before the servers get new weights."""
    job = Job(config())
    records = list(run_loop(job.components(), config(), [{}] * 5))
    assert [c for c in job.calls if c.startswith(("sync", "submit", "update"))] == [
        *("sync 1", "submit 4"),
        *("submit 4", "update 6", "update 6", "sync 2"),
        *("submit 4", "update 6", "update 6", "sync 3"),
        *("update 6", "update 6", "sync 4"),
    ]
    assert [r.step for r in records] == [0, 1, 2, 3]
    # A batch that was generated ahead is held in the queue, for whoever resumes.
    assert [r.position for r in records] == [0, 8, 12, 12]
    assert [len(r.held) for r in records] == [0, 4, 4, 0]
    assert [r.pending for r in records] == [()] * 4, "nothing is generated while the servers change"
    assert all(set(r.rows) == {g.row_index for g in before.held} for before, r in pairwise(records[1:]))
    assert sorted(row for r in records for row in r.rows) == sorted(PromptOrder(num_rows=1000, seed=0).take(12))
    assert [r.metrics["staleness_max"] for r in records[1:]] == [0, 1, 1]


def test_without_staleness_the_next_batch_waits_for_weights():
    settings = config("staleness.max_staleness=0", "algorithm.old_logprobs=recompute")
    make_plan(settings)
    job = Job(settings)
    records = list(run_loop(job.components(), settings, [{}] * 5))
    assert [c for c in job.calls if c.startswith(("sync", "submit", "update"))] == [
        *("sync 1", "submit 4", "update 6", "update 6"),
        *("sync 2", "submit 4", "update 6", "update 6"),
        *("sync 3", "submit 4", "update 6", "update 6", "sync 4"),
    ]
    assert all(record.metrics["staleness_0"] == 1.0 for record in records[1:])


def test_what_is_finished_is_taken_in_while_the_engine_learns():
    """With dynamic sampling a group without signal is replaced at once, not when the next batch is asked for."""
    settings = config("batch.dynamic_sampling=true", "batch.mini_batch_size=1")
    job = Job(settings)
    rewards, seen = job.agents.rewards_of, []
    job.agents.rewards_of = lambda group: [1.0] * 3 if group == 5 else rewards(group)
    update = job.update_actor
    job.update_actor = lambda batch: seen.append(len(job.agents.submitted)) or update(batch)
    list(run_loop(job.components(), settings, [{}]))
    assert (seen[0], seen[3]) == (8, 9)


def test_tokens_two_versions_old_stop_the_run():
    job = Job(config())
    sync = job.sync
    job.sync = lambda version: sync(version - 1)  # what the servers hold
    with pytest.raises(StaleWeightsError, match="weight versions 0 to 0; weights of version 1 may learn from 1 to 1"):
        list(run_loop(job.components(), config(), [{}]))
    assert not any(call.startswith("update") for call in job.calls)


def test_an_error_while_generating_ends_the_run():
    job = Job(config())
    poll = job.agents.poll

    def failing():
        if len(job.agents.submitted) > 4:
            raise RuntimeError("no server answers")
        return poll()

    job.agents.poll = failing
    with pytest.raises(RuntimeError, match="no server answers"):
        list(run_loop(job.components(), config(), [{}]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["runtime=inline"], "takes runtime=ray"),
        (["algorithm.old_logprobs=recompute"], "set algorithm.correction=tis"),
        (["algorithm.correction=tis"], "set algorithm.old_logprobs=recompute"),
        (["staleness.max_staleness=2"], "takes staleness.max_staleness=0"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(overrides, message):
    with pytest.raises(PlanError, match=message):
        make_plan(config(*overrides))


def test_the_corrected_form_is_accepted():
    make_plan(config("algorithm.old_logprobs=recompute", "algorithm.correction=icepop"))
