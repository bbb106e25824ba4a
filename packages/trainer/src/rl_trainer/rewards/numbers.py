"""Numbers as people and models write them: signs, separators, fractions, percent, powers, words."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

_MAX_DIGITS, _MAX_EXPONENT = 400, 400
"""Largest numbers; beyond them a few characters would take all memory."""
CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2012\u2013\u2014\ufe63\uff0d\u207b", "-"),
        **{chr(code): " " for code in (0xA0, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000)},
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad", ""),
        **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F) if code != 0xFF0D},
        **dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹", (f"^{digit}" for digit in range(10)), strict=True)),
        **dict(zip("₀₁₂₃₄₅₆₇₈₉", (f"_{digit}" for digit in range(10)), strict=True)),
        **dict(zip("\u2044\u2215\u00d7\u00b7\u22c5\u2217\u00f7\u066b\u066c\u3002\u2019", "//****/.,.'", strict=True)),
        **dict(zip("\x85\u2028\u2029\r\v\f", "\n" * 6, strict=True)),
    }
)
_LENGTHS = "[mck]?m|ft|feet|foot|in|inch|inches|yd|yards?|mi|miles?|(?:centi)?met(?:er|re)s?|units?|s|sec|seconds?"
_SPELLINGS = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\(?:approx|simeq|sim)(?![a-zA-Z])|[≃≅]|(?<![\d~\\])~(?=\s?[\d$])", " ≈ "),
        (r"(?<=\d)\s?~\s?(?=\d)", "-"),
        (r"(?<![\d)])\*{2,}|\*{2,}(?![\d(-])|__(?=\d)|(?<=\d)__", " "),
        (r"</?[A-Za-z]\w*\s*/?>", " "),
        (r"\.{3,}", "…"),
        (r"\\(?:lor|vee)(?![a-zA-Z])", " or "),
        (r"\\(?:land|wedge)(?![a-zA-Z])", " and "),
        (r"(?<=\d)(?:\{,\}|,\\!|\\,|\\!)\s*(?=\d{3})", ","),
        (r"(?<=\d)(?=\\[dtc]?frac)", " "),
        (r"\\[dtc]?frac\s*(\d)\s*(\d)", r"\1/\2 "),
        (r"\\[dtc]?frac\s*\{\s*([-+]?[\d.,]+)\s*\}\s*\{?\s*([\d.,]+)\s*\}?", r"\1/\2 "),
        (r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}", r" ~\1~ "),
        (r"\^\s*\{?\s*\\?(?:circ|degree)\b\s*\}?|\\degree|°", " ~degrees~ "),
        (r"\{\s*([-+]?[\d.,]+)\s*\}", r"\1"),
        (r"\\(?:left|right|displaystyle|quad|qquad|boldsymbol|bm)(?![a-zA-Z])|\\[,;:!()\[\] ]", " "),
        (r"\{\s*([-+])\s*\}", r"\1"),
        (r"\\(?:neq|ne)(?![a-zA-Z])|\\not\s*=|!=|=/=", " ≠ "),
        (r"\\(?:geq|geqslant|ge)(?![a-zA-Z])|>=", " ≥ "),
        (r"\\(?:leq|leqslant|le)(?![a-zA-Z])|<=", " ≤ "),
        (r"\\gt(?![a-zA-Z])", " > "),
        (r"\\lt(?![a-zA-Z])", " < "),
        (r"\\pm(?![a-zA-Z])|\+/-", " ± "),
        (r"\\(?:times|cdot|ast)(?![a-zA-Z])", "*"),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"\\(?:Rightarrow|implies|to|rightarrow)(?![a-zA-Z])|[⇒→]|=>|->", " = "),
        (r"\\([$%#&])", r"\1"),
        (rf"([\d~/]\s*~?(?:{_LENGTHS})~?)\s*\^\s*\{{?[23]\}}?(?!\d)", r"\1"),
        (r"(?i)\b(?:minus|negative)\s+(?=[\d.$])", "-"),
    )
)
_DIGITS = r"(?:\d{1,3}(?:,\d{2,3})*,\d{3}|\d{1,3}(?:[ '_]\d{3})+)(?!\d)|\d+"
_TOKEN = re.compile(
    rf"""
    (?P<currency>(?:US|HK|R)?[$€£¥₹₩](?=\s?[-\d.])|(?<![A-Za-z])(?:Rs\.?|USD|EUR|GBP|INR|CNY|RMB)(?=\s?\d))
    |(?P<number>(?:{_DIGITS}|(?=\.\d))(?:(?:\.\d+)+|,\d+(?!,?\d)|\.(?![\dA-Za-z]))?(?::\d+)*)
     (?P<power>[eE][-+]?\d+(?![\dA-Za-z])|\s?[*x]\s?10\s?(?:\^|\*\*)\s?[-+]?\d+)?
     (?:\s?(?P<slash>/)\s?(?P<under>\d[\d,]*)(?![.\d]|/))?
     (?:(?<!\.)\s(?:and\s)?\s?(?P<over>\d+)\s?/\s?(?P<below>\d+)(?![\d/]))?
     (?P<percent>\s?%|\spercent\b)?
     (?P<scale>\s*~?\s*(?:hundred|thousand|million|billion|trillion)\b|[kKMB]\b)?
    |(?P<name>[A-Za-z]+\d[\dA-Za-z]*)
    |(?P<word>~?[^\W\d_]+(?:['-][^\W\d_]+)*)
    |(?P<command>\\[a-zA-Z]+|[{{}}^_\\√π∞])
    |(?P<relation>[=≈<>≤≥≠±])
    |(?P<operator>[-+*/])
    |(?P<end>\n|[.!?;](?=[\s*)\]"'$~]|$))
    |(?P<mark>\S)
    """,
    re.VERBOSE,
)
_SCALES = {"k": 3, "m": 6, "b": 9, "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_WORDS = {word: n for n, word in enumerate(_ONES.split())} | {w: 10 * n for n, w in enumerate(_TENS.split(), 2)}
_JOINTS = ("or", "and", "to", "not", "less", "more", "plus", "minus", "times")


@dataclass(frozen=True, slots=True)
class Token:
    """Token of a plain text: a number, a word, a mark."""

    kind: str
    text: str
    has_space: bool
    value: Fraction | None = None
    is_percent: bool = False


def plain(text: str) -> str:
    """Text with one spelling of digits, signs, spaces, fractions and relations."""
    text = re.sub("[¼½¾⅐-⅞]", lambda found: f" {unicodedata.normalize('NFKC', found[0])} ", text)
    text = "".join(str(unicodedata.decimal(c)) if c > "\x7f" and c.isdecimal() else c for c in text)
    text = text.translate(CHARACTERS)
    for pattern, new in _SPELLINGS:
        text = pattern.sub(new, text)
    return text


def tokens_of(text: str) -> list[Token]:
    """Tokens of a plain text; signs are part of their numbers."""
    tokens: list[Token] = []
    position = 0
    for found in _TOKEN.finditer(text):
        kind = str(found.lastgroup) if found.lastgroup in _KINDS else _kind(found)
        has_space = found.start() > position or found.start() == 0
        position = found.end()
        if kind != "number":
            tokens.append(Token(kind, found[0], has_space))
            continue
        value, is_percent = _value(found), found["percent"] is not None
        sign = _sign(tokens, has_space=has_space)
        if sign is not None:
            del tokens[sign]
            if text[: found.start()].rstrip("$€£¥₹₩ ")[-1:] == "-":
                value = None if value is None else -value
        tokens.append(Token("number", found[0], has_space or sign is not None, value, is_percent))
    return tokens


_KINDS = ("currency", "number", "name", "word", "command", "relation", "operator", "end", "mark")


def _kind(found: re.Match[str]) -> str:
    return next(kind for kind in _KINDS if found[kind] is not None)


def _sign(tokens: list[Token], *, has_space: bool) -> int | None:
    """Index of the sign of a number that follows, if its sign it is: the minus of `10-12` is none."""
    at = len(tokens) - 1
    if at >= 0 and tokens[at].kind == "currency":
        has_space = tokens[at].has_space
        at -= 1
    if at < 0 or tokens[at].text not in "+-":
        return None
    before = tokens[at - 1] if at else None
    if before is None or before.text in "=≈<>≤≥≠±({[:*,/^$":
        return at if not has_space or (before is not None and before.text in "=≈$") else None
    is_operand = before.kind in ("number", "command", "name") or before.text in (")", "]", "|", "%")
    return at if tokens[at].has_space and not has_space and not is_operand else None


def _value(found: re.Match[str]) -> Fraction | None:
    """Value of a number token; None if it is no single number."""
    digits = re.sub(r"[ '_]", "", found["number"]).rstrip(".")
    if len(found[0]) > _MAX_DIGITS or ":" in digits:
        return None
    whole, comma, rest = digits.rpartition(",")
    if comma and (len(rest.partition(".")[0]) != 3 or whole.startswith("0")):
        if "." in digits or "," in whole or (len(rest) == 1 and whole != "0"):
            return None  # or a list
        digits = f"{whole}.{rest}"  # a decimal comma
    digits = digits.replace(",", "")
    if re.fullmatch(r"\d{1,3}(?:\.\d{3}){2,}", digits):
        digits = digits.replace(".", "")  # points between thousands
    if digits.count(".") > 1:
        return None
    value = Fraction(digits if digits[0] != "." else f"0{digits}")
    exponent = int(re.sub(r".*[eE^*]\s?", "", found["power"])) if found["power"] else 0
    exponent += _SCALES[found["scale"].strip(" ~").lower()] if found["scale"] else 0
    if abs(exponent) > _MAX_EXPONENT:
        return None
    value *= Fraction(10) ** exponent
    if found["slash"]:
        under = Fraction(found["under"].replace(",", ""))
        value = value / under if under else None
    if found["over"]:
        below = int(found["below"])
        if value is None or not below or found["slash"]:
            return None
        value += Fraction(int(found["over"]), below)
    return value


def number_in_words(text: str) -> Fraction | None:
    """Number of a text that spells it ("seventy-two", "minus three"); None if it is anything else."""
    words = re.findall(r"[a-z]+", plain(text).lower().replace("~", " "))
    sign = -1 if words[:1] in (["minus"], ["negative"]) else 1
    words = [word for word in words[sign < 0 :] if word != "and"]
    total = part = 0
    for count, word in enumerate(words):
        if word in _WORDS:
            part += _WORDS[word]
        elif word in _SCALES and len(word) > 1 and count:
            part = max(part, 1) * 10 ** _SCALES[word]
            if word != "hundred":
                total, part = total + part, 0
        else:
            rest = words[count:]
            return Fraction(sign * (total + part)) if count and len(rest) == 1 and rest[0] not in _JOINTS else None
    return Fraction(sign * (total + part)) if words else None
