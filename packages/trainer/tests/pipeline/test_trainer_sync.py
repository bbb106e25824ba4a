import gc
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packages.trainer.tests.support.stand_ins import FakeJob

import rl_tq
from rl_engine.types import OptimizerConfig
from rl_tq.types import BatchMeta
from rl_trainer.algorithms.kl_controller import AdaptiveKl
from rl_trainer.config import load_config
from rl_trainer.config.schema import AlgorithmConfig
from rl_trainer.errors import PlanError, StaleWeightsError
from rl_trainer.loop import mini_batches, run_loop
from rl_trainer.pipeline.roles import actor_config, critic_config
from rl_trainer.workers.engine_worker import AdvantageReport, UpdateReport


def config(*overrides):
    sizes = ["batch.batch_size=4", "batch.mini_batch_size=2", "batch.group_size=3", "steps=2", "eval_every=0"]
    sizes += ["algorithm.old_logprobs=recompute", "algorithm.kl_coef=0.001"]
    return load_config("quickstart", [*sizes, *overrides])


@pytest.mark.promise("A step reads as the README shows it, in this order")
def test_the_order_of_a_step():
    job = FakeJob(config())
    records = list(run_loop(job.components(), config(), [{}] * 5))
    step = ["old_logprobs", "ref_logprobs", "advantage", "update 6", "update 6"]
    assert job.calls == [
        *("sync 1", "evaluate 5"),
        *("generate 1", *step, "sync 2", "clear 12"),
        *("generate 2", *step, "sync 3", "clear 12", "evaluate 5"),
    ]
    assert [r.step for r in records] == [0, 1, 2]
    assert [r.accuracy for r in records] == [0.5, None, 0.5]
    assert records[1].reward == 0.5
    assert records[1].num_tokens == 4 * 12


class Samples:
    """Writes a step only while the policy learns from it."""

    def __init__(self, job):
        self.begun, self.ended, self.written = threading.Event(), threading.Event(), []
        self._update, job.update_actor = job.update_actor, self.update

    def update(self, batch):
        assert self.begun.wait(10), "writing begins before the updates"
        report = self._update(batch)
        self.ended.set()
        return report

    def write(self, batch, step):
        self.begun.set()
        assert self.ended.wait(10), "the updates do not wait for it"
        self.written.append((step, len(batch)))


def test_samples_are_written_before_their_rows_are_freed():
    job = FakeJob(config("steps=1"))
    samples = Samples(job)
    finish = job.finish
    job.finish = lambda generated, step: (samples.written.append("freed"), finish(generated, step))
    list(run_loop(replace(job.components(), samples=samples), config("steps=1"), []))
    assert samples.written == [(1, 12), "freed"]


def test_samples_that_cannot_be_written_end_the_run():
    job = FakeJob(config())
    full = SimpleNamespace(write=lambda batch, step: Path("/dev/full").write_text("x"))
    with pytest.raises(OSError, match="No space left"):
        list(run_loop(replace(job.components(), samples=full), config(), []))


def test_what_is_not_needed_is_not_computed():
    wanted = config("algorithm.kl_coef=0", "algorithm.old_logprobs=rollout")
    job = FakeJob(wanted)
    list(run_loop(job.components(), wanted, []))
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
def test_with_one_mini_batch_old_log_probs_skip_their_pass(overrides, has_pass):
    """Unless some component reads them."""
    wanted = config("batch.mini_batch_size=4", *overrides)
    job = FakeJob(wanted)
    list(run_loop(job.components(), wanted, []))
    assert ("old_logprobs" in job.calls) is has_pass


@pytest.mark.process
def test_existing_objects_are_left_out_of_gc_during_the_loop():
    """The garbage collector walks them again once the loop has ended."""
    records = run_loop(FakeJob(config()).components(), config(), [])
    before = gc.get_freeze_count()
    next(records)
    assert gc.get_freeze_count() > before
    records.close()
    assert gc.get_freeze_count() == 0


class Critic:
    """Learns at once, with numbers of its own."""

    def compute_values(self, batch):
        return BatchMeta(partition=batch.partition, sample_ids=batch.sample_ids, columns=("values",))

    def update_critic(self, batch):
        return UpdateReport(metrics={"loss": 9.0, "value_loss": 9.0}, grad_norm=7.0, lr=5.0)


def test_what_the_critic_did_is_not_told_as_the_policy_s():
    wanted = config("algorithm.advantage=gae", "critic.warmup_steps=1")
    components = replace(FakeJob(wanted).components(), critic=Critic())
    _, alone, both = [record.metrics for record in run_loop(components, wanted, [])]
    assert (alone["value_loss"], alone["critic_grad_norm"]) == (both["value_loss"], both["critic_grad_norm"]) == (9, 7)
    assert not {"loss", "grad_norm", "lr"} & alone.keys()
    assert (both["grad_norm"], both["lr"]) == (1.0, 1e-3)
    assert "loss" not in both  # the fake actor gives none


