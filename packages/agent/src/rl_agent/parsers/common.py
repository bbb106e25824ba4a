"""Helpers of the tool-call parsers: reasoning, JSON calls, delimited spans."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, cast

from rl_agent.types import ParsedTurn, ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_THINK = re.compile(r"^(?:.*?<think>)?(.*?)</think>", re.DOTALL)


def opened_by(*marks: str) -> Callable[[Callable[[str], ParsedTurn]], Callable[[str], ParsedTurn]]:
    """Declare the markers with which a parser's calls and reasoning start; text before them can be streamed."""

    def tell(parse: Callable[[str], ParsedTurn]) -> Callable[[str], ParsedTurn]:
        vars(parse)["opened_by"] = marks
        return parse

    return tell


def split_reasoning(text: str) -> tuple[str, str]:
    """Split a turn at `</think>` into `(reasoning, rest)`; without the end mark all of it is reasoning."""
    if found := _THINK.match(text):
        return found[1].strip(), text[found.end() :]
    if text.lstrip().startswith("<think>"):
        return text.lstrip().removeprefix("<think>").strip(), ""
    return "", text


def turn(content: str, calls: Iterable[ToolCall], reasoning: str = "") -> ParsedTurn:
    """Parsed turn with its content stripped."""
    return ParsedTurn(content=content.strip(), calls=tuple(calls), reasoning=reasoning)


def malformed(reason: str, name: str = "") -> ToolCall:
    """Malformed call."""
    return ToolCall(name=name, error=f"the tool call could not be read: {reason}")


def call_of(name: Any, arguments: Any) -> ToolCall:
    """Call from a name and arguments, which are an object or its JSON text."""
    if not isinstance(name, str) or not name.strip():
        return malformed(f"its name is {name!r}; it needs the name of a tool")
    name = name.strip()
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            return malformed(f"its arguments are not valid JSON ({error})", name)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return malformed(f"its arguments are a {type(arguments).__name__}; a JSON object is needed", name)
    return ToolCall(name=name, arguments=cast("dict[str, Any]", arguments))


def calls_of_json(text: str) -> list[ToolCall]:
    """Calls from the JSON text of `{"name", "arguments" or "parameters"}`, or of a list of these."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [malformed(f"it is not valid JSON ({error})")]
    calls: list[ToolCall] = []
    for each in cast("list[Any]", found if isinstance(found, list) else [found]):
        if not isinstance(each, dict):
            calls.append(malformed(f"it is a {type(each).__name__}; a JSON object with a name and arguments is needed"))
            continue
        fields = cast("dict[str, Any]", each)
        calls.append(call_of(fields.get("name"), fields.get("arguments", fields.get("parameters"))))
    return calls or [malformed("the list of calls is empty")]


def blocks(text: str, start: str, end: str) -> tuple[str, list[str], bool]:
    """Split text at `start` and `end` into `(outside, insides, is_open)`; `is_open`: the last one is not closed."""
    outside, *rest = text.split(start)
    insides: list[str] = []
    is_open = False
    for piece in rest:
        inside, mark, after = piece.partition(end)
        is_open = not mark
        insides.append(inside)
        outside += after
    return outside, insides, is_open
