"""Reward functions written for TRL run as they are."""

import asyncio

import pytest

from rl_trainer.errors import RewardError
from rl_trainer.rewards.worker import NOT_APPLICABLE, checked, of_text_and_row

ROW = {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4", "data_source": "mine"}


def by_column(completions, answer, **kwargs):
    return [1.0 if a in c[0]["content"] else 0.0 for c, a in zip(completions, answer, strict=True)]


def without_kwargs(prompts, completions):
    return [float(len(p) + len(c)) for p, c in zip(prompts, completions, strict=True)]


def not_applicable(completions, **kwargs):
    return [None] * len(completions)


def logging(completions, log_extra=None, log_metric=None, trainer_state=None, **kwargs):
    log_extra("seen", [1])
    log_metric("mean", 1.0)
    assert trainer_state is not None
    return [0.5]


async def coroutine(prompts, completions, answer, **kwargs):
    return [float(answer == ["4"])]


@pytest.mark.parametrize(
    ("function", "wanted"),
    [(by_column, 1.0), (without_kwargs, 2.0), (not_applicable, {NOT_APPLICABLE: 0.0}), (logging, 0.5)],
)
def test_a_function_of_trl_is_called_as_there(function, wanted):
    assert checked(of_text_and_row(function)("it is 4", ROW)) == wanted


def test_a_coroutine_function_of_trl_is_awaited():
    assert asyncio.run(of_text_and_row(coroutine)("4", ROW)) == 1.0


def test_a_prompt_of_text_has_completions_of_text():
    def length(prompts, completions, **kwargs):
        return [float(len(prompts[0]) + len(completions[0]))]

    assert of_text_and_row(length)("abc", {"prompt": "de"}) == 5.0


def test_a_column_that_the_row_lacks_is_named():
    with pytest.raises(TypeError, match="it takes answer, and the row has prompt"):
        of_text_and_row(by_column)("4", {"prompt": "x"})


def test_one_reward_for_each_completion_is_needed():
    with pytest.raises(ValueError, match="gave 2 rewards for one completion"):
        of_text_and_row(lambda completions, **kwargs: [1, 2])("4", ROW)


@pytest.mark.process
def test_functions_that_do_not_apply_are_left_out(tmp_path):
    from rl_trainer.config import RewardPart, RewardSection
    from rl_trainer.rewards import Scorer

    file = tmp_path / "rewards.py"
    file.write_text(
        "def math(completions, task, **kwargs):\n"
        "    return [1.0 if t == 'math' else None for t in task]\n\n"
        "def size(completions, **kwargs):\n"
        "    return [float(len(c[0]['content'])) for c in completions]\n"
    )
    parts = {
        name: RewardPart(kind="function", path=f"{file}:{name}", weight=w) for name, w in (("math", 2.0), ("size", 0.5))
    }

    async def score():
        scorer = Scorer(RewardSection(parts=parts))
        alone = Scorer(RewardSection(path=f"{file}:math"))
        try:
            found = [await scorer.score("abcd", {**ROW, "task": task}) for task in ("math", "code")]
            with pytest.raises(RewardError, match="no reward function applies"):
                await alone.score("abcd", {**ROW, "task": "code"})
            return found
        finally:
            await scorer.close()
            await alone.close()

    both, one = asyncio.run(score())
    assert (both.reward, one.reward) == (4.0, 2.0)
    assert (both.missing, one.missing) == (frozenset(), {"math"})


@pytest.mark.process
def test_trainer_state_has_the_step_of_the_run(tmp_path):
    from rl_trainer.config import RewardSection
    from rl_trainer.rewards import Scorer

    file = tmp_path / "rewards.py"
    file.write_text("def step(completions, trainer_state, **kwargs):\n    return [trainer_state.global_step]\n")

    async def score():
        scorer = Scorer(RewardSection(path=f"{file}:step"))
        scorer.step = 7
        try:
            return await scorer.score("abcd", ROW)
        finally:
            await scorer.close()

    assert asyncio.run(score()).reward == 7
