"""A tokenizer that remembers prompts: all completions of a group, and its baseline, have the same."""

from __future__ import annotations

import json
from copy import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_agent.types import Message, Tokenizer

_MOST = 1024
"""Prompts that are remembered; the oldest is forgotten first."""


class PromptMemory:
    """A Hugging Face tokenizer, but for the chat template: what was rendered lately is not rendered again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Everything else is the tokenizer's own."""
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, conversation: Sequence[Message], **kwargs: Any) -> Any:
        """As the tokenizer's."""
        try:
            key = json.dumps((conversation, kwargs))  # in the order of its keys, which a template may look at
        except TypeError:  # it holds something that JSON has no words for
            return self._tokenizer.apply_chat_template(conversation, **kwargs)
        if key not in self._known:
            if len(self._known) == _MOST:
                del self._known[next(iter(self._known))]
            self._known[key] = self._tokenizer.apply_chat_template(conversation, **kwargs)
        return copy(self._known[key])
