import threading

import pytest

from rl_trainer.config import load_config
from rl_trainer.errors import PlanError, StaleWeightsError
from rl_trainer.loop import run_one_step_off
from rl_trainer.testing import FakeJob
from rl_trainer.validate import make_plan


def config(*overrides):
    sizes = ["batch.batch_size=4", "batch.mini_batch_size=2", "batch.group_size=3", "steps=3", "eval_every=0"]
    return load_config("quickstart", ["pipeline=one_step_off", *sizes, *overrides])


def test_the_next_batch_is_generated_while_this_one_trains_and_before_the_servers_change():
    job = FakeJob(config())
    records = list(run_one_step_off(job.components(), config(), [{}] * 5))
    assert [c for c in job.calls if c.startswith(("sync", "generate", "clear", "evaluate"))] == [
        *("sync 1", "evaluate 5", "generate 1"),
        *("generate 2", "sync 2", "clear train-1"),
        *("generate 3", "sync 3", "clear train-0"),
        *("sync 4", "clear train-1", "evaluate 5"),
    ]
    assert [r.step for r in records] == [0, 1, 2, 3]
    # A batch that was generated ahead is held in the queue, for whoever resumes.
    assert [r.position for r in records] == [0, 8, 12, 12]
    assert [[group.row_index for group in r.held] for r in records] == [[], [4, 5, 6, 7], [8, 9, 10, 11], []]
    assert [list(r.rows) for r in records] == [[], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_training_does_not_wait_for_generation():
    """Each waits for the other: ends at the barrier's deadline unless both are under way."""
    meet = threading.Barrier(2)

    class Overlapping(FakeJob):
        def generate_sequences(self, partition, step):
            if step == 2:
                meet.wait(10)
            return super().generate_sequences(partition, step)

        def compute_advantage(self, batch, *args):
            if "advantage" not in self.calls:
                meet.wait(10)
            return super().compute_advantage(batch, *args)

    list(run_one_step_off(Overlapping(config()).components(), config(), []))
    assert not meet.broken


def test_tokens_two_versions_old_stop_the_run():
    job = FakeJob(config(), lag=1)
    with pytest.raises(StaleWeightsError, match="weight versions 0 to 0; weights of version 1 may learn from 1 to 1"):
        list(run_one_step_off(job.components(), config(), []))
    assert not any(call.startswith("update") for call in job.calls)


def test_an_error_while_generating_ends_the_run():
    class Failing(FakeJob):
        def generate_sequences(self, partition, step):
            if step == 2:
                raise RuntimeError("no server answers")
            return super().generate_sequences(partition, step)

    with pytest.raises(RuntimeError, match="no server answers"):
        list(run_one_step_off(Failing(config()).components(), config(), []))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["runtime=inline"], "takes runtime=ray"),
        (["algorithm.old_logprobs=recompute"], "set algorithm.correction=tis"),
        (["algorithm.correction=tis"], "set algorithm.old_logprobs=recompute"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(overrides, message):
    with pytest.raises(PlanError, match=message):
        make_plan(config(*overrides))


def test_the_corrected_form_is_accepted():
    make_plan(config("algorithm.old_logprobs=recompute", "algorithm.correction=icepop"))
