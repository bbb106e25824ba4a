"""Answer parser: the final answer that a text states, and numbers as people and models write them.

Every rule that compares answers, and majority votes, read texts with it. An answer that is ambiguous ("4 or 5"),
negated ("not 4"), bounded ("> 4") or withdrawn is no answer: a wrong one that is paid costs a run more than a right one
that is not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Literal

from rl_trainer.rewards.numbers import number_in_words, plain, tokens_of

if TYPE_CHECKING:
    from fractions import Fraction

    from rl_trainer.rewards.numbers import Token


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_MAX_CHARACTERS = 20_000
"""Characters of a text that are read, from its end: reading is linear, and a final answer is not far from the end."""
_MOST_BOXES = 20
_SHORT = 80
"""Characters below which a text may be its answer as a whole."""
_LONGEST_SLOT = 500
"""Characters of a statement of an answer that are read."""
_UNIT_LETTERS = frozenset("mgshLlWVAJNCFTKd")
_NOT_BEFORE = re.compile(
    r"(?:\b(?:not|never|nor|neither|instead of|rather than|except|between|cannot be|(?:more|less|fewer|greater|larger|"
    r"smaller|higher|lower|bigger|other|different) (?:than|from)(?: or equal to)?|at least|at most|over|under|"
    r"above|below|beyond|up to|exceeds?|exceeding)|n't)"
    r"(?: (?:equal to|equal|be|is|exactly|simply|just|really|actually|the|answer|a|an|to))*$|"
    r"\b(?:false|untrue|not true|not the case|doubt|unlikely|impossible|anything but)(?: (?:that|if))?"
    r"(?: [a-z])?(?: =)?$"
)
_NOT_AFTER = re.compile(
    r"^(?:, )?(?:(?:but|and|which|that|this|it) )*(?:is|was|are|would be|seems|looks|must be)"
    r"(?: (?:also|clearly|actually|definitely|just|simply|the|a|an))* "
    r"(?:not\b|wrong|incorrect|false|mistaken|impossible|invalid|too \w+)|"
    r"^(?:\w+ )?(?:isn't|wasn't|cannot be|can't be)\b|"
    r"^(?:, )?(?:wrong|incorrect|false)\b|"
    r"^(?:(?:do|does|did) not|(?:do|does|did|wo)n't|fails)\b|^or (?:more|less|fewer|greater|so|higher|lower)\b"
)
_ASSUMED = re.compile(
    r"\b(?:(?P<denied>(?:false|untrue|not true|not the case|doubt|unlikely|impossible)(?: that)?)|if|unless|suppose|"
    r"supposing|assume|assuming|whether|guess(?:ed)?|thought|claims?)(?: that)? "
    r"(?:the |my |this |its )?(?:final |correct )?$",
    re.IGNORECASE,
)
_NAMED = re.compile(r"[*_(]*(?:[A-Z]|(?:yes|no|true|false|none|option|choice)\b)")
_WITHDRAWN = re.compile(
    r"\b(?:wait|oops|scratch that|hold on|my mistake|i made an? (?:mistake|error)|let me (?:redo|correct|fix)|i mean|"
    r"on second thought|or rather)\b|(?:^|[.!?\n*]\s*)(?:actually|no|correction|sorry|hmm+)\b"
    r"|\b(?:that|this|it|answer)(?: is|'s| was) (?:not|wrong|incorrect|false)\b|\b(?:isn't|wasn't|can't be|cannot be|"
    r"doesn't (?:seem|look)) (?:right|correct|true)\b|\bdoes(?:n't| not) (?:work|make sense)\b",
    re.IGNORECASE,
)
_CONFIRMED = re.compile(r"(?<!not )(?<!n't )\b(?:yes|correct|right)\b", re.IGNORECASE)
_CIRCUMSTANCES = _set("in for out over after per within during by at on from every each with since until before")
_LABELS = _set("week day year step chapter number part problem question figure option case equation month")
_MEASURES = _set("hours hour minutes feet foot ft dollars pounds years year months weeks days degrees hundred")
_FILLERS = _set("all only just the his her their its these those last next first another a of that than")
_BOX = re.compile(
    r"(?:\\ ?[bB]oxed|\\fbox|(?<![\\A-Za-z])boxed(?=\{)|\x08oxed)\s*"
    r"(?:(?P<box>\{)|(?P<bare>-?\d+|[A-Za-z](?![A-Za-z])))|"
    r"\\[{}]|[{}]"
)
_JOINT = re.compile(r"[\s$]*(?:,|or|and|, or|, and|\\text\{ ?(?:or|and) ?\})[\s$]*(?:[a-z]\s?=\s?)?")
_HASHES = re.compile(r"(?<!#)####(?!#)\s*(?=\S)(?!\**\d+[.):]\s+[A-Za-z])(?=[-+−$€£.*(\\]*\s*[\d\\]|[a-zA-Z] ?=)")
_PHRASE = re.compile(
    r"\b(?:answers?(?: to (?:this|the) \w+)?|(?:correct|right) (?:option|choice)|"
    r"(?:solution|root|value)s?(?= (?:is|are)\b:? *[$\\(]*"
    r"(?:[a-z] ?=|[-−.]?\d)))[*_`\"' ]*(?:\b(?:is|are|was|would be|should be|must be|equals)\b|=|[:：])"
    r"(?:[ ,]+(?:therefore|thus|simply|then|hence|indeed|just|found to be)\b)?[*_`\s:：]*|答案[是为為：:]+\s*",
    re.IGNORECASE,
)
_TAG = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_MATH = re.compile(r"\$\$(.+?)\$\$|(?<![\\$])\$([^$\n]+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_END = re.compile(r"[.!?。](?=[\s*)\"'$]|$)(?!\s*\d)|\n|(?=</)")


@dataclass(frozen=True, slots=True)
class Answer:
    """Final answer that a text states."""

    content: str
    """What is written, such as the inside of a box."""
    number: Fraction | None = None
    """Its value, where it is a single number."""
    is_percent: bool = False
    """Whether the number is in percent; its value is that of the number alone."""
    is_exact: bool = False
    """Whether the content is the answer and nothing else, rather than words that state it."""


@dataclass(slots=True)
class _Term:
    """Number or arithmetic expression of a sentence, with the positions of its tokens."""

    start: int
    end: int
    value: Fraction | None
    is_percent: bool = False
    is_lone: bool = True
    is_denied: bool = False
    is_left: bool = False
    is_false: bool = False
    """Whether it is the right side of an equation that does not hold."""
    is_aside: bool = False
    """Whether it is in parentheses."""


def final_answer(text: str) -> Answer | None:
    """Final answer of a text; None if it states none, or none that is definite.

    The last of these that the text has: a box, `#### answer`, `<answer>` tags, "the answer is"; else the number of the
    last sentence that has one. If what follows withdraws it ("Wait, ..."), the answer is what is stated from there on.
    """
    return _final(re.sub(r"<<[^<>]*>>", "", one_line_end(text)[-_MAX_CHARACTERS:]))  # calculator notes of GSM8K


def one_line_end(text: str) -> str:
    """Text whose lines all end in a line feed."""
    return re.sub("\r\n?|[\x85\u2028\u2029\v\f]", "\n", text)


def _final(text: str) -> Answer | None:
    boxes = _answer_boxes(text)
    spans = [span for span in _spans(text) if not any(box[0] < span[0] < box[1] for box in boxes[-_MOST_BOXES:])]
    marks = sorted([*boxes, *spans], key=lambda mark: mark[0])
    for start, end, content, kind in reversed(marks):
        if kind == "phrase" and (assumed := _ASSUMED.search(text[max(start - 60, 0) : start])) is not None:
            if assumed["denied"] is not None:
                return None
            continue
        if kind == "phrase" and not re.search(r"[\d\\$]", plain(content)) and number_in_words(content) is None:
            if _NAMED.match(content) is None:
                continue  # such as "the answer is correct"
            return Answer(content.strip("*_ .\n"), is_exact=True)
        if (again := _WITHDRAWN.search(text, end)) is not None:
            later = _final(text[again.end() :])
            if later is not None or not _CONFIRMED.search(text, again.end()):
                return later
        if kind == "box":
            return None if _is_denied(text[:start], text[end:]) else exactly(content)
        return _first_of(content)
    withdrawn = max((found.end() for found in _WITHDRAWN.finditer(text)), default=0)
    if withdrawn and not re.search(r"\d", text[withdrawn:]) and not _CONFIRMED.search(text, withdrawn):
        return None
    return _last_of(text)


def last_box(text: str) -> str | None:
    """Content of the last closed box."""
    boxes = _boxes(text)
    return boxes[-1][2] if boxes else None


def answer_of(text: str) -> str:
    """Answer of a completion, for majority votes: its number, written as one fraction; else its words."""
    answer = final_answer(text)
    if answer is None or not answer.content:
        return text.strip()
    if answer.number is None:
        return answer.content.strip()
    return str(answer.number / 100 if answer.is_percent else answer.number)


def _boxes(text: str) -> list[tuple[int, int, str, str]]:
    """Closed boxes: start, end, content."""
    found: list[tuple[int, int, str, str]] = []
    opened: list[tuple[int, int] | None] = []
    for mark in _BOX.finditer(text):
        if mark["bare"] is not None:
            found.append((mark.start(), mark.end(), mark["bare"], "box"))
        elif mark["box"] is not None:
            opened.append((mark.start(), mark.end()))
        elif mark[0] == "{":
            opened.append(None)
        elif mark[0] == "}" and opened and (box := opened.pop()) is not None:
            found.append((box[0], mark.end(), text[box[1] : mark.start()], "box"))
    return sorted(found)


def _answer_boxes(text: str) -> list[tuple[int, int, str, str]]:
    """Boxes, where those that "or", "and" or a comma joins are one."""
    found: list[tuple[int, int, str, str]] = []
    for start, end, content, kind in _boxes(text):
        if found and _JOINT.fullmatch(text, found[-1][1], start):
            first = found.pop()
            start, content = first[0], f"{first[2]}, {content}"
        found.append((start, end, content, kind))
    return found


def _spans(text: str) -> list[tuple[int, int, str, str]]:
    """Answers behind `####`, in tags, and behind "the answer is"."""
    found: list[tuple[int, int, str, str]] = []
    for mark in _HASHES.finditer(text):
        end = text.find("\n", mark.end())
        end = min(len(text) if end < 0 else end, mark.end() + _LONGEST_SLOT)
        found.append((mark.start(), mark.end(), text[mark.end() : end], "hashes"))
    found += [(mark.start(), mark.start(1), mark[1], "tag") for mark in _TAG.finditer(text)]
    for mark in _PHRASE.finditer(text):
        math = _MATH.match(text, mark.end())
        ending = _END.search(text, math.end() if math else mark.end())
        end = min(len(text) if ending is None else ending.start(), mark.end() + _LONGEST_SLOT)
        found.append((mark.start(), mark.end(), text[mark.end() : end], "phrase"))
    return found


def exactly(content: str) -> Answer:
    """Answer that is the whole content, as of a box: a number with its unit, or else an expression."""
    content = content.strip().strip("$").rstrip("\\ \n\t").lstrip()
    tokens = tokens_of(plain(re.sub(r"^\s*([-+])\s+(?=[\d.\\$])", r"\1", content)))
    terms = _terms(tokens, is_exact=True)
    answer = Answer(content, is_exact=True)
    right = [term for term in terms if not term.is_left]
    if len(right) == 1 and right[0].value is not None and not right[0].is_denied:
        term = right[0]
        before = [] if terms[0].is_left else tokens[: term.start]
        rest = [*before, *tokens[terms[-1].end if terms[-1].is_left else term.end :]]
        is_open = tokens[-1].text == "="
        if (
            not is_open
            and all(t.kind in ("word", "currency", "end", "name") or t.text in "=≈()[]$,*/\"':~`" for t in rest)
            and not (any(t.text.lower() in ("or", "and", "to", "not") for t in rest))
        ):
            return replace(answer, number=term.value, is_percent=term.is_percent)
    if not terms and (number := number_in_words(content)) is not None:
        return replace(answer, number=number)
    return answer


def _first_of(content: str) -> Answer:
    """Answer of a sentence's part that states it: its first number, or the expression between dollar signs."""
    content = content.strip()
    whole = exactly(content.strip("*_ .\n"))
    if whole.number is not None:
        return whole
    math = _MATH.match(content.lstrip("*_ "))
    inside = next(filter(None, math.groups()), "") if math else ""
    terms = [term for term in _terms(tokens_of(plain(content))) if not term.is_left]
    answer = Answer(inside.strip() or content.strip("*_ ."), is_exact=math is not None)
    return _chosen(answer, content, terms, 0)


