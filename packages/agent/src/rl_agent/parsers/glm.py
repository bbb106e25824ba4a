"""GLM 4.5 and later: `<tool_call>name` and `<arg_key>`, `<arg_value>` pairs. A value is JSON where it reads as JSON."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from rl_agent.parsers.calls import blocks, call_of, malformed, opened_by, split_reasoning, turn

if TYPE_CHECKING:
    from rl_agent.types import ParsedTurn, ToolCall

_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


@opened_by("<tool_call>", "<think>")
def parse(text: str) -> ParsedTurn:
    """Take a turn apart. Format: the chat templates of https://huggingface.co/zai-org."""
    reasoning, text = split_reasoning(text)
    content, insides, is_open = blocks(text, "<tool_call>", "</tool_call>")
    calls = [_call(inside) for inside in insides]
    if is_open:
        calls[-1] = malformed("</tool_call> is missing", calls[-1].name)
    return turn(content, calls, reasoning)


def _call(inside: str) -> ToolCall:
    name = inside.partition("<arg_key>")[0].strip()
    rest = inside[inside.find("<arg_key>") :] if "<arg_key>" in inside else ""
    if left := _PAIR.sub("", rest).strip():
        return malformed(f"{left[:40]!r} is no pair of <arg_key> and <arg_value>", name)
    return call_of(name, {key.strip(): _value(value) for key, value in _PAIR.findall(rest)})


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
