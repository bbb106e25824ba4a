"""Tools in chats: what a request offers, and the calls that the model's text holds.

How calls are written depends on the model. A parser reads them: an entry point of the group
`rl_rollout.tool_parsers`, a function from the text of a turn (special tokens included) to an object with `content` (the
text outside of the calls) and `calls`, each with `name`, `arguments` (a mapping) and `error` (empty where the call is
well formed). rl-agent brings them for the common families.
"""

from __future__ import annotations

import json
import uuid
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, cast

from rl_rollout.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GROUP = "rl_rollout.tool_parsers"


def check_parser(name: str) -> None:
    """See that a parser is installed.

    Raises:
        ConfigError: it is not; lists those that are.
    """
    installed = {point.name for point in entry_points(group=GROUP)}
    if name not in installed:
        there = ", ".join(sorted(installed)) or "none; pip install rl-agent brings some"
        raise ConfigError(f"no tool parser {name!r}; installed are: {there}")


def load_parser(name: str) -> Callable[[str], Any]:
    """The parser of this name. See `check_parser`."""
    check_parser(name)
    (point,) = entry_points(group=GROUP, name=name)
    return cast("Callable[[str], Any]", point.load())


def check_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The tools of a request, as chat templates take them.

    Raises:
        RequestError: one is no function with a name.
    """
    for tool in tools:
        match tool:
            case {"type": "function", "function": {"name": str(name)}} if name:
                pass
            case _:
                wanted = '{"type": "function", "function": {"name": ...}}'
                raise RequestError(f"a tool is {tool!r:.100}; it must be {wanted}")
    return list(tools)


def with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose tool calls have objects for arguments, as templates want them, where OpenAI's format has text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    try:
        plain = [
            {**call, "function": {**call["function"], "arguments": _object(call["function"]["arguments"])}}
            for call in calls
        ]
    except (KeyError, TypeError) as error:
        raise RequestError(
            f"a message's tool_calls are {calls!r:.100}; each needs a function with name and arguments"
        ) from error
    return {**message, "tool_calls": plain}


def _object(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments  # a call that the model wrote badly: as it wrote it


def read_calls(parse: Callable[[str], Any], text: str) -> tuple[str, tuple[dict[str, Any], ...]]:
    """Content and tool calls of a turn, in OpenAI's format.

    A turn with a call that cannot be read has no calls: it is all content, so that the caller sees what was written.
    """
    turn = parse(text)
    if any(call.error for call in turn.calls):
        return text, ()
    calls = tuple(
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for call in turn.calls
    )
    return turn.content if calls else text, calls
