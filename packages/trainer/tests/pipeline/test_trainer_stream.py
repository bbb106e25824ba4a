"""Streaming: a mini-batch is learned from when its groups are complete, not when the step's last rollout is."""

import json

import pytest
from packages.trainer.tests.support.stand_ins import FakeAgents, QueueJob
from rich.console import Console

from rl_trainer.config import load_config
from rl_trainer.errors import PlanError
from rl_trainer.loop import run_loop
from rl_trainer.planning.plan import make_plan
from rl_trainer.run import run


def config(*overrides):
    sizes = ["batch.batch_size=4", "batch.mini_batch_size=2", "batch.group_size=2", "steps=3", "eval_every=0"]
    return load_config("quickstart", [*sizes, "batch.stream=true", *overrides])


class Job(QueueJob):
    """Notes which groups each update and each score is of, and how many of the step's were still being generated."""

    def __init__(self, settings, **agents):
        super().__init__(settings, FakeAgents(settings, **agents))
        self.updates, self.scores = [], []

    def compute_log_prob(self, batch, column="old_logprobs"):
        self.scores.append(({tags["group_id"] for tags in batch.tags}, len(self.source.pending), len(self.updates)))
        return super().compute_log_prob(batch, column)

    def update_actor(self, batch):
        self.updates.append(({tags["group_id"] for tags in batch.tags}, len(self.source.pending)))
        return super().update_actor(batch)


def test_updates_wait_for_their_groups_and_learn_each_once():
    job = Job(config(), slow=[1, 6])
    records = list(run_loop(job.components(), config(), [{}]))[1:]
    learned = [groups for groups, _ in job.updates]
    assert [len(groups) for groups in learned] == [2] * 6
    assert [set().union(*learned[at : at + 2]) for at in (0, 2, 4)] == [{1, 2, 3, 4}, {5, 6, 7, 8}, {9, 10, 11, 12}]
    assert 1 in learned[1]
    assert 6 in learned[3]
    assert max(num_pending for _, num_pending in job.updates[::2]) > 0, "nothing was generated during an update"
    assert [r.metrics["staleness_max"] for r in records] == [0, 0, 0]
    assert [len(r.rows) for r in records] == [4, 4, 4]
    assert [r.num_tokens for r in records] == [4 * 2 * 4] * 3
    assert job.agents.queue.stats()["partitions"]["train"]["rows"] == 0


def test_updates_are_scored_before_them_while_others_generate():
    settings = config("algorithm.old_logprobs=recompute")
    job = Job(settings, slow=[1, 6])
    records = list(run_loop(job.components(), settings, [{}]))[1:]
    assert [len(groups) for groups, _, _ in job.scores] == [2] * 6
    assert [num_updates for _, _, num_updates in job.scores] == [0, 0, 2, 2, 4, 4], "an update came between scores"
    assert max(num_pending for _, num_pending, _ in job.scores[::2]) > 0, "nothing was generated while it scored"
    learned = [groups for groups, _ in job.updates]
    assert [set().union(*learned[at : at + 2]) for at in (0, 2, 4)] == [{1, 2, 3, 4}, {5, 6, 7, 8}, {9, 10, 11, 12}]
    assert [len(r.rows) for r in records] == [4, 4, 4]
    assert job.agents.queue.stats()["partitions"]["train"]["rows"] == 0


@pytest.mark.process
def test_the_plan_reports_when_streamed_mini_batches_are_used():
    def said(*overrides):
        return dict(make_plan(config(*overrides)).lines(config(*overrides)))["mini-batches as they come"]

    assert said() == "scored and learned from"
    assert said("algorithm.old_logprobs=recompute") == (
        "scored; learned from once all are (algorithm.old_logprobs=recompute)"
    )
    assert "its own teacher" in said("algorithm.loss=distill", "teacher.context=The answer is {ground_truth}")
    assert "mini-batches as they come" not in dict(
        make_plan(config("batch.stream=false")).lines(config("batch.stream=false"))
    )