def test_everything_beside_the_policy_has_its_turn():
    """In the order in which each can read what those before it wrote."""
    wanted = config("algorithm.advantage=prime", "critic.lr=1e-2", "batch.mini_batch_size=4", "steps=1")
    job, told = FakeJob(wanted), []

    class Beside:
        def __getattr__(self, name):
            def call(rows, *rest):
                told.append((name, *rest))
                if name in {"write", "follow"}:
                    return None
                if name == "update_critic":
                    return UpdateReport(metrics={"loss": 9.0, "process_loss": 8.0}, grad_norm=7.0, lr=5.0)
                return BatchMeta(partition="train", sample_ids=rows.sample_ids, columns=(name,))

            return call

    beside = Beside()
    compute_advantage, job.compute_advantage = job.compute_advantage, lambda *a: told.append("adv") or compute_advantage(*a)  # fmt: skip  # noqa: E501
    update_actor, job.update_actor = job.update_actor, lambda *a: told.append("actor") or update_actor(*a)
    everything = {"teacher": beside, "critic": beside, "samples": beside, "ema_reference": beside}
    *_, record = run_loop(replace(job.components(), **everything), wanted, [])
    assert told == [
        ("compute_teacher_log_prob",), ("compute_values",), "adv", ("write", 1), ("update_critic",), "actor",
        ("follow",),
    ]  # fmt: skip
    assert (record.metrics["process_loss"], record.metrics["critic_grad_norm"]) == (8, 7)
    assert "loss" not in record.metrics


def test_the_weight_of_the_kl_is_told_as_it_was_used(monkeypatch):
    wanted = config("algorithm.kl_in_reward=true", "algorithm.kl_target=0.1", "steps=2")
    job, used = FakeJob(wanted), []

    def compute_advantage(batch, kl_coef, seed):
        used.append(kl_coef)
        return AdvantageReport(
            batch=BatchMeta(partition="train", sample_ids=batch.sample_ids, columns=("advantages",)), reward_kl=1.0
        )

    monkeypatch.setattr(job, "compute_advantage", compute_advantage)
    components = replace(job.components(), kl=AdaptiveKl(coef=0.5, target=0.1))
    told = [record.metrics.get("kl_coef") for record in run_loop(components, wanted, [])][1:]
    assert told == used == pytest.approx([0.5, 0.51])


def test_only_the_policy_trains_its_layer_for_mtp():
    shaped = config("algorithm.advantage=gae", "critic.warmup_steps=1", "engine.mtp=train")
    assert actor_config(shaped, Path("model")).trains_mtp
    assert critic_config(shaped, shaped.critic, Path("model")).mtp == "freeze"


def test_a_policy_waiting_for_its_critic_ends_with_the_run():
    shaped = config("algorithm.advantage=gae", "critic.warmup_steps=2", "engine.lr_schedule=cosine", "steps=6")
    assert actor_config(shaped, Path("model")).optimizer.total_steps == 4 * 2  # two mini-batches each
    assert critic_config(shaped, shaped.critic, Path("model")).optimizer.total_steps == 6 * 2
    assert actor_config(config("engine.lr_schedule=cosine"), Path("model")).optimizer.total_steps == 2 * 2
    with pytest.raises(PlanError, match=r"min_lr_ratio=0.1 does nothing with engine.lr_schedule=constant"):
        config("engine.lr_schedule=constant", "engine.min_lr_ratio=0.1")


def test_the_first_rates_of_a_warm_up_are_told_as_they_are(engine_worker):
    row = {"prompt_token_ids": [torch.tensor([1])], "completion_token_ids": [torch.tensor([2, 3])]}
    row |= {name: [torch.zeros(2)] for name in ("advantages", "rollout_logprobs")} | {"loss_mask": [torch.ones(2)]}
    with rl_tq.serve("inproc://") as queue:
        algorithm = AlgorithmConfig(old_logprobs="rollout")
        worker = engine_worker(queue.address, algorithm, OptimizerConfig(lr=0.4, warmup_steps=4))
        tags = [{"num_tokens": 2, "weight_version_min": 0, "finish_reason": "stop"}]
        rates = [worker.update_actor(queue.put(row, partition="train", tags=tags)).lr for _ in range(3)]
    assert rates == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.promise("`sync` learns from tokens of the current weights, or the run stops")
def test_stale_tokens_stop_the_run_before_learning_from_them():
    job = FakeJob(config(), lag=1)
    with pytest.raises(
        StaleWeightsError,
        match="sample 1-0 has tokens of weight versions 0 to 0; weights of version 1 may learn from 1 to 1",
    ):
        list(run_loop(job.components(), config(), []))
    assert not any(call.startswith("update") for call in job.calls)


@pytest.mark.process
def test_mini_batches_hold_whole_groups_in_a_seeded_order():
    batch = FakeJob(config()).take(1).batch
    components = mini_batches(batch, config(), step=1)
    groups = [[t["group_id"] for t in p.tags] for p in components]
    assert all(len(set(g)) == 2 and len(g) == 6 for g in groups)
    assert sorted(g for group in groups for g in group) == sorted(t["group_id"] for t in batch.tags)
    assert [p.sample_ids for p in mini_batches(batch, config(), step=1)] == [p.sample_ids for p in components]
    orders = {tuple(p.sample_ids[0] for p in mini_batches(batch, config(), step=step)) for step in range(8)}
    assert len(orders) > 1


def test_resuming_goes_on_after_the_step():
    job = FakeJob(config("steps=5"))
    records = list(run_loop(job.components(), config("steps=5"), [], start_step=3))
    assert [r.step for r in records] == [3, 4, 5]
    assert job.calls[0] == "sync 4"
