"""More groups are begun than are needed: the last are stopped, and their prompts are not lost."""

import asyncio
import json
import threading
import time

import pytest
from packages.trainer.tests.support.stand_ins import FakeAgents
from rich.console import Console

import rl_agent
import rl_agent.errors
from rl_agent.types import AgentLoopOutput
from rl_bench.waiting import until
from rl_trainer.config import load_config
from rl_trainer.data import PromptOrder
from rl_trainer.errors import PlanError, RolloutFailedError, WorkerTimeoutError
from rl_trainer.metrics import HeldGroup
from rl_trainer.pipeline.replicas import AgentReplicas
from rl_trainer.pipeline.rollout_source import RolloutSource
from rl_trainer.pipeline.staleness import create_schedule
from rl_trainer.planning.plan import make_plan
from rl_trainer.rewards import Score
from rl_trainer.run import run
from rl_trainer.samples import read_samples
from rl_trainer.workers.agent import Job
from rl_trainer.workers.loop_thread import LoopThread

SIZES = ["batch.batch_size=4", "batch.mini_batch_size=4", "batch.group_size=2", "batch.over_sampling=0.5"]


def source(*overrides, **agents):
    config = load_config("quickstart", [*SIZES, *overrides])
    fake = FakeAgents(config, **agents)
    order, policy = PromptOrder(num_rows=100, seed=0), create_schedule(config).policy
    return fake, RolloutSource(fake, [{}] * 100, order, fake.queue, config, policy, poll_s=0.0)


def step(made, number):
    made.release(number)
    generated = made.take(number)
    made.finish(generated, number)
    return generated


def rows_of(generated):
    return [group.row_index for group in generated.groups]


@pytest.mark.promise("Over-sampling leaves out no prompt because its completions are long")
def test_the_slowest_are_stopped_and_come_first_in_the_next_step():
    agents, made = source(slow=[2, 8])
    drawn = PromptOrder(num_rows=100, seed=0).take(12)
    first = step(made, 1)
    assert (len(first.batch), first.stopped_groups) == (8, 2)
    assert drawn[1] not in rows_of(first)
    left = [row for row in drawn[:6] if row not in rows_of(first)]
    assert sorted([*made.pending, *(group.row_index for group in made.held)]) == sorted(left)
    assert agents.is_held, "nothing is generated while the weights change"
    second = step(made, 2)
    assert len(agents.submitted) == 10, "four more; those that are left go on, and are submitted once"
    assert set(left) <= set(rows_of(second)), "the second group is slow, and was waited for all the same"
    assert not set(rows_of(first)) & set(rows_of(second))
    assert min(tags["weight_version_min"] for tags in second.batch.tags) == 0, "what began at the first weights"


def test_an_evaluation_between_two_steps_is_answered():
    agents, made = source(slow=[2])
    step(made, 1)
    made.evaluate([{}])
    assert not agents.is_held
    assert len(step(made, 2).groups) == 4


def test_tokens_may_be_a_version_older_per_batch_of_extras():
    for share, oldest in (("0", 0), ("0.5", 1), ("1", 1), ("1.5", 2)):
        config = load_config("quickstart", [*SIZES, f"batch.over_sampling={share}"])
        assert create_schedule(config).bound_at(3).most == oldest


def test_old_log_probs_that_are_computed_anew_are_refused():
    with pytest.raises(PlanError, match="batch.over_sampling learns from tokens of older weights"):
        make_plan(load_config("quickstart", [*SIZES, "algorithm.old_logprobs=recompute"]))


def test_unusable_groups_fall_short_and_are_not_returned():
    agents, made = source(fails=[1], per_poll=6)
    first = step(made, 1)
    assert len(first.batch) == 8
    assert first.failures == {"tool": 1}
    assert first.stopped_groups == 1  # six were begun, all ended at the same time: one failed, four were taken
    failed = agents.submitted[0][0].row_index
    assert failed not in made.order.state_dict()["returned"]


def test_a_deadline_says_how_far_it_came():
    _, made = source("timeout_s=0.05", "batch.max_refills=0", per_poll=0)
    with pytest.raises(
        RolloutFailedError,
        match="0 of 6 groups that were released are complete, 4 are needed; .*timeout_s=0.05; the queue: .*partition",
    ):
        step(made, 1)


