"""Reward functions that need nothing but the text and the ground truth."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from typing import Any

from rl_trainer.errors import DataError

RewardFunction = Callable[[str, Mapping[str, Any]], Any]
"""`(completion text, dataset row) -> reward`, a number or numbers by name; a coroutine function may be one as well.
Raising means that the score failed; it is counted, and never read as zero."""
Rule = Callable[[str, Mapping[str, Any]], float]
"""A reward function of ours."""

_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def exact_match(text: str, row: Mapping[str, Any]) -> float:
    """1 when the stripped text equals the ground truth, else 0."""
    return float(text.strip() == str(row["reward_model"]["ground_truth"]).strip())


def math_equal(text: str, row: Mapping[str, Any]) -> float:
    """1 when the text's final answer is mathematically equal to the ground truth (math-verify), else 0.

    An answer that cannot be parsed is a wrong answer of the policy, not a failed score. The parser's time limit needs
    the main thread of its process, which `Scorer` gives it.
    """
    from math_verify import parse, verify

    gold = parse(f"\\boxed{{{row['reward_model']['ground_truth']}}}")
    return float(verify(gold, parse(text)))


def gsm8k_answer(text: str, row: Mapping[str, Any]) -> float:
    """Like `math_equal`; a text without a boxed answer is judged by its last number, as is usual for GSM8K."""
    numbers = _NUMBER.findall(text)
    if "\\boxed" not in text and numbers:
        text = f"\\boxed{{{numbers[-1].replace(',', '')}}}"
    return math_equal(text, row)


def answer_of(text: str) -> str:
    """What a completion answers, for counting equal ones: the last boxed expression, or number, or the text."""
    if boxed := _BOXED.findall(text):
        return boxed[-1].strip()
    if numbers := _NUMBER.findall(text):
        return numbers[-1].replace(",", "")
    return text.strip()


ISOLATED = (math_equal, gsm8k_answer)
"""Rules that run a symbolic parser on whatever the policy wrote, and so belong into a process that can be killed."""


def resolve_reward(data_source: str) -> Rule:
    """The rule for rows of a data source.

    Raises:
        DataError: the rule needs a package that is not installed (pip line).
    """
    if data_source.startswith("reasoning_gym/"):
        return exact_match
    if importlib.util.find_spec("math_verify") is None:
        raise DataError(f"rewards for {data_source!r} need math-verify: pip install 'rl-post-trainer[math]'")
    return gsm8k_answer if data_source == "gsm8k" else math_equal
