"""How finished groups reach the queue."""

import asyncio
import dataclasses
import threading
from types import SimpleNamespace

import pytest
import torch

import rl_agent
import rl_tq
from rl_agent.types import AgentLoopOutput
from rl_bench.waiting import until
from rl_trainer.config.schema import BatchConfig
from rl_trainer.errors import TrainerError
from rl_trainer.metrics import Evaluation
from rl_trainer.pipeline.step_record import completion_metrics, part_means, record_of
from rl_trainer.rewards import Score
from rl_trainer.workers.agent import Job, _GroupWriter
from rl_trainer.workers.columns import to_columns
from rl_trainer.workers.grading import Grading, overlong_penalty, scored
from rl_trainer.workers.loop_thread import LoopThread

NOTHING, HALF, ONE = (Score(reward=reward) for reward in (0.0, 0.5, 1.0))


def output(ids, version=1, rollout=0):
    return AgentLoopOutput(
        prompt_token_ids=(1, 2),
        completion_token_ids=tuple(ids),
        loss_mask=(1,) * len(ids),
        rollout_logprobs=(-0.5,) * len(ids),
        weight_versions=(version,) * len(ids),
        finish_reason="stop",
        text="",
        extra_fields={"rollout_index": rollout},
    )


def test_groups_become_rows_with_ids_and_a_reward_on_the_last():
    columns, tags = to_columns(
        [(7, [(output([3, 4]), ONE), (output([5], rollout=1), NOTHING)], None), (9, [(output([6, 6, 6]), HALF)], None)]
    )
    assert len(columns["prompt_token_ids"].unbind()) == 3
    assert columns["group_id"].tolist() == [7, 7, 9]
    assert columns["rollout_index"].tolist() == [0, 1, 0]
    assert [row.tolist() for row in columns["rewards"].unbind()] == [[0.0, 1.0], [0.0], [0.0, 0.0, 0.5]]
    assert [(t["group_id"], t["reward"], t["num_tokens"]) for t in tags] == [(7, 1.0, 2), (7, 0.0, 1), (9, 0.5, 3)]


def test_steps_are_columns_in_place_of_tokens():
    first, second = (
        dataclasses.replace(
            output([0] * count, rollout=count),
            completion_token_ids=(),
            columns={"latents": torch.ones(count + 1, 2, 2)},
        )
        for count in (3, 1)
    )
    columns, tags = to_columns([(7, [(first, ONE), (second, HALF)], None)])
    assert "completion_token_ids" not in columns
    assert [tuple(row.shape) for row in columns["latents"].unbind()] == [(4, 2, 2), (2, 2, 2)]
    assert [row.tolist() for row in columns["rewards"].unbind()] == [[0.0, 0.0, 1.0], [0.5]]
    assert [tag["num_tokens"] for tag in tags] == [3, 1]


def test_sampled_ids_beyond_the_tokenizer_are_counted():
    """A tool's text cannot hold one; what the policy sampled can, where the embedding is padded."""
    first, second = output([3, 9, 8]), dataclasses.replace(output([9, 4]), loss_mask=(0, 1))
    _, tags = to_columns([(7, [(first, ONE), (second, NOTHING)], None)], num_known=8)
    assert [tag.get("num_unknown", 0) for tag in tags] == [2, 0]
    assert completion_metrics(tags)["unknown_tokens"] == 2.0
    _, tags = to_columns([(7, [(first, ONE)], None)])
    assert "unknown_tokens" not in completion_metrics(tags)


def stepped(tags, *, failures=(), held_out=None):
    """The record of a step that generated completions with these tags."""
    generated = SimpleNamespace(
        reused=(), groups=(), batch=SimpleNamespace(tags=tags), dropped_groups=0, late_groups=0, stopped_groups=0,
        reward=0.5, failures=dict(failures), last_failure="row 1: x" if failures else "",
    )  # fmt: skip
    source = SimpleNamespace(position=2, pending=(), held=())
    return record_of(1, generated, source, {}, {"": [{"lr": 0.1}]}, held_out, {})


