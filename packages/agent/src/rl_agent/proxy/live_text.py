"""Text of a streamed turn: reasoning and content as soon as they are certain, up to a call or a stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_agent.chat_template import special_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_agent.types import Tokenizer

_OPEN, _CLOSE = "<think>", "</think>"


class LiveText:
    """Splits a turn's streamed tokens into reasoning and content, as soon as the text can no longer change.

    Where a call may start, nothing more is shown until the turn has ended and can be parsed.

    Args:
        tokenizer: Tokenizer of the served model.
        marks: Marks that calls start with, and `<think>` where the parser knows reasoning (see `opened_by`); None: they
            are unknown, and nothing is shown before the end.
        is_thinking: Whether the prompt has opened the reasoning.
        stops: Stop strings; the text ends before the first of them.
    """

    def __init__(
        self, tokenizer: Tokenizer, marks: Sequence[str] | None, *, is_thinking: bool, stops: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._marks = None if marks is None else (*marks, *stops, _CLOSE, *special_tokens(tokenizer))
        self._stops = stops
        self._knows_thinking = marks is not None and _OPEN in marks
        self._is_thinking = is_thinking
        self._ids: list[int] = []
        self._start, self._end = 0, 0
        self.text = ""
        """Text so far, special tokens included."""
        self.stop: str | None = None
        """Stop string that was found; the text ends before it."""
        self.reasoning, self.content = "", ""
        """Text that was returned so far."""

    def push(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """Append tokens; returns the new reasoning and the new content. Those after a stop string are left out."""
        for piece in ([each] for each in token_ids) if self._stops else (token_ids,):
            if self.stop is None:
                self._append(piece)
        if self._marks is None:
            return "", ""
        thought, rest = self._split(self.text)
        is_closed = bool(thought) and _CLOSE in self.text
        reasoning, content = _certain(thought, self._marks, is_whole=is_closed), _certain(rest, self._marks)
        new = reasoning[len(self.reasoning) :], content[len(self.content) :]
        self.reasoning, self.content = reasoning, content
        return new

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, those of a stop string included."""
        return len(self._ids)

    def _append(self, token_ids: Sequence[int]) -> None:
        self._ids += token_ids
        start = max(len(self.text) - max(map(len, self._stops), default=0), 0)
        self.text += self._decoded()
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
        if found:
            at, self.stop = min(found)
            self.text = self.text[:at]

    def rest(self, text: str) -> str:
        """Whole turn without its reasoning, calls included."""
        return self._split(text)[1].rstrip()

    def _split(self, text: str) -> tuple[str, str]:
        text = text.lstrip()
        if not self._knows_thinking or not (self._is_thinking or text.startswith(_OPEN)):
            return "", text
        thought, _, rest = text.removeprefix(_OPEN).partition(_CLOSE)
        return thought.strip(), rest.lstrip()

    def _decoded(self) -> str:
        """Text of the new ids, decoded after earlier ones: some tokenizers decode a first token differently."""
        before = self._tokenizer.decode(self._ids[self._start : self._end], skip_special_tokens=False)
        after = self._tokenizer.decode(self._ids[self._start :], skip_special_tokens=False)
        if after.endswith("�"):  # an incomplete character
            return ""
        self._start, self._end = self._end, len(self._ids)
        return after[len(before) :]


def opens_thinking(prompt_end: str) -> bool:
    """Whether a prompt ends inside the reasoning, as the templates of some models do."""
    return prompt_end.rfind(_OPEN) > prompt_end.rfind(_CLOSE)


def _certain(text: str, marks: Sequence[str], *, is_whole: bool = False) -> str:
    """Text before a mark, or before what may be the start of one; trailing space is left out."""
    ends = [len(text)]
    for mark in marks:
        found = text.find(mark)
        if found >= 0:
            ends.append(found)
        if not is_whole:
            ends += [len(text) - n for n in range(1, len(mark)) if text.endswith(mark[:n])]
    return text[: min(ends)].rstrip()
