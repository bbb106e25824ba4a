"""Equality of a final answer with a ground truth: numbers by value, words as words, expressions by math-verify."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rl_trainer.errors import RewardError
from rl_trainer.rewards.answers import exactly
from rl_trainer.rewards.numbers import CHARACTERS, plain

if TYPE_CHECKING:
    from rl_trainer.rewards.answers import Answer

_BOUND = re.compile(
    r"[<>≤≥≠±…]|\\(?:in|not|cup|cap|ldots|dots)\b|\.\.\.|(?i:\b(?:or|and|not|to|from|between)\b)|[,;]|\\\{|[-+]\s*[-+]|\d\s*_|\\p?b?mod\b|\b(?:is|wrong|incorrect|false)\b|"
    r"(?<!\\)\b[A-Za-z]{2,}.*\d"
)
_NAME = re.compile(r"^\s*[^=\d,]*=(?!.*=)")
_DECIMAL_COMMA = re.compile(r"(?<!\d)\d+,(?:\d{1,2}|\d{4,})(?!\d)")
_BRACKETS = re.compile(r"([(\[]).*,.*([)\]])$", re.DOTALL)
_METRIC = frozenset(("mm", "cm", "dm", "m", "km", "mg", "g", "kg", "ml", "l", "s", "min", "h"))
_CHOICE = re.compile(
    r"^\W*(?:(?i:option|choice|answer)\s*)?\(?([A-J])(?:[).:]|\s*$|~?\s*\)|,? (?:not|because|since|which)\b)"
)


def equals(answer: Answer | None, truth: str) -> bool:
    """Whether an answer equals the ground truth.

    Raises:
        RewardError: nothing can be compared with the ground truth.
    """
    if not truth:
        raise RewardError("the row has no ground truth to compare with: it is empty")
    gold = exactly(truth)
    if answer is not None and answer.is_exact and answer.number is not None and "≈" in plain(answer.content):
        return any(equals(exactly(side), truth) for side in plain(answer.content).split("≈") if side.strip())
    if gold.number is not None and not _DECIMAL_COMMA.search(truth):
        return answer is not None and _equals_number(answer, gold, truth) and _same_unit(answer.content, truth)
    if answer is None or not answer.content:
        _parsed(truth)
        return False
    return _same_words(answer.content, truth) or _equals_expression(answer, truth)


def _equals_number(answer: Answer, gold: Answer, truth: str) -> bool:
    assert gold.number is not None, "the caller has looked"
    if answer.number is None:
        content = _NAME.sub("", plain(answer.content))
        is_one = answer.is_exact and "\\\\" not in answer.content and "=" not in content and not _BOUND.search(content)
        return is_one and bool(content.strip()) and _verified(truth, answer.content)
    if answer.is_percent == gold.is_percent:
        return answer.number == gold.number
    percent, other = (answer.number, gold.number) if answer.is_percent else (gold.number, answer.number)
    return percent / 100 == other or (percent == other and abs(other) >= 1)


def _equals_expression(answer: Answer, truth: str) -> bool:
    if not answer.is_exact and answer.number is None and not re.search(r"\\|\d", answer.content):
        _parsed(truth)
        return False
    content = re.sub(r"^\s*\([a-z, ]+\)\s*=", "", answer.content)
    given, wanted = plain(content), plain(truth)
    is_list, are_many = _is_list(given), _is_list(wanted) or wanted.lstrip().startswith("\\{")
    if are_many:
        content = re.sub(r"^\s*\\text\s*\{([^{}]*)\}\s*$", r"\1", content)
        content = re.sub(r"\\text\s*\{\s*,\s*\}", ", ", content)
        content = re.sub(r"\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b", ", ", content)
    mine, theirs = _BRACKETS.match(_bare(content)), _BRACKETS.match(_bare(truth))
    if theirs is not None and mine is None and (named := _named_in_order(given)) is not None:
        content, mine = f"({named})", theirs
        given, is_list = content, False
    is_interval = mine is not None or theirs is not None
    if not is_interval and [mark in given for mark in "<>≤≥≠"].count(True) and not re.search("[<>≤≥≠]", wanted):
        return False
    if ("≠" in given) != ("≠" in wanted) or (
        not is_interval and bool(re.search("[≤≥]", given)) != bool(re.search("[≤≥]", wanted))
    ):
        return False
    if (is_list and not are_many and "±" not in wanted) or ("±" in given and "±" not in wanted and not are_many):
        return False
    if "=" in given and "=" not in truth and not _NAME.match(given) and not are_many:
        return all(_verified(truth, side) for side in re.split(r"(?<![<>!])=", content))
    if theirs is not None:
        if mine is not None and mine.groups() != theirs.groups():
            return False
        if mine is None and is_list:
            content = f"({content})"  # of a pair, whose order counts
    is_same = _verified(truth, content)
    return is_same or (answer.number is not None and answer.is_exact and _verified(truth, str(answer.number)))


def _same_unit(content: str, truth: str) -> bool:
    """Whether units of the metric system, if both have one, are the same."""
    said, wanted = ({*re.findall(r"[a-z]+", plain(text))} & _METRIC for text in (content, truth))
    return not said or not wanted or said == wanted


def _named_in_order(given: str) -> str | None:
    """Values of `x = 3, y = 4`, whose names are in the order of the alphabet."""
    named = re.findall(r"([a-z])\s*=\s*([^,=]+)", given)
    names = [name for name, _ in named]
    is_all = len(named) > 1 and given.count("=") == len(named) and given.count(",") == len(named) - 1
    return ", ".join(value for _, value in named) if is_all and names == sorted(set(names)) else None


def _is_list(text: str) -> bool:
    """Whether a text lists several values outside of brackets."""
    outside = re.sub(r"[(\[{][^()]*[)\]}]", "", text)
    return re.search(r"[,;]|\b(?:or|and)\b", re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", outside)) is not None


def _bare(content: str) -> str:
    return re.sub(r"\\(?:left|right)(?![a-zA-Z])|\\[,;:! ]|\$|^\s*\w\s*\\in\b", "", content).strip()


def _same_words(content: str, truth: str) -> bool:
    """Whether two texts are the same words or the same choice, case and markup aside."""
    said, wanted = (re.sub(r"[\s~$*_.\"'`{}]+", " ", plain(text)).strip().casefold() for text in (content, truth))
    if said == wanted and said:
        return True
    letter = re.fullmatch(r"\(?([A-J])\)?", re.sub(r"[\s~$.*]", "", plain(truth)))
    return (
        letter is not None
        and (choice := _CHOICE.match(plain(content).replace("~", ""))) is not None
        and (choice[1] == letter[1])
    )


def _parsed(truth: str) -> Any:
    from math_verify import parse

    gold = parse(f"\\boxed{{{truth}}}")
    if not gold:
        raise RewardError(f"the ground truth {truth!r:.80} is nothing that math-verify can compare with")
    return gold


def _verified(truth: str, content: str) -> bool:
    from math_verify import parse, verify

    return bool(verify(_parsed(truth), parse(f"\\boxed{{{content.translate(CHARACTERS)}}}")))
