"""Messages of chats in the form that a chat template takes: contents, and arguments of tool calls."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_ANCHOR = "ANCHORanchorANCHOR"
_ARGUMENTS = {"anchor": _ANCHOR}


def messages_for(tokenizer: Any, chat: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat with contents and arguments of tool calls in the form that the template of `tokenizer` takes.

    Raises:
        ValueError: the template leaves out tool calls.
    """
    return with_arguments(tokenizer, with_contents(tokenizer, chat))


def with_contents(tokenizer: Any, chat: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat whose contents are text, or lists of text parts, as the template of `tokenizer` writes them.

    Of a form that it does not know, a template writes Python's spelling or nothing. Contents with images stay.
    """
    messages = [dict(message) for message in chat]
    takes_text, takes_parts = _forms_of(tokenizer)
    if takes_text == takes_parts:  # both: contents stay as they were given
        return messages
    for message in messages:
        content = message.get("content")
        if takes_text and isinstance(content, list) and all(map(_is_text, cast("list[Any]", content))):
            message["content"] = "".join(part["text"] for part in cast("list[dict[str, str]]", content))
        elif takes_parts and isinstance(content, str):
            message["content"] = [{"type": "text", "text": content}]
    return messages


def _is_text(part: Any) -> bool:
    fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
    return fields.get("type") == "text" and isinstance(fields.get("text"), str)


_FORMS: dict[str, tuple[bool, bool]] = {}


def _forms_of(tokenizer: Any) -> tuple[bool, bool]:
    """Whether the chat template writes contents that are text, and ones that are lists of parts."""
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):  # none, or several by name
        return False, False
    if template not in _FORMS:
        _FORMS[template] = _writes(tokenizer, _ANCHOR), _writes(tokenizer, [{"type": "text", "text": _ANCHOR}])
    return _FORMS[template]


def _writes(tokenizer: Any, content: Any) -> bool:
    chat = [{"role": role, "content": content} for role in ("user", "assistant")]
    try:
        text = str(tokenizer.apply_chat_template(chat, tokenize=False))
    except Exception:  # noqa: BLE001 - a template refuses by whatever its engine raises
        return False
    return text.count(_ANCHOR) == 2 and not any(spelled in text for spelled in ("{'type'", '{"type"', "{'text'"))


def with_arguments(tokenizer: Any, chat: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat whose tool calls have their arguments as the template of `tokenizer` takes them.

    OpenAI's messages have JSON text there, and most templates want an object: text would be quoted once more. Some
    write the text as it is, and of an object Python's spelling. Arguments that are no JSON object stay as they are.

    Raises:
        ValueError: the template leaves out tool calls.
    """
    messages = [dict(message) for message in chat]
    if not any(message.get("tool_calls") for message in messages):
        return messages
    convert = _to_text if _takes_text(tokenizer) else _to_object
    for message in messages:
        if isinstance(calls := message.get("tool_calls"), list):
            message["tool_calls"] = [_converted(call, convert) for call in cast("list[Any]", calls)]
    return messages


def _converted(call: Any, convert: Callable[[Any], Any]) -> Any:
    if not isinstance(call, dict):
        return call
    fields = cast("dict[str, Any]", call)
    if isinstance(fields.get("function"), dict):
        return {**fields, "function": _converted(fields["function"], convert)}
    return {**fields, "arguments": convert(fields["arguments"])} if "arguments" in fields else fields


def _to_object(arguments: Any) -> Any:
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _to_text(arguments: Any) -> Any:
    found = _to_object(arguments)
    return json.dumps(found, ensure_ascii=False) if isinstance(found, dict) else arguments


def _takes_text(tokenizer: Any) -> bool:
    """Whether the template refuses an object as arguments, or writes Python's spelling of it, and takes JSON text."""
    by_object, by_text = (_spelled(tokenizer, convert(_ARGUMENTS)) for convert in (_to_object, _to_text))
    found = [text for text in (by_object, by_text) if text is not None]
    if found and not any(_ARGUMENTS["anchor"] in text for text in found):
        raise ValueError("the chat template leaves out tool calls; use one that writes them, or leave them out")
    return by_text is not None and (by_object is None or str(_ARGUMENTS) in by_object)


def _spelled(tokenizer: Any, arguments: Any) -> str | None:
    call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": arguments}}
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False))
    except Exception:  # noqa: BLE001 - a template refuses by whatever its engine raises
        return None
