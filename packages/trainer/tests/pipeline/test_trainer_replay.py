"""Groups that are learned from again: which, how often, how old, and across a resume."""

import json
from dataclasses import replace

import pytest
import torch
from packages.trainer.tests.support.stand_ins import FakeAgents, QueueJob
from rich.console import Console

import rl_tq
from rl_trainer.config import load_config
from rl_trainer.config.schema import ReplaySection
from rl_trainer.data import PromptOrder
from rl_trainer.errors import PlanError
from rl_trainer.loop import run_loop
from rl_trainer.metrics import HeldGroup
from rl_trainer.pipeline.replay_buffer import PARTITION, Replay
from rl_trainer.planning.plan import make_plan
from rl_trainer.run import run
from rl_trainer.runtime.base import WorkerContext
from rl_trainer.workers.queue import QueueWorker

ALONE = WorkerContext(rank=0, world_size=1)
REPLAY = ["batch.replay.share=0.5", "batch.replay.max_age=2"]


def config(*overrides):
    sizes = ["batch.batch_size=4", "batch.mini_batch_size=2", "batch.group_size=2", "steps=4", "eval_every=0"]
    return load_config("quickstart", [*sizes, *REPLAY, *overrides])


@pytest.fixture
def queue():
    worker = QueueWorker(ALONE, storage="inproc", name="replay")
    yield worker
    worker.close()


def replay_of(queue, **section):
    client = rl_tq.connect(queue.address(), timeout_s=10)
    section = ReplaySection(**{"share": 0.5, "max_age": 2, **section})
    return Replay(section, batch_size=4, seed=0, queue=client, copy=queue.copy), client


def put(client, rewards, *, version, newest=None):
    """Groups of two rows with these rewards, by id, in the queue: their rows, and what is known of them.

    Tokens of the first row are of `version`, of the second of `newest`.
    """
    tags = [
        {"group_id": group, "reward": reward, "attempt": 0, "num_tokens": 1, "finish_reason": "stop"}
        | {"weight_version_min": age, "weight_version_max": age}
        for group, pair in rewards.items()
        for reward, age in zip(pair, (version, newest or version), strict=True)
    ]
    rewards_column = [torch.tensor([tag["reward"]]) for tag in tags]
    columns = {"rewards": rewards_column, "group_id": torch.tensor([tag["group_id"] for tag in tags])}
    groups = tuple(HeldGroup(group_id=g, row_index=10 * g, place=g, released=version) for g in rewards)
    return client.put(columns, partition="train", tags=tags), groups


def test_what_is_kept_is_what_has_signal_until_it_is_too_old(queue):
    replay, client = replay_of(queue)
    replay.restore({})
    assert replay.group_ids == []
    assert replay.draw(1) == []
    replay.keep(*put(client, {1: (0.0, 1.0), 2: (1.0, 1.0), 3: (1.0, 0.0)}, version=1), version=2)
    client.clear("train")  # as the pipeline does
    assert [used.group.group_id for used in replay.draw(2)] == [1, 3]  # the second has nothing to teach
    rows = replay.rows_of(replay.draw(2), "train")
    assert [tag["reward"] for tag in rows[0].tags] == [0.0, 1.0]
    again = client.put({"advantages": torch.tensor([1.0, 2.0])}, partition="train", sample_ids=rows[0])
    assert client.get(rows[0].union(again))["rewards"].values().tolist() == [0.0, 1.0]
    replay.keep(*put(client, {4: (0.0, 1.0)}, version=2), version=3)
    assert replay.state()["groups"] == [(1, 10, 1, 1, 0), (3, 30, 3, 1, 0), (4, 40, 4, 2, 0)]
    replay.keep(*put(client, {5: (0.0, 1.0)}, version=3), version=4)
    # To weights 4 the tokens of 1 and 3 are three versions old, those of 4 are two.
    assert [group[0] for group in replay.state()["groups"]] == [4, 5]
    assert client.stats()["partitions"][PARTITION]["rows"] == 4


def test_a_group_is_as_old_as_its_oldest_token(queue):
    replay, client = replay_of(queue)
    replay.keep(*put(client, {1: (0.0, 1.0)}, version=1, newest=3), version=3)
    assert [used.oldest for used in replay.draw(3)] == [1]
    replay.keep(*put(client, {2: (0.0, 1.0)}, version=4), version=4)
    assert [group[0] for group in replay.state()["groups"]] == [2]


def test_a_history_outlives_its_process_and_draws_are_the_same(queue, tmp_path):
    replay, client = replay_of(queue, max_age=20)
    replay.keep(*put(client, dict.fromkeys(range(1, 9), (0.0, 1.0)), version=1), version=2)
    client.snapshot(tmp_path / "queue")
    drawn = [used.group for used in replay.draw(2)]
    assert len(drawn) == 2
    assert {tuple(used.group for used in replay.draw(step)) for step in range(2, 12)} != {tuple(drawn)}
    other = QueueWorker(ALONE, storage="inproc", name="other", snapshot=str(tmp_path / "queue"))
    resumed, behind = replay_of(other, max_age=20)
    resumed.restore(json.loads(json.dumps(replay.state())))
    assert max(resumed.group_ids) == 8
    assert resumed.drawn == replay.drawn != [], "a batch that was made ahead is completed with the same groups"
    assert [used.group for used in resumed.draw(2)] == [used.group for used in replay.draw(2)] == drawn
    values = [behind.get(rows)["rewards"].values().tolist() for rows in resumed.rows_of(resumed.draw(2), "train")]
    assert values == [[0.0, 1.0]] * 2
    assert resumed.state() == replay.state()
    other.close()


