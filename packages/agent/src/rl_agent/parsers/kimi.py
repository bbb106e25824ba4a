"""Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_agent.parsers.calls import blocks, call_of, malformed, opened_by, split_reasoning, turn

if TYPE_CHECKING:
    from rl_agent.types import ParsedTurn, ToolCall


@opened_by("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<think>")
def parse(text: str) -> ParsedTurn:
    """Take a turn apart. Format: https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs."""
    reasoning, text = split_reasoning(text)
    content, section, rest = text.partition("<|tool_calls_section_begin|>")
    _, insides, is_open = blocks(rest, "<|tool_call_begin|>", "<|tool_call_end|>")
    calls = [_call(inside) for inside in insides]
    if is_open and calls[-1].error:
        calls[-1] = malformed("<|tool_call_end|> is missing")
    if section and not calls:
        calls = [malformed("there is no <|tool_call_begin|> in the section of calls")]
    return turn(content, calls, reasoning)


def _call(inside: str) -> ToolCall:
    identifier, mark, arguments = inside.partition("<|tool_call_argument_begin|>")
    if not mark:
        return malformed("<|tool_call_argument_begin|> is missing")
    name = identifier.strip().removeprefix("functions.").rpartition(":")[0] or identifier.strip()
    return call_of(name.removeprefix("functions."), arguments)
