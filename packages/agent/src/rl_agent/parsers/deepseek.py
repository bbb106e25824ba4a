"""DeepSeek: calls in `<｜tool▁calls▁begin｜>`; of V3 and R1 with a JSON block each, of V3.1 with bare arguments."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rl_agent.parsers.calls import blocks, call_of, malformed, opened_by, split_reasoning, turn

if TYPE_CHECKING:
    from rl_agent.types import ParsedTurn, ToolCall

_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = re.compile(r"^(?P<name>[^\n]*)\n```json\n(?P<arguments>.*?)\n?```", re.DOTALL)


@opened_by("<｜tool▁calls▁begin｜>", "<think>")
def parse(text: str) -> ParsedTurn:
    """Take a turn apart. Format: the chat templates of https://huggingface.co/deepseek-ai."""
    reasoning, text = split_reasoning(text)
    content, _, rest = text.partition("<｜tool▁calls▁begin｜>")
    _, insides, is_open = blocks(rest, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    calls = [_call(inside) for inside in insides]
    if is_open and calls[-1].error:
        calls[-1] = malformed("<｜tool▁call▁end｜> is missing")
    if "<｜tool▁calls▁begin｜>" in text and not calls:
        calls = [malformed("there is no <｜tool▁call▁begin｜> among the calls")]
    return turn(content, calls, reasoning)


def _call(inside: str) -> ToolCall:
    before, mark, after = inside.partition(_SEPARATOR)
    if not mark:
        return malformed("<｜tool▁sep｜> is missing")
    if found := _FENCE.match(after):  # `function<sep>name`, then a fenced block
        return call_of(found["name"], found["arguments"])
    return call_of(before, after)
