"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_agent.parsers.calls import blocks, calls_of_json, malformed, opened_by, split_reasoning, turn

if TYPE_CHECKING:
    from rl_agent.types import ParsedTurn


@opened_by("<tool_call>", "<think>")
def parse(text: str) -> ParsedTurn:
    """Take a turn apart. Format: https://github.com/NousResearch/Hermes-Function-Calling."""
    reasoning, text = split_reasoning(text)
    content, insides, is_open = blocks(text, "<tool_call>", "</tool_call>")
    calls = [call for inside in insides for call in calls_of_json(inside)]
    if is_open and calls[-1].error:
        calls[-1] = malformed("</tool_call> is missing")
    return turn(content, calls, reasoning)