def test_the_last_tool_error_is_reported_with_type_and_row(agent_worker):
    """The rollout went on with the error's text, so that its trajectory is whole; the step's record names it."""
    errors = {"tool_error": "lookup: KeyError: 'x'"}
    broken = dataclasses.replace(output([3]), extra_fields=errors, metrics={"num_tool_error": 2.0})
    made, queued = iter([broken, output([5])]), []

    class Loop(rl_agent.AgentLoop):
        async def run(self, sampling_params, row):
            return next(made)

    class Scorer:
        step = 0

        async def start(self):
            pass

        close = start

        async def values(self, completion, row):
            return {}

        async def scores(self, completions, values, row):
            return [HALF for _ in values]

    queue = SimpleNamespace(put=lambda columns, partition, tags, credit: queued.extend(tags), close=lambda: None)
    worker = agent_worker(queue, Loop, Scorer())
    worker.submit([Job(row={}, row_index=6, group_id=7, place=0, where="train.jsonl, row 7")], {}, "train", 2)
    until(lambda: queued)
    worker.close()
    found = stepped(queued)
    assert found.last_tool_error == "train.jsonl, row 7: lookup: KeyError: 'x'"
    assert (found.metrics["tool_errors"], found.failures, found.last_failure) == (2.0, {}, "")
    assert "tool_errors" not in stepped(queued[1:]).metrics


class Plain(rl_agent.AgentLoop):
    """Answers at once."""

    async def run(self, sampling_params, row):
        return output([5])


class RowScorer:
    """Rewards that the row says, one per completion."""

    step = 0

    async def start(self):
        pass

    close = start

    async def values(self, completion, row):
        return {}

    async def scores(self, completions, values, row):
        return [dataclasses.replace(HALF, reward=reward) for reward in row["rewards"]]


def reports_of(worker, num_groups):
    """How groups ended, once so many have."""
    found = []

    def have_ended():
        found.extend(worker.poll())
        return sum(len(r.finished) + len(r.dropped) + len(r.late) + len(r.failed) for r in found) == num_groups

    until(have_ended)
    return {
        how: sorted(getattr(each, "group_id", each) for report in found for each in getattr(report, how))
        for how in ("finished", "dropped", "late", "failed")
    }


def test_a_worker_reports_how_each_group_ended(agent_worker):
    """One without signal is not put; one that is too old by now, or was given up, is late and hinders no other."""
    rewards = {1: (0.0, 1.0), 2: (1.0, 1.0), 3: (1.0, 0.0), 4: (0.0, 1.0), 5: (1.0, 0.0)}
    with rl_tq.serve("inproc://") as queue:
        policy = rl_tq.registry.create_policy("oldest_token", max_staleness=0, batch_size=8)
        queue.configure("train", staleness=policy, tasks=["train"])
        version = output([5]).weight_versions[0]
        queue.advance("train", version)
        admitted = {n: queue.admit(partition="train", num_rows=2, group_id=n) for n in rewards}
        queue.release(admitted[4])
        worker = agent_worker(queue, Plain, RowScorer(), batch=BatchConfig(dynamic_sampling=True))
        jobs = [
            Job(row={"rewards": two}, row_index=n, group_id=n, place=n, credit=admitted[n])
            for n, two in rewards.items()
        ]
        worker.submit(jobs[:4], {}, "train", 2)
        assert reports_of(worker, 4) == {"finished": [1, 3], "dropped": [2], "late": [4], "failed": []}
        assert queue.stats()["partitions"]["train"]["rows"] == 4
        queue.advance("train", version + 1)
        worker.submit(jobs[4:], {}, "train", 2)
        assert reports_of(worker, 1)["late"] == [5]
        worker.close()


