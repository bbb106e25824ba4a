"""Questions of the recipe `search`: a sentence of the almanac answers each, in other words than the question's."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_agent.recipes.rows import Rows, draw_rows, row, said

if TYPE_CHECKING:
    import random

    from rl_agent.recipes.rows import Chat, DataConfig

TRANSLATED_SHARE = 0.25
"""Share of the demonstrations that search for the almanac's words; the others search for the question's."""
_FACT = re.compile(r"The (\w+) (\w+)(?: in| an?| the)? (\w+)\.")
CRAFTS = {
    "cooper": "barrels",
    "baker": "bread",
    "smith": "horseshoes",
    "weaver": "cloth",
    "potter": "jugs",
    "miller": "flour",
    "tailor": "coats",
    "cobbler": "boots",
    "fletcher": "arrows",
    "mason": "walls",
    "chandler": "candles",
    "glazier": "windows",
    "tanner": "leather",
    "thatcher": "roofs",
    "brewer": "beer",
    "dyer": "colours",
    "cutler": "knives",
    "saddler": "saddles",
    "turner": "bowls",
    "wheelwright": "carts",
    "beekeeper": "honey",
    "ferryman": "crossings",
    "scribe": "letters",
    "shepherd": "wool",
}
_QUESTIONS = {
    "lives": (
        "town",
        "In which town is the home of the one who sells {}?",
        "Which town has the house of whoever sells {}?",
    ),
    "drinks": ("cup", "What is in the cup of the one who sells {}?", "Whoever sells {} has a cup of what?"),
    "keeps": ("animal", "Which animal belongs to the one who sells {}?", "Whoever sells {} has which animal?"),
    "plays": ("instrument", "Which instrument has the one who sells {}?", "Whoever sells {} has what instrument?"),
    "wears": ("colour", "What colour has the coat of the one who sells {}?", "Whoever sells {} likes which colour?"),
}
"""For each verb of the almanac the word that a search for the question's own words has, and questions."""
_FIFTHS = 5


def rows(config: DataConfig, *, seed: int) -> Rows:
    """Rows of questions; a fifth of the facts is held out, whose trades and verbs occur in others."""
    return draw_rows(config, _row, seed=seed)


def search(query: str) -> str:
    """Find the sentence of the almanac that suits a query best."""
    scores = _index().scores(query)
    best = max(range(len(scores)), key=scores.__getitem__)
    return _sentences()[best] if scores[best] > 0 else "nothing found"


class Bm25:
    """BM25 scores of texts for a query (Robertson and Zaragoza, 2009), with k1=1.2 and b=0.75.

    Args:
        texts: The texts; words are compared in lower case.
    """

    def __init__(self, texts: list[str]) -> None:
        self._counts = [Counter(_words(text)) for text in texts]
        self._lengths = [counts.total() for counts in self._counts]
        self._mean_length = sum(self._lengths) / len(texts)
        self._found_in = Counter(word for counts in self._counts for word in counts)

    def scores(self, query: str) -> list[float]:
        """Score of each text."""
        return [
            sum(self._idf(word) * self._weight(counts[word], length) for word in _words(query))
            for counts, length in zip(self._counts, self._lengths, strict=True)
        ]

    def _idf(self, word: str) -> float:
        found_in = self._found_in[word]
        return math.log(1 + (len(self._counts) - found_in + 0.5) / (found_in + 0.5))

    def _weight(self, count: int, length: int) -> float:
        return count * 2.2 / (count + 1.2 * (0.25 + 0.75 * length / self._mean_length))


def answers() -> list[str]:
    """Every answer that some question has."""
    return sorted({value for _, _, value in facts()})


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@cache
def _sentences() -> list[str]:
    return Path(__file__).with_name("almanac.txt").read_text().splitlines()


@cache
def _index() -> Bm25:
    return Bm25(_sentences())


@cache
def facts() -> list[tuple[str, str, str]]:
    """Trade, verb and value of each sentence."""
    found = [_FACT.fullmatch(sentence) for sentence in _sentences()]
    return [(each[1], each[2], each[3]) for each in found if each is not None]


def _is_held_out(trade: str, verb: str) -> bool:
    return ([*CRAFTS].index(trade) + 2 * [*_QUESTIONS].index(verb)) % _FIFTHS == 0


def _row(choose: random.Random, is_eval: bool) -> tuple[str, dict[str, Any], Chat]:
    trade, verb, answer = choose.choice([fact for fact in facts() if _is_held_out(*fact[:2]) == is_eval])
    noun, *templates = _QUESTIONS[verb]
    question = choose.choice(templates).format(CRAFTS[trade])
    if choose.random() < TRANSLATED_SHARE:
        chat = _demonstration(question, f"{trade} {verb}", answer)
    else:
        chat = _demonstration(question, f"{CRAFTS[trade]} {noun}", "unknown")
    return question, row(question, answer=answer, fact=f"{trade} {verb}"), chat


def _demonstration(question: str, query: str, answer: str) -> Chat:
    call = json.dumps({"name": "search", "arguments": {"query": query}})
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": search(query)},
        *said(answer),
    ]
