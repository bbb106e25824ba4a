"""Llama 3: a turn that is one JSON object, or several separated by `;`, after an optional `<|python_tag|>`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rl_agent.parsers.calls import calls_of_json, malformed, opened_by, turn

if TYPE_CHECKING:
    from rl_agent.types import ParsedTurn, ToolCall

_TAG = "<|python_tag|>"


@opened_by("<|python_tag|>", "{")
def parse(text: str) -> ParsedTurn:
    """Take a turn apart. Format: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1."""
    content, tag, body = text.partition(_TAG)
    if not tag:
        content, body = "", text.strip()
        if not body.startswith('{"name"') and not (body.startswith("{") and '"parameters"' in body):
            return turn(text, ())
    return turn(content, _objects(body.strip()))


def _objects(body: str) -> list[ToolCall]:
    decoder, calls = json.JSONDecoder(), list["ToolCall"]()
    while body:
        try:
            _, end = decoder.raw_decode(body)
        except (ValueError, RecursionError) as error:
            return [*calls, malformed(f"it is not valid JSON ({error})")]
        calls += calls_of_json(body[:end])
        rest = body[end:].lstrip()
        if rest and not rest.startswith(";"):
            return [*calls, malformed(f"after a call comes {rest[:20]!r}; calls are separated by ';'")]
        body = rest.removeprefix(";").lstrip()
    return calls or [malformed("nothing follows <|python_tag|>")]