def test_failures_of_an_evaluation_are_reported():
    held_out = Evaluation(reward=0.5, accuracy=None, num_failed=1, last_failure="test.jsonl, row 3: KeyError: 'x'")
    tags = to_columns([(7, [(output([3]), ONE)], None)])[1]
    found = stepped(tags, held_out=held_out)
    assert (found.failures, found.last_failure) == ({"evaluation": 1}, "test.jsonl, row 3: KeyError: 'x'")
    assert stepped(tags, failures={"loop": 1}, held_out=held_out).failures == {"loop": 1, "evaluation": 1}


@pytest.mark.process
def test_a_task_that_raises_system_exit_ends_no_worker():
    async def leave():
        raise SystemExit(3)

    async def gathering():
        await asyncio.gather(leave())

    async def fine():
        return 1

    thread = LoopThread("test")
    with pytest.raises(SystemExit):
        thread.run(gathering(), 60.0)
    assert thread.run(fine(), 60.0) == 1
    thread.close()


def test_row_weight_versions_are_its_oldest_and_newest_token_s():
    resumed = dataclasses.replace(output([3, 4, 5, 6]), loss_mask=(1, 0, 1, 1), weight_versions=(4, -1, 2, 3))
    columns, (tag,) = to_columns([(7, [(resumed, ONE)], None)])
    names = ("weight_version_min", "weight_version_max")
    assert [tag[name] for name in names] == [columns[name].item() for name in names] == [2, 4]


def test_turn_rewards_are_at_turn_ends_and_sum_to_the_reward():
    tool = dataclasses.replace(
        output([3, 4, 5, 6, 7]), loss_mask=(1, 1, 0, 1, 1), num_turns=2, turn_rewards=(0.25, 0.5)
    )
    columns, _ = to_columns([(1, [(tool, ONE)], None)])
    assert columns["rewards"].values().tolist() == [0.0, 0.25, 0.0, 0.0, 0.75]
    with pytest.raises(ValueError, match="3 turn rewards for 2 runs of model tokens"):
        to_columns([(1, [(dataclasses.replace(tool, turn_rewards=(1.0, 1.0, 1.0)), ONE)], None)])


def test_a_completion_is_punished_over_its_last_tokens():
    got = [overlong_penalty(n, longest=100, buffer=20) for n in (10, 80, 90, 100, 120)]
    assert got == [0.0, 0.0, 0.5, 1.0, 1.0]


def test_a_group_s_greedy_reward_is_a_column_of_its_rows():
    columns, _ = to_columns([(7, [(output([3]), ONE), (output([5]), NOTHING)], 0.5), (9, [(output([6]), HALF)], 1.0)])
    assert columns["greedy_rewards"].tolist() == [0.5, 0.5, 1.0]


def parts(**components):
    return Score(reward=sum(components.values()), components=components, weights=dict.fromkeys(components, 0.5))


def test_reward_components_are_columns_and_must_agree():
    columns, tags = to_columns([(7, [(output([3]), parts(a=1.0, b=2.0)), (output([5]), parts(a=0.0, b=4.0))], None)])
    assert columns["components"].tolist() == [[1.0, 2.0], [0.0, 4.0]]
    assert part_means(tags) == {"reward/a": 0.5, "reward/b": 3.0}
    assert part_means(to_columns([(7, [(output([3]), ONE)], None)])[1]) == {}
    assert columns["component_weights"].tolist() == [[0.5, 0.5]] * 2
    assert "components" not in to_columns([(7, [(output([3]), ONE)], None)])[0]
    with pytest.raises(TrainerError, match=r"has the parts \['a'\], another's \['a', 'b'\]"):
        to_columns([(7, [(output([3]), parts(a=1.0, b=2.0)), (output([5]), parts(a=0.0))], None)])


class Slow:
    """Scores the length of a text, all at the same time, and fails on one."""

    step = 0

    def __init__(self):
        self.num_running = self.max_running = 0

    async def values(self, completion, row):
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        await asyncio.sleep(0.05)
        self.num_running -= 1
        if completion.text == "bad":
            raise TimeoutError("too slow")
        return len(completion.text) + (completion.loop_reward or 0.0)

    async def scores(self, completions, values, row):
        return [Score(reward=value) for value in values]


