"""Reward functions written for TRL run as they are."""

import asyncio
import dataclasses

import pytest

import rl_agent
from rl_agent.types import AgentLoopOutput
from rl_trainer.config.schema import RewardPart, RewardSection
from rl_trainer.data.rows import checked as checked_row
from rl_trainer.data.rows import completed
from rl_trainer.errors import RewardError
from rl_trainer.pipeline.step_record import part_means
from rl_trainer.rewards import Completion, Scorer
from rl_trainer.rewards.trl import Batch, batch_rewards
from rl_trainer.rewards.worker import adapted
from rl_trainer.workers.columns import to_columns
from rl_trainer.workers.grading import Grading, scored

ROW = {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4", "data_source": "mine"}


def batch(*texts, step=0):
    return dataclasses.asdict(Batch(texts=texts, token_ids=[[*range(len(t))] for t in texts], step=step, num_steps=9))


def called(function, *texts, row=ROW):
    call, is_batched = adapted(function)
    assert is_batched
    return call(batch(*texts), row)


def by_column(completions, answer, **kwargs):
    return [1.0 if a in c[0]["content"] else 0.0 for c, a in zip(completions, answer, strict=True)]


def without_kwargs(prompts, completions):
    return [float(len(p) + len(c)) for p, c in zip(prompts, completions, strict=True)]


def by_ids(completion_ids, **kwargs):
    return [len(ids) for ids in completion_ids]


def not_applicable(completions, **kwargs):
    return [None] * len(completions)


def shortest(completions, **kwargs):
    lengths = [len(c[0]["content"]) for c in completions]
    return [float(length == min(lengths)) for length in lengths]


def of_progress(completions, trainer_state, **kwargs):
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (by_column, [1.0, 0.0]),
        (without_kwargs, [2.0, 2.0]),
        (by_ids, [7.0, 2.0]),
        (not_applicable, [None, None]),
        (shortest, [0.0, 1.0]),
        (of_progress, [0.0, 0.0]),
    ],
)
def test_a_function_of_trl_is_called_as_there(function, wanted):
    assert called(function, "it is 4", "no")["rewards"] == wanted


def test_a_coroutine_function_of_trl_is_awaited():
    async def coroutine(prompts, completions, answer, **kwargs):
        return [float(a == "4") for a in answer]

    assert asyncio.run(called(coroutine, "4", "5"))["rewards"] == [1.0, 1.0]


def test_what_a_function_logs_is_averaged_or_one_value_each():
    def logging(completions, log_extra, log_metric, **kwargs):
        log_metric("words", 1)
        log_metric("words", 2)
        log_extra("seen", [len(c[0]["content"]) for c in completions])
        return [0.5] * len(completions)

    answer = called(logging, "a", "bb")
    assert (answer["metrics"], answer["extra"]) == ({"words": 1.5}, {"seen": [1, 2]})


def test_rows_with_text_prompts_have_text_completions():
    def length(prompts, completions, **kwargs):
        assert "is_text_prompt" not in kwargs
        return [float(len(p) + len(c)) for p, c in zip(prompts, completions, strict=True)]

    row = checked_row(completed({"prompt": "de", "answer": "1"}), "row 1")
    assert called(length, "abc", "a", row=row)["rewards"] == [5.0, 3.0]
    assert called(length, "abc", row={"prompt": "de"})["rewards"] == [5.0]


def test_a_column_that_the_row_lacks_is_named():
    with pytest.raises(TypeError, match="it takes answer, and the row has prompt"):
        called(by_column, "4", row={"prompt": "x"})


def wrong_count(completions, **kwargs):
    return [1.0]


def wrong_extra(completions, log_extra, **kwargs):
    log_extra("seen", [1])


def wrong_metric(completions, log_metric, **kwargs):
    log_metric("size", float("nan"))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (wrong_count, "gave 1 rewards for 2 completions"),
        (wrong_extra, r"log_extra\('seen'\) got 1 values for 2 completions"),
        (wrong_metric, r"log_metric\('size'\) is nan"),
    ],
)
def test_a_list_of_the_wrong_length_is_an_error(function, said):
    with pytest.raises(ValueError, match=said):
        called(function, "4", "5")


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [1.0],
        {"rewards": [1.0]},
        {"rewards": [1.0], "metrics": {}, "extra": {}},
        {"rewards": [1.0, "x"], "metrics": {}, "extra": {}},
        {"rewards": [1.0, float("inf")], "metrics": {}, "extra": {}},
        {"rewards": [1.0, 2.0], "metrics": {"a": None}, "extra": {}},
        {"rewards": [1.0, 2.0], "metrics": {}, "extra": {"a": [1]}},
    ],
)
def test_an_answer_that_is_no_batch_s_is_refused(answer):
    with pytest.raises(ValueError, match="it gave|is "):
        batch_rewards(answer, 2)