def _last_of(text: str) -> Answer | None:
    """Answer of a text without a mark: the last number of its last sentence that has one, circumstances aside."""
    tokens = tokens_of(plain(text))
    starts = [0, *(i + 1 for i, token in enumerate(tokens) if token.kind == "end"), len(tokens)]
    for start, end in zip(starts[-2::-1], starts[:0:-1], strict=True):
        sentence = tokens[start:end]
        terms = _terms(sentence)
        if not terms:
            continue
        right = [term for term in terms if not term.is_left]
        outside = [term for term in right if not term.is_aside] or right
        main = [term for term in outside if not _is_circumstance(sentence, term)] or outside
        is_exact = len(text) < _SHORT and not re.search(r"[^\W\d_]{2}", text)
        return _chosen(Answer(text.strip(), is_exact=is_exact), text, main, -1, sentence, right)
    spans = list(_MATH.finditer(text))
    content = next(filter(None, spans[-1].groups()), "") if spans else text
    if not content.strip():
        return None
    number = number_in_words(content) if len(content) < _SHORT else None
    return Answer(content.strip(), number, is_exact=bool(spans) or len(text) < _SHORT)


def _chosen(
    answer: Answer,
    text: str,
    terms: list[_Term],
    which: Literal[0, -1],
    tokens: list[Token] | None = None,
    near: list[_Term] | None = None,
) -> Answer:
    tokens = tokens_of(plain(text)) if tokens is None else tokens
    left = [term for term in terms if not term.is_denied]
    if not left:
        number = number_in_words(text) if not terms else None
        return replace(answer, number=number) if number is not None else answer if not terms else Answer("")
    chosen = left[which]
    others = [
        (a, b)
        for a, b in pairwise(left if near is None else [t for t in near if not t.is_denied])
        if chosen in (a, b) and _differ(a, b)
    ]
    if chosen.value is None or any(_are_joined(tokens[a.end : b.start]) for a, b in others):
        return replace(answer, is_exact=answer.is_exact and chosen.value is None)
    return replace(answer, number=chosen.value, is_percent=chosen.is_percent)


