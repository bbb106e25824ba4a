"""gpt-oss: Harmony messages on channels; a call is a message `to=functions.name` on the commentary channel."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rl_agent.parsers.calls import call_of, malformed, opened_by, turn

if TYPE_CHECKING:
    from rl_agent.types import ParsedTurn, ToolCall

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


@opened_by("<|", " to=")
def parse(text: str) -> ParsedTurn:
    """Take a turn apart. Format: https://developers.openai.com/cookbook/articles/openai-harmony."""
    content, reasoning, calls = "", "", list["ToolCall"]()
    for message in re.split(r"<\|start\|>assistant|<\|end\|>|<\|call\|>|<\|return\|>", text):
        header, mark, body = message.partition("<|message|>")
        if not mark:
            if "to=" in header:
                calls.append(malformed("<|message|> is missing"))
            elif not header.startswith("<|channel|>"):
                content += header
            continue
        if found := _RECIPIENT.search(header):
            calls.append(call_of(found[1].removeprefix("functions."), body))
        elif "<|channel|>analysis" in header:
            reasoning += body
        else:
            content += body
    return turn(content, calls, reasoning)