class Job(QueueJob):
    """Its rows that are learned from again are copies in the queue, and every step writes to its rows."""

    def __init__(self, settings, queue):
        section = settings.batch.replay
        client = rl_tq.connect(queue.address(), timeout_s=10)
        self.replay = Replay(section, batch_size=4, seed=0, queue=client, copy=queue.copy)
        super().__init__(settings, FakeAgents(settings, client, per_poll=4), replay=self.replay)

    def components(self):
        return replace(super().components(), replay=self.replay)

    def compute_advantage(self, batch, *args):
        report = super().compute_advantage(batch, *args)
        self.agents.queue.put({"advantages": torch.zeros(len(batch))}, partition="train", sample_ids=batch)
        return replace(report, batch=batch)


def test_a_step_generates_what_it_does_not_replay(queue):
    settings = config()
    job = Job(settings, queue)
    records = list(run_loop(job.components(), settings, [{}]))
    assert [r.metrics["replayed_groups"] for r in records[1:]] == [0, 2, 2, 2]
    assert [len(r.rows) for r in records[1:]] == [4, 2, 2, 2], "a prompt counts for the step that generated it"
    assert sorted(row for r in records for row in r.rows) == sorted(PromptOrder(num_rows=1000, seed=0).take(10))
    assert records[2].metrics["staleness_1"] == 0.5
    assert [r.num_tokens for r in records[1:]] == [32, 16, 16, 16], "and so do its tokens, of which a row has four here"
    assert [c for c in job.calls if c.startswith("update")] == ["update 4"] * 8
    assert job.agents.queue.stats()["partitions"]["train"]["rows"] == 0


def test_one_step_off_draws_rows_that_are_fresh_at_their_turn(queue):
    settings = config("pipeline=one_step_off", "batch.replay.max_age=3", "steps=6")
    records = list(run_loop(Job(settings, queue).components(), settings, [{}]))[1:]
    # The batch of step s + 2 is drawn when that of s is in the history: of step 1's for 3 and 4, of step 2's for 4 ...
    assert [r.metrics["replayed_groups"] for r in records] == [0, 0, 2, 2, 2, 2]
    assert [len(r.rows) for r in records] == [4, 4, 2, 2, 2, 2]
    assert [r.metrics["staleness_max"] for r in records] == [0, 1, 2, 3, 3, 3]
    rows = [row for r in records for row in r.rows]
    assert len(rows) == len(set(rows)) == 16, "a prompt counts for the step that generated it"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["pipeline=fully_async"], "pipeline=fully_async releases groups ahead by a fixed number per step"),
        (["pipeline=one_step_off"], "max_age=2 does nothing with pipeline=one_step_off: .* give 3 or more"),
        (["algorithm.old_logprobs=recompute"], "batch.replay learns from tokens of older weights"),
        (["batch.replay.share=0.2"], "share=0.2 of batch.batch_size=4 groups is less than one"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(overrides, words):
    with pytest.raises(PlanError, match=words):
        make_plan(config(*overrides))


@pytest.mark.promise("Replay: a resumed run has the same losses")
@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["sync", "one_step_off"])
def test_a_run_that_replays_resumes_with_the_same_losses(model, tmp_path, pipeline):
    """Real components; every prompt is generated once, and the history is there after the resume."""
    sizes = ["data.options.num_rows=200", "data.eval_size=4", "rollout.max_new_tokens=5"]
    learning = [
        "algorithm.entropy_coef=0.1",
        "engine.optimizer.lr=1e-2",
        "engine.optimizer.warmup_steps=0",
        "timeout_s=120",
    ]
    reward = tmp_path / "rewards.py"
    reward.write_text("def f(text, row):\n    return sum(map(ord, text)) % 7 / 7\n")
    common = [
        *sizes,
        *learning,
        f"reward.path={reward}:f",
        f"model.path={model}",
        f"pipeline={pipeline}",
        "save_every=2",
    ]
    common += ["runtime=inline"] if pipeline == "sync" else ["batch.replay.max_age=3", "steps=6"]

    def losses(name, *overrides):
        out = tmp_path / name
        run(config(*common, f"output_dir={out}", *overrides), Console(quiet=True))
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return {r["step"]: (r["metrics"]["policy_loss"], r["metrics"]["replayed_groups"]) for r in records[1:]}

    whole = losses("whole")
    counts, num_without = [count for _, count in whole.values()], 1 if pipeline == "sync" else 2
    assert counts[:num_without] == [0] * num_without
    assert all(0 < count <= 2 for count in counts[num_without:]), (
        "fewer than two only where rewards happened to be equal"
    )
    for step in range(2, len(whole), 2):
        resumed = losses(f"resumed {step}", f"resume_from={tmp_path}/whole/checkpoint-{step}")
        assert resumed == {later: whole[later] for later in range(step + 1, len(whole) + 1)}
    lines = (tmp_path / "whole" / "prompts.jsonl").read_text().splitlines()
    rows = [row for line in lines for row in json.loads(line)["rows"]]
    assert len(rows) == len(set(rows)) == sum(4 - count for count in counts)
