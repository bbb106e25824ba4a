import asyncio
from collections import Counter
from contextlib import aclosing

import pytest

from rl_agent import AgentLoop, AgentRunner, Failure, FailureError, LoopError, OutputError
from rl_agent.loops.single_turn import SingleTurnLoop
from rl_agent.runner import seeded, to_failure
from rl_agent.testing import FakeGenerator, FakeTokenizer
from rl_rollout.errors import OverloadedError, RequestError, RequestTimeoutError, ServerLostError, WeightUpdateError

PARAMS = {"max_new_tokens": 8}


def row(content="hi", **fields):
    return {"prompt": [{"role": "user", "content": content}], **fields}


def runner(server, **settings):
    settings = {"retry_delay_s": 0.0, **settings}
    return AgentRunner(lambda _: SingleTurnLoop(server, FakeTokenizer()), **settings)


def collect(agents, rows, group_size=1, params=PARAMS):
    async def run():
        return [result async for result in agents.run(rows, params, group_size=group_size)]

    return asyncio.run(run())


def content_of(request):
    return FakeTokenizer().decode(request.prompt_token_ids)


def test_every_row_runs_group_size_times_with_numbered_results():
    results = collect(runner(FakeGenerator()), [row("a"), row("b"), row("c")], group_size=4)
    assert sorted((r.row_index, r.rollout_index) for r in results) == [(i, k) for i in range(3) for k in range(4)]
    assert all(isinstance(r.outputs, tuple) and len(r.outputs) == 1 and r.num_attempts == 1 for r in results)


def test_the_bound_on_concurrency_is_reached_and_kept():
    server = FakeGenerator(delay_s=0.001)
    collect(runner(server, max_concurrent=5), [row()] * 4, group_size=8)
    assert server.max_running == 5
    assert len(server.requests) == 32


def test_the_pause_before_another_attempt_doubles(monkeypatch):
    slept, sleep = [], asyncio.sleep

    async def note(delay_s, *given):
        slept.append(delay_s)
        await sleep(0, *given)

    monkeypatch.setattr(asyncio, "sleep", note)

    def lose(_):
        raise ServerLostError("gone")

    (result,) = collect(runner(FakeGenerator(lose), max_attempts=4, retry_delay_s=0.5), [row()])
    assert result.num_attempts == 4
    assert [each for each in slept if each] == [0.5, 1.0, 2.0]


def test_results_come_as_they_finish():
    async def slow_first(request):
        if "slow" in content_of(request):
            await is_answered.wait()
            for _ in range(100):  # the other rollout has ended by then, however slow the machine
                await asyncio.sleep(0)
        output = await fake.generate(request)
        is_answered.set()
        return output

    is_answered, fake = asyncio.Event(), FakeGenerator()
    server = FakeGenerator()
    server.generate = slow_first
    results = collect(runner(server), [row("slow"), row("quick")])
    assert [r.row_index for r in results] == [1, 0]


def fail_on(word, error):
    def reply(request):
        if word in content_of(request):
            raise error
        return [100, 1]

    return FakeGenerator(reply)


def test_one_failure_is_a_value_and_the_others_go_on():
    server = fail_on("bad", RequestError("the prompt is longer than the context"))
    results = {r.row_index: r for r in collect(runner(server), [row("good"), row("bad"), row("good")])}
    failure = results[1].outputs
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.stage, failure.is_retryable) == ("generation", "generate", False)
    assert failure.message == "the prompt is longer than the context"
    assert results[1].num_attempts == 1
    assert all(isinstance(results[i].outputs, tuple) for i in (0, 2))


def test_a_retryable_failure_is_tried_again_up_to_the_limit():
    server = fail_on("bad", ServerLostError("127.0.0.1:9 closed the connection"))
    (result,) = collect(runner(server, max_attempts=3), [row("bad")])
    assert isinstance(result.outputs, Failure)
    assert (result.outputs.kind, result.num_attempts, len(server.requests)) == ("transport", 3, 3)


def test_an_attempt_that_works_makes_the_rollout_ok():
    answers = iter([ServerLostError("gone"), None])

    def reply(_):
        if error := next(answers):
            raise error
        return [100, 1]

    (result,) = collect(runner(FakeGenerator(reply), max_attempts=2), [row()])
    assert result.num_attempts == 2
    assert isinstance(result.outputs, tuple)


def test_a_rollout_past_its_deadline_times_out_and_cleans_up():
    server = FakeGenerator(delay_s=3600)
    (result,) = collect(runner(server, timeout_s=0.05), [row()])
    assert isinstance(result.outputs, Failure)
    assert (result.outputs.kind, result.outputs.stage) == ("timeout", "rollout")
    assert result.outputs.message == "no result within 0.05 s, in attempt 1"
    assert server.num_running == 0


@pytest.mark.process
def test_the_deadline_covers_retries_and_names_the_first_failure():
    server = fail_on("bad", ServerLostError("gone"))
    (result,) = collect(runner(server, timeout_s=0.5, max_attempts=99, retry_delay_s=3600), [row("bad")])
    assert isinstance(result.outputs, Failure)
    assert result.outputs.message == "no result within 0.5 s, in attempt 1; the attempt before failed: gone"


