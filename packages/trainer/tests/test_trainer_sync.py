import pytest

from rl_trainer.config import load_config
from rl_trainer.errors import StaleWeightsError
from rl_trainer.pipelines.step import mini_batches
from rl_trainer.pipelines.sync import run_sync
from rl_trainer.testing import FakeJob


def config(*overrides):
    sizes = ["batch.batch_size=4", "batch.mini_batch_size=2", "batch.group_size=3", "steps=2", "eval_every=0"]
    sizes += ["algorithm.old_logprobs=recompute", "algorithm.kl_coef=0.001"]
    return load_config("quickstart", [*sizes, *overrides])


def test_the_order_of_a_step():
    job = FakeJob(config())
    records = list(run_sync(job.parts(), config(), [{}] * 5))
    step = ["old_logprobs", "ref_logprobs", "advantage", "update 6", "update 6"]
    assert job.calls == [
        *("sync 1", "evaluate 5"),
        *("generate 1", *step, "sync 2", "clear train"),
        *("generate 2", *step, "sync 3", "clear train", "evaluate 5"),
    ]
    assert [r.step for r in records] == [0, 1, 2]
    assert [r.accuracy for r in records] == [0.5, None, 0.5]
    assert records[1].reward == 0.5
    assert records[1].num_tokens == 4 * 12


def test_what_is_not_needed_is_not_computed():
    wanted = config("algorithm.kl_coef=0", "algorithm.old_logprobs=rollout")
    job = FakeJob(wanted)
    list(run_sync(job.parts(), wanted, []))
    assert not {"old_logprobs", "ref_logprobs"} & set(job.calls)


@pytest.mark.parametrize(
    ("overrides", "has_pass"),
    [
        ([], False),
        (["algorithm.kl_in_reward=true"], True),
        (["algorithm.loss=kl_cov"], True),
        (["algorithm.advantage=vtrace", "critic.lr=1e-5", "algorithm.correction=tis"], True),
        (["algorithm.advantage=optimal_token_baseline"], True),
        (["batch.mini_batch_size=2"], True),
    ],
)
def test_with_one_mini_batch_old_log_probs_take_no_pass_of_their_own_unless_something_reads_them(overrides, has_pass):
    wanted = config("batch.mini_batch_size=4", *overrides)
    job = FakeJob(wanted)
    list(run_sync(job.parts(), wanted, []))
    assert ("old_logprobs" in job.calls) is has_pass


def test_stale_tokens_stop_the_run_before_anything_is_learned_from_them():
    job = FakeJob(config(), lag=1)
    with pytest.raises(
        StaleWeightsError,
        match="sample 1-0 has tokens of weight versions 0 to 0; weights of version 1 may learn from 1 to 1",
    ):
        list(run_sync(job.parts(), config(), []))
    assert not any(call.startswith("update") for call in job.calls)


def test_mini_batches_hold_whole_groups_in_a_seeded_order():
    batch = FakeJob(config()).generate_sequences("train", 1).batch
    parts = mini_batches(batch, config(), step=1)
    groups = [[t["group_id"] for t in p.tags] for p in parts]
    assert all(len(set(g)) == 2 and len(g) == 6 for g in groups)
    assert sorted(g for group in groups for g in group) == sorted(t["group_id"] for t in batch.tags)
    assert [p.sample_ids for p in mini_batches(batch, config(), step=1)] == [p.sample_ids for p in parts]
    orders = {tuple(p.sample_ids[0] for p in mini_batches(batch, config(), step=step)) for step in range(8)}
    assert len(orders) > 1


def test_resuming_goes_on_after_the_step():
    job = FakeJob(config("steps=5"))
    records = list(run_sync(job.parts(), config("steps=5"), [], start_step=3))
    assert [r.step for r in records] == [3, 4, 5]
    assert job.calls[0] == "sync 4"
