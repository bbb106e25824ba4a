"""Final answers and numbers: hand-judged texts, and what a rule, a majority vote and verl's scorers make of them."""

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest

from rl_trainer.errors import DataError, RewardError
from rl_trainer.rewards import answer_of, resolve_reward
from rl_trainer.rewards.answers import final_answer
from rl_trainer.rewards.rules import RULES
from rl_trainer.rewards.verl import rule_of

JUDGED = [json.loads(line) for line in (Path(__file__).parent / "answers.jsonl").read_text().splitlines()]
"""Completion, ground truth, and whether a human pays it."""


def reward(rule, text, truth):
    return RULES[rule](text, {"data_source": "math", "reward_model": {"ground_truth": truth}})


@pytest.mark.process
@pytest.mark.parametrize("rule", ["math", "gsm8k"])
def test_texts_are_paid_as_a_human_would(rule):
    wrong = [(text, truth) for text, truth, is_right in JUDGED if reward(rule, text, truth) != is_right]
    assert len(JUDGED) >= 1000
    assert wrong == []


def test_thinking_is_not_the_answer():
    assert reward("math", r"<think>\boxed{72}</think> The answer is 73", "72") == 0
    assert reward("gsm8k", r"<think>\boxed{72}</think> The answer is 73", "73") == 1
    assert reward("gsm8k", r"<think>so it is \boxed{72}", "72") == 0


@pytest.mark.parametrize(
    ("texts", "answer"),
    [
        (["0.5", r"\boxed{\frac12}", "the answer is 1/2", "½", "50%"], "1/2"),
        (["-3", "−3", "The answer is minus three.", r"\boxed{x = -3}"], "-3"),
        (["#### 1,000", "1 000 clips", "1e3", r"\boxed{1{,}000}"], "1000"),
        ([r"\boxed{\sqrt{2}}", r"$\boxed{\sqrt{2}}$"], r"\sqrt{2}"),
    ],
)
def test_answers_of_one_value_vote_alike(texts, answer):
    assert {answer_of(text) for text in texts} == {answer}


@pytest.mark.process
@pytest.mark.parametrize(
    "text",
    [
        "1e999999999999", "9" * 100_000, "\\boxed{" * 20_000, "1, " * 30_000, "answer is " * 10_000, "wait 1 " * 20_000,
        "(" * 40_000 + "1", "\\boxed{1} wait " * 5_000, "1 = " * 20_000, "- " * 40_000, "1/" * 30_000, "$" * 40_000,
    ],
)  # fmt: skip
def test_hostile_texts_are_read_in_linear_time(text):
    start = time.thread_time()  # of the processor: what else a machine does counts not
    final_answer(text)
    assert time.thread_time() - start < 2.0


def test_a_number_has_one_value():
    assert final_answer("It is 1.5 million.").number == Fraction(1_500_000)
    assert final_answer("It is 10-12.").number is None
    assert final_answer("nothing here").number is None


@pytest.mark.parametrize(
    ("rule", "text", "truth", "paid"),
    [
        ("gsm8k", "The answer is 72", "72", 0.0),
        ("gsm8k", "#### 1,072", "1072", 1.0),
        ("gsm8k", "#### 72.0", "72", 0.0),
        ("gsm8k", "#### 72" + "." + " so" * 200, "72", 0.0),
        ("math", r"\boxed{\dfrac{1}{2}}", r"\frac12", 1.0),
        ("math", r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        ("math", r"\boxed{0.25}", r"\frac{1}{4}", 0.0),
        ("math", r"\boxed{x=5}", "5", 1.0),
        ("math", "The answer is 5", "5", 0.0),
        ("math_dapo", "Answer: 72", "72", 1.0),
        ("math_dapo", r"answer: $\boxed{1,000}$", "1000", 1.0),
        ("math_dapo", r"\boxed{72}", "72", -1.0),
        ("math_dapo", "Answer: 73", "72", -1.0),
        ("prime_math", r"\boxed{1/2}", "0.5", 1.0),
        ("geo3k", r"<think>a</think> \boxed{5}", "5", 1.0),
        ("geo3k", r"\boxed{5}", "5", 0.9),
        ("geo3k", r"<think>a</think> \boxed{4}", "5", 0.1),
        ("search_r1", "<answer>The  Eiffel tower!</answer>", {"target": ["eiffel tower"]}, 1.0),
        ("search_r1", "<answer>Paris</answer>" * 11, {"target": "Paris"}, 0.25),
        ("search_r1", "Paris", {"target": "Paris"}, 0.0),
    ],
)
def test_rules_named_after_verl_score_as_it_does(rule, text, truth, paid):
    assert reward(f"verl/{rule}", text, truth) == pytest.approx(paid)


def test_question_answers_match_without_case_or_articles():
    assert reward("qa", "I think <answer>a Nile</answer> <answer>the Nile.</answer>", ["Nile", "Nil"]) == 1
    assert reward("qa", "<answer>Amazon</answer>", ["Nile", "Nil"]) == 0
    with pytest.raises(RewardError, match="no ground truth"):
        reward("qa", "<answer>Amazon</answer>", {"target": []})


def test_every_source_that_verl_scores_has_a_rule():
    sources = {
        "openai/gsm8k": ("gsm8k", "gsm8k"), "lighteval/MATH": ("math", "math"), "math_dapo": ("math", "math_dapo"),
        "aime2024": ("math", "math_dapo"), "numina_cn_k12": ("math", "prime_math"), "taco": ("code", "prime_code"),
        "codecontests": ("code", "prime_code"), "apps": ("code", "prime_code"),
        "hiyouga/geometry3k": ("math", "geo3k"), "searchR1_nq": ("qa", "search_r1"),
    }  # fmt: skip
    assert {s: (resolve_reward(s), rule_of(s).removeprefix("verl/")) for s in sources} == sources
    with pytest.raises(DataError, match="verl has no scorer for rows of data_source='mine'"):
        rule_of("mine")