def test_it_is_refused_where_it_would_do_nothing():
    with pytest.raises(PlanError, match="over_sampling=0.5 does nothing with pipeline=fully_async"):
        make_plan(load_config("quickstart", [*SIZES, "pipeline=fully_async"]))


class Scorer:
    step = 0

    async def start(self):
        pass

    async def close(self):
        pass

    async def values(self, completion, row):
        return {"": 1.0}

    async def scores(self, completions, values, row):
        return [Score(reward=value[""]) for value in values]


class Raising(rl_agent.AgentLoop):
    async def run(self, sampling_params, row):
        raise KeyError("no such page")


class Rows:
    """A queue that notes the tags of what is put."""

    def __init__(self):
        self.tags = []

    def put(self, columns, partition, tags, credit):
        self.columns = columns
        self.tags += tags

    def close(self):
        pass


@pytest.fixture
def ended():
    """Waits for so many failed groups; their report."""

    def wait(worker, num_groups):
        reports = []

        def have_failed():
            reports.extend(report for report in worker.poll() if report.failed)
            return sum(len(report.failed) for report in reports) == num_groups

        until(have_failed)
        return reports[-1]

    return wait


@pytest.mark.process
def test_a_failure_names_its_row(agent_worker, ended):
    worker = agent_worker(Rows(), Raising, Scorer())
    row, where = {"data_source": "x"}, "train.jsonl, row 7"
    jobs = [Job(row=row, row_index=0, group_id=5, place=0, where=where)]
    worker.submit(jobs, {}, "train", 2)
    wanted = "train.jsonl, row 7: KeyError: 'no such page'"
    report = ended(worker, 1)
    assert (report.failed, report.last_failure) == ((5,), wanted)
    (held_out,) = worker.evaluate(jobs, {})
    assert (held_out.num_failed, held_out.last_failure) == (1, wanted)
    worker.close()


def test_slow_worker_calls_are_named_and_cancelled():
    """The worker's own errors keep their type."""
    loop, cancelled = LoopThread("test"), threading.Event()

    async def ask_a_server():
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def fail():
        raise TimeoutError("the server's own")

    with pytest.raises(
        WorkerTimeoutError, match=r"ask_a_server of the test worker did not end within timeout_s=0.05 s"
    ):
        loop.run(ask_a_server(), 0.05)
    assert cancelled.wait(10)
    with pytest.raises(TimeoutError, match="the server's own"):
        loop.run(fail(), 10)
    loop.close()


class Greedy(rl_agent.AgentLoop):
    """Is worth what its row says, at temperature 0 what that says; breaks where that is None."""

    async def run(self, sampling_params, row):
        reward = row["greedy"] if sampling_params["temperature"] == 0 else row["worth"]
        if reward is None:
            raise rl_agent.errors.RowError("nothing is known of it")
        one = {"prompt_token_ids": (1,), "completion_token_ids": (2,), "loss_mask": (1,), "rollout_logprobs": (-1.0,)}
        return AgentLoopOutput(**one, weight_versions=(1,), finish_reason="stop", text="", reward=reward)


class Own(Scorer):
    async def values(self, completion, row):
        return {"": completion.loop_reward}


def test_a_group_has_its_greedy_reward_and_fails_with_it(agent_worker, ended):
    queue = Rows()
    worker = agent_worker(queue, Greedy, Own(), has_baseline=True)
    rows = [{"worth": 1.0, "greedy": 0.25}, {"worth": 1.0, "greedy": None}, {"worth": None, "greedy": 0.5}]
    jobs = [Job(row={**r, "data_source": "x"}, row_index=n, group_id=7 + n, place=n) for n, r in enumerate(rows)]
    worker.submit(jobs, {"temperature": 1.0}, "train", 2)
    report = ended(worker, 2)
    until(lambda: queue.tags)
    assert [(tag["group_id"], tag["reward"]) for tag in queue.tags] == [(7, 1.0), (7, 1.0)]
    assert queue.columns["greedy_rewards"].tolist() == [0.25, 0.25]
    assert set(report.failed) <= {8, 9}
    assert "nothing is known of it" in report.last_failure
    worker.close()


