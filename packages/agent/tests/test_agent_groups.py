"""What becomes of a group in which rollouts fail."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from rl_agent import AgentLoop, AgentRunner, Failure, FailureError, FailureKind
from rl_agent.loops.single_turn import SingleTurnLoop
from rl_agent.testing import FakeGenerator, FakeTokenizer

PARAMS = {"max_new_tokens": 8, "seed": 1}
ROWS = [{"prompt": [{"role": "user", "content": str(i)}]} for i in range(3)]


class Scripted(AgentLoop):
    """Fails in the rollouts that the script names, by the order in which a row's rollouts start."""

    def __init__(self, script, kind=FailureKind.TOOL):
        server = FakeGenerator()
        super().__init__(server, FakeTokenizer())
        self.inner = SingleTurnLoop(server, FakeTokenizer())
        self.script = script
        self.kind = kind
        self.started = Counter()
        self.seeds = []

    async def run(self, sampling_params, row):
        name = row["prompt"][0]["content"]
        number = self.started[name]
        self.started[name] += 1
        self.seeds.append(sampling_params["seed"])
        if number in self.script.get(name, ()):
            failure = Failure(kind=self.kind, stage="test", message=f"{name}/{number}", is_retryable=False)
            raise FailureError(failure)
        return replace(await self.inner.run(sampling_params, row), reward=float(number))


def groups(loop, *, group_size=4, rows=ROWS, max_concurrent=1, **policy):
    async def main():
        agents = AgentRunner(lambda _: loop, max_concurrent=max_concurrent)
        return {g.row_index: g async for g in agents.run_groups(rows, PARAMS, group_size=group_size, **policy)}

    return asyncio.run(main())


def rewards(group):
    return [output.reward for rollout in group.rollouts for output in rollout]


def test_groups_without_failures_are_whole_under_every_policy():
    for policy in ("refill", "drop", "mask"):
        found = groups(Scripted({}), on_failure=policy)
        assert {i: rewards(g) for i, g in found.items()} == {i: [0.0, 1.0, 2.0, 3.0] for i in range(3)}
        assert not any(group.failures or group.is_dropped for group in found.values())


class LastFirst(Scripted):
    """The later a rollout starts, the sooner it ends."""

    async def run(self, sampling_params, row):
        output = await super().run(sampling_params, row)
        await asyncio.sleep((3 - output.reward) * 0.05)
        return output


@pytest.mark.process
def test_group_rollouts_keep_their_order_whichever_ends_first():
    found = groups(LastFirst({}), rows=ROWS[:1], max_concurrent=4)
    assert rewards(found[0]) == [0.0, 1.0, 2.0, 3.0]


def test_drop_gives_up_the_group_and_starts_no_more_of_it():
    loop = Scripted({"1": [1]})
    found = groups(loop, on_failure="drop")
    assert (found[1].is_dropped, [failure.message for failure in found[1].failures]) == (True, ["1/1"])
    assert loop.started == {"0": 4, "1": 2, "2": 4}
    assert found[1].num_failures == {"tool": 1}
    assert len(rewards(found[0])) == len(rewards(found[2])) == 4


def test_refill_replaces_a_rollout_under_a_new_seed():
    loop = Scripted({"1": [1, 2]})
    found = groups(loop, on_failure="refill", max_refills=2)
    assert rewards(found[1]) == [0.0, 3.0, 4.0, 5.0]
    assert [failure.message for failure in found[1].failures] == ["1/1", "1/2"]
    assert len(set(loop.seeds)) == len(loop.seeds) == 14


def test_refill_has_a_limit_and_then_drops():
    loop = Scripted({"1": range(99)})
    found = groups(loop, on_failure="refill", max_refills=2)
    assert found[1].is_dropped
    assert loop.started["1"] == 4 + 2, "each place once, and two refills"
    assert len(found[1].failures) == 6


def test_mask_goes_on_without_the_failed_one():
    found = groups(Scripted({"1": [0, 2]}), on_failure="mask")
    assert rewards(found[1]) == [1.0, 3.0]
    assert [failure.message for failure in found[1].failures] == ["1/0", "1/2"]
    assert sum(rewards(found[1])) / 2 == 2.0, "the mean over those that ended well, not with zeros for the others"


def test_mask_drops_a_group_too_small_for_a_baseline():
    loop = Scripted({"1": [0, 1, 2]})
    assert groups(loop, on_failure="mask")[1].is_dropped
    assert rewards(groups(Scripted({"1": [0, 1, 2]}), on_failure="mask", min_group_size=1)[1]) == [3.0]


@pytest.mark.promise("A grader that fails is never a zero")
def test_a_failing_grader_fails_the_rollout_and_scores_no_zero():
    async def grade(result):
        (output,) = result.outputs
        if output.reward == 2.0:
            failure = Failure(kind=FailureKind.GRADER, stage="verifier", message="crashed", is_retryable=False)
            return replace(result, outputs=failure)
        return replace(result, outputs=(replace(output, reward=output.reward * 10),))

    found = groups(Scripted({}), on_failure="mask", grade=grade)
    assert all(rewards(group) == [0.0, 10.0, 30.0] for group in found.values())
    assert found[0].num_failures == {"grader": 1}


@pytest.mark.parametrize("kind", list(FailureKind))
def test_every_kind_is_counted_under_its_name(kind):
    found = groups(Scripted({"0": [0, 1]}, kind), on_failure="mask")
    assert found[0].num_failures == {kind: 2}


def test_groups_arrive_as_they_end_and_leaving_stops_the_rest():
    async def main():
        server = FakeGenerator(delay_s=0.001)
        agents = AgentRunner(lambda _: SingleTurnLoop(server, FakeTokenizer()), max_concurrent=4)
        results = agents.run_groups(ROWS, PARAMS, group_size=4)
        first = await anext(results)
        await results.aclose()
        return first.row_index, server.num_running, len(server.requests)

    index, num_running, num_requests = asyncio.run(main())
    assert (index, num_running) == (0, 0)
    assert num_requests < 12


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        ({"on_failure": "zero"}, "'zero' is not a valid OnFailure"),
        ({"max_refills": -1}, "max_refills=-1 not negative"),
        ({"min_group_size": 0}, "min_group_size=0 must be positive"),
        ({"group_size": 0}, "group_size=0 and min_group_size=0 must be positive"),
        ({"positions": [1]}, "1 positions for 3 rows"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(policy, sentence):
    with pytest.raises(ValueError, match=sentence):
        groups(Scripted({}), **policy)


def test_a_group_is_completed_once_its_last_rollout_ends():
    async def complete(group):
        completed.append(group.row_index)
        return replace(group, failures=(*group.failures, "seen"))

    completed = []
    found = groups(Scripted({"1": [1]}), on_failure="drop", complete=complete)
    assert sorted(completed) == [0, 2], "a dropped group has nothing to compare"
    assert [len(found[row].failures) for row in range(3)] == [1, 1, 1]
    assert found[0].failures == ("seen",)