# --- sentences ---


def _terms(tokens: list[Token], *, is_exact: bool = False) -> list[_Term]:
    """Numbers and expressions of a sentence, in order."""
    terms: list[_Term] = []
    index = last = depth = 0
    while index < len(tokens):
        if tokens[index].kind != "number":
            index += 1
            continue
        start = index
        index += 1
        while index + 1 < len(tokens) and _continues(tokens, index):
            index += 2 if tokens[index + 1].kind == "number" else 3
        first, is_lone = tokens[start], index == start + 1
        value = first.value if is_lone and not _is_scaled(tokens, start, index, is_exact=is_exact) else None
        before = tokens[start - 1] if start else None
        if before is not None and (before.kind == "command" or (before.kind == "operator" and start > 1)):
            value = None
        depth += sum({"(": 1, ")": -1}.get(token.text, 0) for token in tokens[last:start])
        last = start
        terms.append(_Term(start, index, value, first.is_percent, is_lone, is_aside=depth > 0))
    for term, following in zip_longest(terms, terms[1:]):
        _relate(tokens, term, following)
    return terms


def _continues(tokens: list[Token], index: int) -> bool:
    """Whether an operator and an operand follow."""
    operator, after = tokens[index], tokens[index + 1]
    is_operator = operator.kind == "operator" or operator.text == "^"
    is_currency = after.kind == "currency" and index + 2 < len(tokens) and tokens[index + 2].kind == "number"
    return is_operator and (after.kind == "number" or is_currency)


