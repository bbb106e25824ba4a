"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` once per call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_agent.parsers.calls import call_of, calls_of_json, opened_by, turn

if TYPE_CHECKING:
    from rl_agent.types import ParsedTurn, ToolCall


@opened_by("[TOOL_CALLS]")
def parse(text: str) -> ParsedTurn:
    """Take a turn apart. Format: https://docs.mistral.ai/capabilities/function_calling (tokenizers v3 to v13)."""
    content, *bodies = text.split("[TOOL_CALLS]")
    calls: list[ToolCall] = []
    for body in bodies:
        name, mark, arguments = body.partition("[ARGS]")
        if mark:
            calls.append(call_of(name.partition("[CALL_ID]")[0], arguments))
        elif body.lstrip().startswith(("[", "{")) or "{" not in body:
            calls += calls_of_json(body)
        else:  # v11: the arguments follow the name at once
            name, brace, arguments = body.partition("{")
            calls.append(call_of(name, brace + arguments))
    return turn(content, calls)