@pytest.mark.promise("A score that fails is no zero")
@pytest.mark.process
def test_rollouts_are_scored_concurrently_and_failures_fail():
    """A reward that raises makes its rollout a failed one."""

    class Loop(rl_agent.AgentLoop):
        async def run(self, sampling_params, row):
            return dataclasses.replace(output([3, 4]), text=row["text"], reward=row["own"])

    rows = [{"text": text, "own": own, "data_source": "mine"} for text, own in (("a", None), ("bad", None), ("bb", 1))]
    scorer = Slow()

    async def main():
        runner = rl_agent.AgentRunner(lambda _: Loop(None, None))
        grading = Grading(rows, scorer, penalty=lambda num_tokens: num_tokens / 8)
        hooks = {"grade": grading.grade, "complete": grading.complete}
        return {g.row_index: g async for g in runner.run_groups(rows, {}, group_size=4, **hooks)}

    groups = asyncio.run(main())
    assert [[s.reward for _, s in scored(rollout)] for rollout in groups[0].rollouts] == [[0.75]] * 4
    columns, _ = to_columns([(7, [sample for rollout in groups[0].rollouts for sample in scored(rollout)], None)])
    assert columns["rollout_index"].tolist() == [0, 1, 2, 3]
    assert [[s.reward for _, s in scored(rollout)] for rollout in groups[2].rollouts] == [[2.75]] * 4
    assert scorer.max_running == 12, "one after the other would take as many times as long"
    assert groups[1].is_dropped
    (failure, *_) = groups[1].failures
    assert (failure.kind, failure.stage) == ("grader", "reward")
    assert failure.message == "the reward of 'mine' raised TimeoutError: too slow"


class Leaving:
    step = 0

    def __init__(self, error, compares):
        self.error, self.compares = error, compares

    async def values(self, completion, row):
        if not self.compares:
            raise self.error
        return 1.0

    async def scores(self, completions, values, row):
        raise self.error


@pytest.mark.parametrize("compares", [False, True])
@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt("x"), asyncio.CancelledError("x"), MemoryError("x")]
)
def test_whatever_a_reward_raises_is_a_counted_failure(error, compares):
    class Loop(rl_agent.AgentLoop):
        async def run(self, sampling_params, row):
            return output([3, 4])

    async def main():
        runner = rl_agent.AgentRunner(lambda _: Loop(None, None))
        grading = Grading([{"data_source": "mine"}], Leaving(error, compares))
        hooks = {"grade": grading.grade, "complete": grading.complete}
        return [g async for g in runner.run_groups([{}], {}, group_size=2, **hooks)]

    (group,) = asyncio.run(main())
    assert group.is_dropped
    assert group.failures[-1].message == f"the reward of 'mine' raised {type(error).__name__}: {error}"


def test_groups_that_finish_during_a_write_share_the_next_one():
    entered, gate, calls = threading.Event(), threading.Event(), []

    def put(groups):
        calls.append([group_id for group_id, *_ in groups])
        entered.set()
        assert gate.wait(10)

    async def write():
        writer = _GroupWriter(put)
        writer.add((1, [], None))
        assert await asyncio.to_thread(entered.wait, 10)
        writer.add((2, [], None))
        writer.add((3, [], None))
        gate.set()
        await writer.finish()

    asyncio.run(write())
    assert calls == [[1], [2, 3]]


@pytest.mark.process
@pytest.mark.parametrize("adds_more", [True, False])
def test_a_write_that_fails_is_not_lost(adds_more):
    def put(groups):
        raise RuntimeError("the queue is gone")

    async def write():
        writer = _GroupWriter(put)
        writer.add((1, [], None))
        if adds_more:
            await asyncio.sleep(0.1)
            writer.add((2, [], None))
        await writer.finish()

    with pytest.raises(RuntimeError, match="the queue is gone"):
        asyncio.run(write())
