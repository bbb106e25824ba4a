"""Rules: reward functions that need nothing but the text and the ground truth. By name in `reward.parts.NAME.rule`.

A rule's options are its keyword-only parameters; `scorer.check_rule` holds a configuration to them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from rl_trainer.errors import DataError, RewardError
from rl_trainer.rewards import verl
from rl_trainer.rewards.answers import final_answer, one_line_end
from rl_trainer.rewards.completions import Thinking
from rl_trainer.rewards.equality import equals

RewardFunction = Callable[[str, Mapping[str, Any]], Any]
"""`(completion text, dataset row) -> reward`, a number or numbers by name; a coroutine function may be one as well.
Raising means that the score failed; it is counted, and never read as zero."""
Rule = Callable[..., float]
"""A reward function of ours: `(text, row, **options)`."""


def _check_pattern(pattern: str) -> str:
    try:
        num_groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    if num_groups > 1:
        raise ValueError(f"{pattern!r} has {num_groups} groups; one, around the answer, or none is needed")
    return pattern


def exact_match(text: str, row: Mapping[str, Any], *, ignore_case: bool = False) -> float:
    """1 when the stripped text equals the ground truth, else 0."""
    said, truth = one_line_end(text).strip(), one_line_end(_truth(row))
    return float(said.casefold() == truth.casefold() if ignore_case else said == truth)


def regex(text: str, row: Mapping[str, Any], *, pattern: Annotated[str, AfterValidator(_check_pattern)]) -> float:
    """1 when the pattern is found; with a group in it, when the last one found holds the ground truth. Else 0."""
    found = list(re.finditer(pattern, one_line_end(text)))
    if not found or not found[-1].re.groups:
        return float(bool(found))
    return float((found[-1][1] or "").strip() == _truth(row))


def has_format(
    text: str,
    row: Mapping[str, Any],
    *,
    tags: Annotated[Sequence[str], Field(min_length=1)] = ("think", "answer"),
    is_open: bool = False,
) -> float:
    """1 when the text is one section per tag, `<think>...</think> <answer>...</answer>`, and nothing else; else 0.

    A section without content is none.

    Args:
        text: The completion.
        row: Not looked at.
        tags: Tags of the sections.
        is_open: The prompt ends with the first opening tag already.
    """
    del row
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    rest = f"{marks[0]}{text}" if is_open else text
    if any(rest.count(mark) != 1 for mark in marks):
        return 0.0
    for index, mark in enumerate(marks):
        before, _, rest = rest.partition(mark)
        if bool(before.strip()) != bool(index % 2):
            return 0.0
    return float(not rest.strip())


def _truth(row: Mapping[str, Any]) -> str:
    truth = row["reward_model"]["ground_truth"]
    if truth is None:
        raise RewardError("the row has no ground truth to compare with: it is null")
    return str(truth).strip()


def math_equal(text: str, row: Mapping[str, Any]) -> float:
    """1 when the text's final answer equals the ground truth, as a number or as an expression (math-verify), else 0.

    An answer that cannot be parsed is a wrong answer of the policy, not a failed score. The parser's time limit needs
    the main thread of its process, which `Scorer` gives it.
    """
    return float(equals(final_answer(Thinking().answer(text)), _truth(row)))


RULES: Mapping[str, Rule] = {
    "exact_match": exact_match,
    "format": has_format,
    "regex": regex,
    "math": math_equal,
    "gsm8k": math_equal,
    "qa": verl.question_answer,
    **verl.RULES,
}
"""Rules by name. (`code` is one too, and runs what the policy wrote: `rl_trainer.rewards.code`.)"""
ISOLATED = ("regex", "math", "gsm8k", *verl.RULES)
"""Rules that run a parser or a pattern on what the policy wrote, and so belong into a process that can be killed."""


def isolated(text: str, row: Mapping[str, Any]) -> float:
    """Apply the rule that `row["rule"]` names, with `row["options"]`: the function of the rules' processes."""
    return RULES[row["rule"]](text, row, **row["options"])


MATH = ("math", "gsm8k", "verl/default", "verl/prime_math", "verl/geo3k")
"""Rules that compare expressions by math-verify."""
DATA_SOURCES: Mapping[str, str] = {
    "reasoning_gym/*": "exact_match",
    "gsm8k": "gsm8k",
    "openai/gsm8k": "gsm8k",
    "math": "math",
    "math_dapo": "math",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "aime*": "math",
    "numina_*": "math",
    "hiyouga/geometry3k": "math",
    "searchR1_*": "qa",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
}
"""Rules by `data_source` of a row (`*`: anything), for rewards that name none."""


def is_text(truth: object) -> bool:
    """Whether a ground truth is a text or a number."""
    return isinstance(truth, (str, int, float))


def _is_accepted(truth: object) -> bool:
    """Whether a ground truth is a text, or texts of which one has to be given."""
    texts = truth.get("target") if isinstance(truth, Mapping) else truth
    texts = [texts] if isinstance(texts, str) else texts
    return isinstance(texts, Sequence) and bool(texts) and all(isinstance(each, str) and each.strip() for each in texts)


TRUTHS: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(("exact_match", "regex", "math", "gsm8k"), is_text),
    **dict.fromkeys(("verl/gsm8k", "verl/math", "verl/math_dapo", "verl/prime_math", "verl/geo3k"), is_text),
    **dict.fromkeys(("qa", "verl/search_r1"), _is_accepted),
}
"""By rule, whether it can compare with a ground truth; `code` reads tests, which its sandbox refuses itself."""


@cache
def rule_of_source(data_source: str) -> str | None:
    """Name of the rule for rows of a data source; None if the source is unknown."""
    return next((rule for known, rule in DATA_SOURCES.items() if fnmatchcase(data_source, known)), None)


def resolve_reward(data_source: str) -> str:
    """Name of the rule for rows of a data source.

    Raises:
        DataError: the source is unknown (lists those that are), or the rule needs a package that is not installed.
    """
    rule = rule_of_source(data_source)
    if rule is None:
        raise DataError(
            f"rows of data_source={data_source!r} have no rule of their own; known are {', '.join(DATA_SOURCES)}. Name "
            "what judges them: reward.parts.answer.kind=rule with reward.parts.answer.rule=math (or exact_match, "
            "gsm8k, regex, format, code), reward.parts.answer.kind=loop for the agent loop's own reward, or "
            "reward.path=FILE.py:FUNCTION"
        )
    check_packages(rule, f"rewards for {data_source!r}")
    return rule


def check_packages(rule: str, what: str) -> None:
    """Check that what a rule needs is installed.

    Raises:
        DataError: it is not (pip line).
    """
    if rule in MATH and importlib.util.find_spec("math_verify") is None:
        raise DataError(f"{what} need math-verify: pip install 'rl-post-trainer[math]'")
