"""Rules that score as verl's scorers of the same data sources do (verl b178a3c); `docs/rewards.md` has the differences.

They see the whole completion, thinking included, as verl's do.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from rl_trainer.errors import DataError, RewardError
from rl_trainer.rewards.answers import final_answer, last_box
from rl_trainer.rewards.equality import equals

_CLIP = 300
"""Characters at the end of a completion that `gsm8k` and `math_dapo` look at."""
_MATH_MARKUP = (
    ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", ""),
    ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""), ("\\%", ""), (" .", " 0."), ("{.", "{0."),
)  # fmt: skip
_DAPO_MARKUP = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_DAPO_UNITS = [
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
]


def _truth(row: Mapping[str, Any]) -> str:
    return str(row["reward_model"]["ground_truth"])


def gsm8k(text: str, row: Mapping[str, Any]) -> float:
    """1 when the last `#### NUMBER` is the ground truth, character by character, else 0."""
    found = re.findall(r"#### (-?[0-9.,]+)", text[-_CLIP:])
    return float(bool(found) and found[-1].replace(",", "") == _truth(row))


def math(text: str, row: Mapping[str, Any]) -> float:
    """1 when the last box equals the ground truth after their markup is made alike, else 0."""
    box = last_box(text)
    return float(box is not None and _math_form(box) == _math_form(_truth(row)))


def math_dapo(text: str, row: Mapping[str, Any]) -> float:
    """1 when what follows the last `Answer:` is the ground truth after their markup is made alike, else -1."""
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", text[-_CLIP:])
    return 1.0 if found and _dapo_form(found[-1]) == _dapo_form(_truth(row)) else -1.0


def prime_math(text: str, row: Mapping[str, Any]) -> float:
    """1 when the answer equals the ground truth, else 0: as `math`, by our parser."""
    return float(equals(final_answer(text), _truth(row)))


def geo3k(text: str, row: Mapping[str, Any]) -> float:
    """0.9 for the right answer in the last box, and 0.1 for thinking in tags before a box."""
    box = last_box(text)
    is_right = box is not None and equals(final_answer(f"\\boxed{{{box}}}"), _truth(row))
    has_format = re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", text, re.DOTALL) is not None
    return 0.9 * is_right + 0.1 * has_format


def question_answer(text: str, row: Mapping[str, Any]) -> float:
    """1 when the text in the last `<answer>` tags is one of the accepted answers, else 0.

    Case, punctuation and articles do not count. The ground truth is a text, a list of texts, or `{"target": ...}`.
    """
    truth = row["reward_model"]["ground_truth"]
    truth = truth["target"] if isinstance(truth, Mapping) else truth
    accepted: list[Any] = [truth] if isinstance(truth, str) else list(truth) if truth is not None else []
    if not accepted:
        raise RewardError("the row has no ground truth to compare with: it is null or empty")
    said = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return float(bool(said) and _bare(said[-1]) in {_bare(str(each)) for each in accepted})


def _bare(text: str) -> str:
    """Text without case, punctuation and articles, as SQuAD's exact match compares it."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def search_r1(text: str, row: Mapping[str, Any]) -> float:
    """As `qa`; a quarter of the reward with more than ten `<answer>` or `</answer>`."""
    is_spam = text.count("<answer>") > 10 or text.count("</answer>") > 10
    return question_answer(text, row) / (4 if is_spam else 1)


def _math_form(text: str) -> str:
    for old, new in _MATH_MARKUP:
        text = text.replace(old, new)
    text = text.split("\\text{ ")[0]
    text = f"0{text}" if text.startswith(".") else text
    name, equal, value = text.partition("=")
    if equal and "=" not in value and len(name) <= 2:
        text = value
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac([^{])(?=\{)", r"\\frac{\1}", text)
    text = "\\frac{1}{2}" if text == "0.5" else text
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)


def _dapo_form(text: str) -> str:
    text = text.split("=")[-1]
    for old, new in (*_DAPO_MARKUP, *((unit, "") for unit in _DAPO_UNITS)):
        text = text.replace(old, new)
    text = re.sub(r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$", text)
    for command in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    return (text.replace(",", "") if text.replace(",", "").isdigit() else text).strip()


def default(text: str, row: Mapping[str, Any]) -> float:
    """Score by the rule that verl has for the row's data source."""
    return RULES[rule_of(row["data_source"])](text, row)


RULES = {
    "verl/default": default,
    "verl/gsm8k": gsm8k,
    "verl/math": math,
    "verl/math_dapo": math_dapo,
    "verl/prime_math": prime_math,
    "verl/geo3k": geo3k,
    "verl/search_r1": search_r1,
}
"""Rules by name. (`verl/prime_code` is one too: `rl_trainer.rewards.code`.)"""
_SOURCES = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo": "math_dapo",
    "math": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "aime*": "math_dapo",
    "numina_*": "prime_math",
    "codecontests": "prime_code",
    "apps": "prime_code",
    "codeforces": "prime_code",
    "taco": "prime_code",
    "hiyouga/geometry3k": "geo3k",
    "searchR1_*": "search_r1",
}


def rule_of(data_source: str) -> str:
    """Name of the rule that `verl/default` scores rows of a data source with.

    Raises:
        DataError: verl has none.
    """
    for known, name in _SOURCES.items():
        if fnmatchcase(data_source, known):
            return f"verl/{name}"
    raise DataError(
        f"verl has no scorer for rows of data_source={data_source!r}, only for {', '.join(_SOURCES)}; name a rule, or "
        "reward.path=FILE.py:FUNCTION"
    )