def test_a_failed_group_is_replaced_within_its_step():
    job = Job(config("batch.max_refills=5"), fails=[2, 5])
    records = list(run_loop(job.components(), config("batch.max_refills=5"), [{}]))[1:]
    assert sum(r.failures.get("tool", 0) for r in records) == 2
    assert sum(len(r.rows) for r in records) == 12


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["pipeline=one_step_off"], "which generates ahead"),
        (["batch.mini_batch_size=4"], "which is the whole batch: make it smaller"),
        (
            ["algorithm.advantage=reinforce_pp"],
            "reinforce_pp, which learns from whole batches, where nothing is scored",
        ),
        (["batch.over_sampling=0.5"], "batch.over_sampling"),
        (["rollout.colocated=true"], "rollout.colocated=true"),
    ],
)
def test_what_would_change_the_gradients_is_refused(overrides, words):
    with pytest.raises(PlanError, match=f"batch.stream=true does not go with .*{words}"):
        make_plan(config(*overrides))


@pytest.fixture
def losses(model, tmp_path):
    """Losses of a run of real components in this process, by name and further keys."""
    reward = tmp_path / "rewards.py"
    reward.write_text("def f(text, row):\n    return sum(map(ord, text)) % 7 / 7\n")
    sizes = ["data.options.num_rows=200", "data.eval_size=4", "rollout.max_new_tokens=5", f"reward.path={reward}:f"]
    learning = ["engine.optimizer.lr=1e-2", "engine.optimizer.warmup_steps=0"]
    running = ["timeout_s=120", "runtime=inline", f"model.path={model}"]

    def run_it(name, *overrides):
        out = tmp_path / name
        run(config(*sizes, *learning, *running, f"output_dir={out}", *overrides), Console(quiet=True))
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][1:]
        names = ("policy_loss", "grad_norm", "critic_grad_norm")
        return [([r["metrics"].get(name) for name in names], r["reward"]) for r in records]

    return run_it


@pytest.mark.promise("With `batch.stream=true` the losses are those of the same mini-batches learned from at the end")
@pytest.mark.process
def test_weights_equal_learning_after_the_last_rollout(losses, monkeypatch):
    """Real components: the groups of a batch-wise run are put into the mini-batches that the streamed one made."""
    composed = {}

    import rl_trainer.loop as loop

    plain = loop.mini_batches

    def noting(batch, settings, step):
        (made,) = plain(batch, settings, step)
        composed.setdefault(step, []).append([tags["group_id"] for tags in made.tags])
        return [made]

    monkeypatch.setattr(loop, "mini_batches", noting)
    streamed = losses("streamed")

    def as_streamed(batch, settings, step):
        rows = {}
        for index, tags in enumerate(batch.tags):
            rows.setdefault(tags["group_id"], []).append(index)
        return [batch.reorder([i for g in dict.fromkeys(groups) for i in rows[g]]) for groups in composed[step]]

    monkeypatch.setattr(loop, "mini_batches", as_streamed)
    assert losses("whole", "batch.stream=false") == streamed


def check_against_a_whole_batch(losses, *algorithm):
    streamed = losses("streamed", *algorithm)
    assert any(loss for (loss, *_), _ in streamed), "the losses are all 0, and would be in any order"
    assert losses("whole", "batch.stream=false", *algorithm) == streamed


@pytest.mark.promise(
    "Where an update would change later scores, streamed losses are those of a whole batch, bit for bit"
)
@pytest.mark.process
def test_losses_with_streamed_updates_equal_a_whole_batch_s(losses):
    check_against_a_whole_batch(losses, "algorithm.old_logprobs=recompute")


@pytest.mark.slow
def test_the_losses_with_a_critic_are_those_of_a_whole_batch(losses):
    check_against_a_whole_batch(losses, "algorithm.advantage=gae", "critic.lr=1e-3")