@pytest.mark.parametrize(
    ("error", "kind", "is_retryable"),
    [
        (ServerLostError("x"), "transport", True),
        (ConnectionResetError("x"), "transport", True),
        (RequestTimeoutError("x"), "timeout", True),
        (TimeoutError(), "timeout", True),
        (WeightUpdateError("x"), "generation", True),
        (OverloadedError("x"), "generation", True),
        (RequestError("x"), "generation", False),
    ],
)
def test_what_an_error_means_for_the_rollout(error, kind, is_retryable):
    failure = to_failure(error)
    assert (failure.kind, failure.is_retryable) == (kind, is_retryable)
    assert failure.message


def test_a_row_that_cannot_be_run_fails_alone():
    results = {r.row_index: r for r in collect(runner(FakeGenerator(), max_attempts=5), [{}, row()])}
    assert isinstance(results[0].outputs, Failure)
    assert (results[0].outputs.stage, results[0].outputs.is_retryable, results[0].num_attempts) == ("row", False, 1)
    assert isinstance(results[1].outputs, tuple)


class ScriptedLoop(AgentLoop):
    def __init__(self, result):
        self.result = result

    async def run(self, sampling_params, row):
        await asyncio.sleep(0)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def test_a_loop_ends_a_rollout_with_the_failure_it_raises():
    failure = Failure(kind="tool", stage="calculator", message="it hung", is_retryable=False)
    (result,) = collect(AgentRunner(lambda _: ScriptedLoop(FailureError(failure))), [row()])
    assert result.outputs is failure


def test_any_exception_of_a_loop_is_a_counted_failure(caplog):
    results = collect(AgentRunner(lambda _: ScriptedLoop(KeyError("bug"))), [row()] * 3, group_size=2)
    assert len(results) == 6
    assert {(r.outputs.kind, r.outputs.message, r.num_attempts) for r in results} == {("loop", "KeyError: 'bug'", 1)}
    assert "ScriptedLoop failed: KeyError" in caplog.text


def test_an_output_that_cannot_be_trained_on_surfaces():
    with pytest.raises(OutputError, match="gave no trajectory"):
        collect(AgentRunner(lambda _: ScriptedLoop([])), [row()])


def test_an_error_cancels_what_is_still_running():
    server = FakeGenerator(delay_s=3600)
    loops = {"hangs": SingleTurnLoop(server, FakeTokenizer()), "bug": ScriptedLoop(OutputError("bug"))}
    with pytest.raises(OutputError):
        collect(AgentRunner(loops.__getitem__), [row(agent_name="hangs"), row(agent_name="bug")])
    assert server.num_running == 0


def test_leaving_early_cancels_running_work_and_starts_no_more():
    server = FakeGenerator(lambda _: [100, 1], delay_s=0.001)

    async def take_one():
        async with aclosing(runner(server, max_concurrent=4).run([row()] * 100, PARAMS)) as results:
            async for _ in results:
                break
        num_requests = len(server.requests)
        await asyncio.sleep(0.02)
        return num_requests, len(server.requests), server.num_running

    before, after, num_running = asyncio.run(take_one())
    assert before == after < 100
    assert num_running == 0


def test_agent_name_chooses_a_row_s_loop_and_loops_are_made_once():
    made = []

    def factory(name):
        made.append(name)
        return SingleTurnLoop(FakeGenerator(), FakeTokenizer())

    collect(AgentRunner(factory), [row(), row(agent_name="other"), row(), row(agent_name="other")])
    assert made == ["single_turn", "other"]


def test_a_missing_loop_is_reported_before_the_start():
    server = FakeGenerator()

    def factory(name):
        if name == "nope":
            raise LoopError("no agent loop 'nope' is installed")
        return SingleTurnLoop(server, FakeTokenizer())

    with pytest.raises(LoopError, match="nope"):
        collect(AgentRunner(factory), [row(), row(agent_name="nope")])
    assert not server.requests


@pytest.mark.promise("A seed gives every rollout its own, and the same again")
def test_a_seed_gives_every_rollout_its_own_and_the_same_again():
    server = FakeGenerator()
    collect(runner(server), [row("a"), row("b")], group_size=3, params={**PARAMS, "seed": 11})
    seeds = Counter(request.sampling_params.seed for request in server.requests)
    assert len(seeds) == 6
    assert seeds == Counter(seeded({"seed": 11}, i, k)["seed"] for i in range(2) for k in range(3))
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_without_a_seed_none_is_made_up():
    assert seeded({"temperature": 1.0}, 0, 0) == {"temperature": 1.0}


def test_limits_must_be_positive():
    with pytest.raises(ValueError, match="max_attempts is 0"):
        AgentRunner(ScriptedLoop, max_attempts=0)
    with pytest.raises(ValueError, match="group_size is 0"):
        collect(AgentRunner(ScriptedLoop), [row()], group_size=0)