FUNCTIONS = """
def math(completions, task, **kwargs):
    return [1.0 if t == 'math' else None for t in task]

def size(completions, **kwargs):
    return [float(len(c[0]['content'])) for c in completions]

def step(completions, trainer_state, **kwargs):
    return [trainer_state.global_step] * len(completions)

async def rank(completions, log_extra, log_metric, **kwargs):
    texts = [c[0]['content'] for c in completions]
    log_extra('rank', [sorted(texts).index(text) for text in texts])
    log_metric('group', len(texts))
    return [float(sorted(texts).index(text)) for text in texts]

def fails(completions, **kwargs):
    raise KeyError('gone')
"""


def with_scorer(tmp_path, work, **parts):
    file = tmp_path / "rewards.py"
    file.write_text(FUNCTIONS)
    made = {n: RewardPart(kind="function", path=f"{file}:{n}", weight=weight) for n, weight in parts.items()}

    async def run():
        scorer = Scorer(RewardSection(parts=made), num_steps=10)
        try:
            return await work(scorer)
        finally:
            await scorer.close()

    return asyncio.run(run())


@pytest.mark.process
def test_functions_that_do_not_apply_are_left_out(tmp_path):
    async def both(scorer):
        return [await scorer.score("abcd", {**ROW, "task": task}) for task in ("math", "code")]

    async def alone(scorer):
        with pytest.raises(RewardError, match="no reward function applies"):
            await scorer.score("abcd", {**ROW, "task": "code"})

    first, second = with_scorer(tmp_path, both, math=2.0, size=0.5)
    assert (first.reward, second.reward) == (4.0, 2.0)
    assert (first.missing, second.missing) == (frozenset(), {"math"})
    with_scorer(tmp_path, alone, math=1.0)


@pytest.mark.process
def test_trainer_state_has_the_step_of_the_run(tmp_path):
    async def score(scorer):
        scorer.step = 7
        return await scorer.score("abcd", ROW)

    assert with_scorer(tmp_path, score, step=1.0).reward == 7


@pytest.mark.process
def test_the_completions_of_a_prompt_are_compared(tmp_path):
    """By the runner's hooks, one completion at a time beside it; what is logged reaches metrics and samples."""

    class Loop(rl_agent.AgentLoop):
        async def run(self, sampling_params, row):
            text = row["texts"].pop()
            return AgentLoopOutput(
                prompt_token_ids=(1,),
                completion_token_ids=(3,),
                loss_mask=(1,),
                rollout_logprobs=(-0.5,),
                weight_versions=(2,),
                finish_reason="stop",
                text=text,
                reward=0.0,
            )

    texts = ["c", "a", "b"]
    rows = [{**ROW, "texts": texts}]

    async def graded(scorer):
        grading = Grading(rows, scorer)
        runner = rl_agent.AgentRunner(lambda _: SharedTexts(texts), max_concurrent=1)
        hooks = {"grade": grading.grade, "complete": grading.complete}
        return [group async for group in runner.run_groups(rows, {}, group_size=3, **hooks)]

    class SharedTexts(Loop):
        def __init__(self, shared):
            super().__init__(None, None)
            self.shared = shared

        async def run(self, sampling_params, row):
            return await super().run(sampling_params, {"texts": self.shared})

    (group,) = with_scorer(tmp_path, graded, rank=1.0, size=0.0)
    samples = [sample for rollout in group.rollouts for sample in scored(rollout)]
    assert [(o.text, s.reward) for o, s in samples] == [("b", 1.0), ("a", 0.0), ("c", 2.0)]
    _, tags = to_columns([(7, samples, None)])
    assert part_means(tags) == {"reward/group": 3.0, "reward/rank": 1.0, "reward/size": 1.0}
    assert [tag["extra"] for tag in tags] == [{"rank": 1}, {"rank": 0}, {"rank": 2}]

    texts += ["c", "a", "b"]
    (group,) = with_scorer(tmp_path, graded, fails=1.0)
    assert group.is_dropped
    assert "KeyError: 'gone'" in group.failures[0].message


@pytest.mark.process
def test_a_part_that_judges_alone_does_so_before_its_group_ends(tmp_path):
    async def values(scorer):
        return await scorer.values(Completion(text="abc", loop_reward=2.0), ROW)

    file = tmp_path / "rewards.py"
    file.write_text(FUNCTIONS)

    async def run():
        parts = {"own": RewardPart(kind="loop"), "rank": RewardPart(kind="function", path=f"{file}:rank")}
        scorer = Scorer(RewardSection(parts=parts))
        try:
            return await values(scorer)
        finally:
            await scorer.close()

    assert asyncio.run(run()) == {"own": 2.0}
