"""The text of a turn while it is generated: what may be shown already, whatever follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_agent.chat_template import special_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_agent.types import Tokenizer

_OPEN, _CLOSE = "<think>", "</think>"


class LiveText:
    """Takes a turn's ids as they come and tells what is certain to be its reasoning and its content.

    Where a call may start, nothing more is shown until the turn has ended and can be parsed.

    Args:
        tokenizer: Of the model that is served.
        marks: What calls start with, and `<think>` where the parser knows reasoning (see `opened_by`); None where that
            is not known, and nothing is shown.
        is_thinking: Whether the prompt has opened the reasoning.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Sequence[str] | None, *, is_thinking: bool) -> None:
        self._tokenizer = tokenizer
        self._marks = None if marks is None else (*marks, _CLOSE, *special_tokens(tokenizer))
        self._knows_thinking = marks is not None and _OPEN in marks
        self._is_thinking = is_thinking
        self._ids: list[int] = []
        self._start, self._end = 0, 0
        self._text = ""
        self.reasoning, self.content = "", ""
        """What was shown so far."""

    def push(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """New reasoning and new content."""
        self._ids += token_ids
        self._text += self._decoded()
        if self._marks is None:
            return "", ""
        thought, rest = self._split(self._text)
        is_closed = bool(thought) and _CLOSE in self._text
        reasoning, content = _certain(thought, self._marks, is_whole=is_closed), _certain(rest, self._marks)
        new = reasoning[len(self.reasoning) :], content[len(self.content) :]
        self.reasoning, self.content = reasoning, content
        return new

    def rest(self, text: str) -> str:
        """A whole turn without its reasoning, calls included."""
        return self._split(text)[1].rstrip()

    def _split(self, text: str) -> tuple[str, str]:
        text = text.lstrip()
        if not self._knows_thinking or not (self._is_thinking or text.startswith(_OPEN)):
            return "", text
        thought, _, rest = text.removeprefix(_OPEN).partition(_CLOSE)
        return thought.strip(), rest.lstrip()

    def _decoded(self) -> str:
        """Text of the new ids. Earlier ones are decoded with them: some tokenizers write a first token differently."""
        before = self._tokenizer.decode(self._ids[self._start : self._end], skip_special_tokens=False)
        after = self._tokenizer.decode(self._ids[self._start :], skip_special_tokens=False)
        if after.endswith("�"):  # a character's bytes are not all here yet
            return ""
        self._start, self._end = self._end, len(self._ids)
        return after[len(before) :]


def opens_thinking(prompt_end: str) -> bool:
    """Whether a prompt leaves the model in its reasoning, as the templates of some models do."""
    return prompt_end.rfind(_OPEN) > prompt_end.rfind(_CLOSE)


def _certain(text: str, marks: Sequence[str], *, is_whole: bool = False) -> str:
    """`text` up to where a mark starts, or may start at its end if more may follow; without the space before it."""
    ends = [len(text)]
    for mark in marks:
        found = text.find(mark)
        if found >= 0:
            ends.append(found)
        if not is_whole:
            ends += [len(text) - n for n in range(1, len(mark)) if text.endswith(mark[:n])]
    return text[: min(ends)].rstrip()