def _is_scaled(tokens: list[Token], start: int, end: int, *, is_exact: bool) -> bool:
    """Whether a number is the coefficient of something (`4x`, `x^4`), or its own sign is not certain."""
    if start and tokens[start - 1].text in ("^", "_", "\\"):
        return True
    if (
        start > 1
        and tokens[start - 1].text == "("
        and tokens[start - 2].kind == "word"
        and not tokens[start - 1].has_space
    ):
        return is_exact  # such as f(4)
    after = tokens[end] if end < len(tokens) else None
    if after is None:
        return False
    if after.kind == "command" or (after.text == "(" and is_exact):
        return after.text not in ("}", "\\") or (after.text == "\\" and is_exact)
    if after.kind == "operator":
        is_bound = after.text == "+" and (end + 1 == len(tokens) or tokens[end + 1].kind in ("end", "word"))
        return is_bound or (is_exact and end + 1 < len(tokens))
    is_letter = after.kind == "word" and len(after.text) == 1 and after.text.isascii()
    if after.kind == "name":
        return not after.has_space
    if is_exact:
        return (is_letter and not after.text.startswith("~")) or (after.text == "!" and not after.has_space)
    return is_letter and not after.has_space and after.text not in _UNIT_LETTERS


def _relate(tokens: list[Token], term: _Term, following: _Term | None) -> None:
    """Set whether a term is denied or bounded, or the left side of an equation."""
    before = [
        t for t in tokens[max(term.start - 12, 0) : term.start] if t.kind != "currency" and t.text not in "*($~\"'"
    ]
    after = [t for t in tokens[term.end : term.end + 12] if t.text not in "*()$~\"'"]
    term.is_denied = (
        term.is_denied
        or (bool(before) and before[-1].text in "<>≤≥≠±")
        or (bool(after) and (after[0].text in "<>≤≥≠±" or after[0].text == "…"))
        or _NOT_BEFORE.search(_words(before[-8:])) is not None
        or _NOT_AFTER.search(_words(after[:8])) is not None
    )
    if following is None:
        return
    between = tokens[term.end : following.start]
    if term.is_denied and _are_joined(between) and not any(t.text == "," for t in between):
        following.is_denied = True  # such as "between 4 and 6"
    relations = [t.text for t in between if t.kind == "relation"]
    if (
        relations
        and all(text in "=≈" for text in relations)
        and not any(t.kind == "end" or t.text in (",", "or", "and") for t in between)
    ):
        if term.is_lone and not following.is_lone and term.value is not None:
            following.is_left = True  # such as 32 = 2^5
            return
        term.is_left = True
        if term.is_false:
            following.value, following.is_false = None, True
        is_bare = all(t.kind in ("relation", "currency") or t.text in "*$()" for t in between)
        is_start = term.start == 0 or tokens[term.start - 1].kind in ("currency", "end", "mark")
        is_start = is_start and not (term.start and tokens[term.start - 1].text == "(")
        is_both = term.is_lone and following.is_lone and None not in (term.value, following.value)
        if is_bare and is_start and is_both and not _are_close(term, following, is_exact="≈" not in relations):
            following.value, following.is_false = None, True  # such as 5 = 4


