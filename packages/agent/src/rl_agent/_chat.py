"""From chat messages to prompt token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl_agent._media import count_images, take_images, without_images
from rl_agent.errors import RowError, TemplateError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_agent.types import Message, Tokenizer


def messages_of(row: Mapping[str, Any], field: str = "prompt") -> list[Message]:
    """The chat messages that a dataset row holds.

    Raises:
        RowError: there are none, or they are not messages.
    """
    messages = row.get(field)
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RowError(f"field {field!r} of the row is {messages!r}; it needs a list of chat messages, at least one")
    for i, message in enumerate(messages):
        if not (hasattr(message, "keys") and "role" in message and "content" in message):
            raise RowError(f"message {i} of field {field!r} is {message!r}; a message has a 'role' and a 'content'")
    return list(messages)


def tokenize_prompt(tokenizer: Tokenizer, row: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """A row's `prompt` as token ids, and its images as data URLs in the order of their places, as `single_turn` asks.

    Raises:
        TemplateError, RowError: see `messages_of`, `take_images` and `render_prompt`.
    """
    messages, images = take_images(messages_of(row), row)
    return render_prompt(tokenizer, messages), images


def render_prompt(tokenizer: Tokenizer, messages: Sequence[Message], **kwargs: Any) -> tuple[int, ...]:
    """Token ids of a conversation with the header of the assistant's turn appended.

    Raises:
        TemplateError: the tokenizer has no chat template, or one that does not give ids.
        RowError: its chat template refuses these messages.
    """
    try:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs
        )
    except ValueError as error:
        raise TemplateError(f"the tokenizer's chat template cannot be applied: {error}") from error
    except Exception as error:  # a template refuses by an exception of its template engine, whichever that is
        raise RowError(f"the chat template refuses the row's messages: {error}") from error
    if not isinstance(ids, list) or not ids or not isinstance(ids[0], int):
        raise TemplateError(f"the tokenizer's chat template gave {ids!r}; a list of token ids is needed")
    if count_images(messages):
        bare = tokenizer.apply_chat_template(
            without_images(messages), add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs
        )
        if bare == ids:
            raise TemplateError("the chat template leaves out the images; use the template of a vision-language model")
    return tuple(ids)
