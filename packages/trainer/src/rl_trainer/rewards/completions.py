"""Completion reader: the part of a completion that answers, and the code in it, for the rules that judge them."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markdown_it import MarkdownIt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_agent.types import Tokenizer

_MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("◁think▷", "◁/think▷"),
    ("<seed:think>", "</seed:think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
)
"""Marks around the thinking of model families; the first is also that of prompts that ask for it in words."""
_PYTHON = re.compile(r"\{?\.?i?py(?:thon)?[\d.]*(?![\w+#-])", re.IGNORECASE)
_STATEMENT = re.compile(
    r"^\s*(?:def|class|import|from|for|while|if|with|try|async|print|@|[\w.\[\], ]+?=(?!=))", re.MULTILINE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """Marks around a model's thinking, which is not its answer."""

    start: str = "<think>"
    """Mark before the thinking; empty: unknown."""
    end: str = "</think>"
    """Mark after it."""
    is_open: bool = False
    """Whether a completion begins within its thinking."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, end: str | None, template_kwargs: Mapping[str, Any] | None = None) -> Thinking:
        """Marks of a chat template, or those that end with `end`."""
        template = str(getattr(tokenizer, "chat_template", None) or "")
        named = end or next((close for _, close in _MARKERS if close in template), "</think>")
        start = next((opening for opening, close in _MARKERS if close == named), named.replace("</", "<", 1))
        start = "" if start == named else start
        if not template:
            return cls(start=start, end=named, is_open=not start)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "question"}],
            add_generation_prompt=True,
            tokenize=False,
            **(template_kwargs or {}),
        )
        return cls(start=start, end=named, is_open=not start or str(prompt).rstrip().endswith(start))

    def answer(self, text: str) -> str:
        """The completion after its thinking; empty if that does not end."""
        _, end, rest = text.rpartition(self.end)
        if not end and self.is_open:
            return ""
        return "" if self.start and self.start in rest else rest


def code_of(text: str) -> str | None:
    """Python code of a completion: its last block of Python, else its last block without a language that looks like it.

    Blocks are CommonMark's: fenced by backticks or tildes, in lists or quotes too, to the end where none closes them.
    """
    blocks = _blocks(text)
    python = [code for info, code in blocks if _PYTHON.match(info)]
    plain = [code for info, code in blocks if not info]
    return next(reversed(python or [code for code in plain if _STATEMENT.search(code)] or plain), None)


def _blocks(text: str) -> list[tuple[str, str]]:
    """Info string and content of every fenced block."""
    blocks: list[tuple[str, str]] = []
    for token in _parser().parse(text):
        if token.type == "fence":
            blocks.append((token.info.strip(), token.content))
        elif token.type == "code_block" and "```" in token.content:  # fenced, and indented as a whole
            blocks += _blocks(token.content)
    return blocks


@functools.cache
def _parser() -> MarkdownIt:
    """Parser of blocks alone; a fence below an HTML tag is a fence."""
    return MarkdownIt("commonmark").disable(["inline", "html_block", "reference"])