def _differ(one: _Term, other: _Term) -> bool:
    return None in (one.value, other.value) or not _are_close(one, other, is_exact=True)


def _are_close(one: _Term, other: _Term, *, is_exact: bool) -> bool:
    a, b = (t.value / 100 if t.is_percent else t.value for t in (one, other) if t.value is not None)
    return a == b if is_exact else abs(a - b) <= max(abs(a), abs(b)) / 50


def _words(tokens: list[Token]) -> str:
    return " ".join(token.text.strip("~").lower() for token in tokens)


def _is_denied(before: str, after: str) -> bool:
    """Whether the words around a box deny its content."""
    head = [t for t in tokens_of(plain(before[-80:])) if t.text not in "*($~\"'"]
    tail = [t for t in tokens_of(plain(after[:80])) if t.text not in "*)$~\"'."]
    is_bounded = bool(head) and head[-1].text in "<>≤≥≠±"
    return (
        is_bounded
        or _NOT_BEFORE.search(_words(head[-8:])) is not None
        or _NOT_AFTER.match(_words(tail[:8])) is not None
    )


def _are_joined(between: list[Token]) -> bool:
    """Whether two numbers are one list, range or choice: "4 or 5", "4 apples, 5", "10-12"."""
    if not between:
        return True
    texts = [t.text.lower().strip("~") for t in between if t.kind != "currency" and t.text not in "*$()\"'~"]
    joints = {"or", "and", "to", ",", "-", "/", "&", ";", "|", "versus", "vs", "maybe", "perhaps", "possibly", "even"}
    if texts[-1:] == ["="]:
        texts = texts[:-2]  # the name of the second value
    if len(texts) == 1 and texts[0] in _MEASURES:
        return True  # such as 3 hours 30 minutes
    joined = [text for text in texts if text in joints]
    units = [text for text in texts if text not in joints]
    return bool(joined) and len(units) <= 1 and (not units or texts[0] == units[0])


def _is_circumstance(tokens: list[Token], term: _Term) -> bool:
    """Whether a number is one of time, place or share ("in 2 months", "week 3") rather than a sentence's result."""
    words = [t.text.lower() for t in tokens[max(term.start - 8, 0) : term.start] if t.kind != "currency"]
    while words and words[-1] in _FILLERS:
        words.pop()
    return bool(words) and words[-1] in _CIRCUMSTANCES | _LABELS