@pytest.mark.process
def test_a_real_job_learns_from_every_prompt_once(model, tmp_path, monkeypatch):
    hold = AgentReplicas.hold
    monkeypatch.setattr(AgentReplicas, "hold", lambda agents: (threading.Event().wait(0.1), hold(agents)))
    settings = ["runtime=inline", "steps=3", "eval_every=0", "data.eval_size=4", "timeout_s=120"]
    settings += [f"model.path={model}", f"output_dir={tmp_path / 'out'}", *SIZES, "batch.over_sampling=1"]
    settings += ["rollout.max_num_seqs=3", "rollout.max_new_tokens=200", "rollout.max_model_len=256"]
    start = time.monotonic()
    run(load_config("quickstart", settings), Console(quiet=True))
    assert time.monotonic() - start < 120, "nothing waited for a deadline"
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()][1:]
    assert [r["metrics"]["stopped_groups"] for r in records] == [4, 4, 4]
    ages = [r["metrics"]["staleness_max"] for r in records]
    assert (ages[0], max(ages)) == (0, 1), "completions that were stopped go on under the next weights"
    steps = [json.loads(line)["rows"] for line in (tmp_path / "out" / "prompts.jsonl").read_text().splitlines()]
    rows = [row for step in steps for row in step]
    assert len(rows) == len(set(rows)) == 12
    state = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())
    left = {*state["pending"], *(HeldGroup(*group).row_index for group in state["held"])}
    assert len(left) == 4
    assert not left & set(rows)
    file = tmp_path / "out" / "checkpoint-3" / "stopped.json"
    stopped = json.loads(file.read_text()) if state["pending"] else []  # a quick machine may have ended them all
    assert file.is_file() == bool(state["pending"])
    assert {version for each in stopped for version in each["weight_versions"]} <= {1, 2, 3}
    resume = [
        "steps=4",
        "tracking.keep_samples=true",
        f"resume_from={tmp_path / 'out' / 'checkpoint-3'}",
        f"output_dir={tmp_path / 'next'}",
    ]
    run(load_config("quickstart", [*settings, *resume]), Console(quiet=True))
    assert left == set(json.loads((tmp_path / "next" / "prompts.jsonl").read_text().splitlines()[-1])["rows"])
    rows = read_samples(tmp_path / "next", steps=[4]).to_pylist()
    made = [(row["completion_token_ids"], row["weight_version_min"], row["rollout_logprobs"]) for row in rows]
    for each in (each for each in stopped if each["token_ids"]):  # token by token as it was, also those that had ended
        ids, oldest, num = each["token_ids"], min(each["weight_versions"]), len(each["token_ids"])
        known = [logprobs[:num] for i, version, logprobs in made if (i[:num], version) == (ids, oldest)]
        assert any(logprobs == pytest.approx(each["logprobs"], abs=1e-6) for logprobs in known), each


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "keys", "oldest"),
    [
        ("quickstart", ["runtime=ray", "pipeline=one_step_off"], 2),
        ("quickstart", ["runtime=ray", "rollout.colocated=true"], 1),
        ("tool_calculator", ["runtime=inline", "rollout.max_new_tokens=24"], 1),
    ],
    ids=["one_step_off", "colocated", "turns"],
)
def test_stopped_completions_go_on_in_every_schedule(tmp_path, recipe, keys, oldest):
    """On Ray with a batch ahead, on shared memory that servers leave in between, and between the turns of a loop."""
    settings = ["steps=3", "eval_every=0", "data.eval_size=4", "data.options.num_rows=200", "timeout_s=300"]
    settings += ["model.warmup.steps=4", f"output_dir={tmp_path / 'out'}", *SIZES, "batch.over_sampling=1", *keys]
    run(load_config(recipe, settings), Console(quiet=True))
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()][1:]
    assert [record["failures"] for record in records] == [{}] * 3
    assert all(record["metrics"]["stopped_groups"] for record in records)
    ages = [record["metrics"]["staleness_max"] for record in records]
    assert 1 <= max(ages) <= oldest
    assert all(record["metrics"]["grad_norm"] >= 0 for record in records)
    steps = [json.loads(line)["rows"] for line in (tmp_path / "out" / "prompts.jsonl").read_text().splitlines()]
    rows = [row for step in steps for row in step]
    assert len(rows) == len(set(rows)) == 12
