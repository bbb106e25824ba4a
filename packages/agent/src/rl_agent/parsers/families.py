"""Tool-call parsers of the model families: hermes (Qwen), llama, mistral, deepseek, glm, kimi, gpt_oss (Harmony).

First what they share (reasoning, JSON calls, delimited spans), then a function per family.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, cast

from rl_agent.types import ParsedTurn, ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_THINK = re.compile(r"^(?:.*?<think>)?(.*?)</think>", re.DOTALL)
_FENCE = re.compile(r"^(?P<name>[^\n]*)\n```json\n(?P<arguments>.*?)\n?```", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_MESSAGES = re.compile(r"<\|start\|>assistant|<\|end\|>|<\|call\|>|<\|return\|>")


def opened_by(
    *marks: str, call: str | None = None
) -> Callable[[Callable[[str], ParsedTurn]], Callable[[str], ParsedTurn]]:
    """Declare the markers with which a parser's calls and reasoning start; text before them can be streamed.

    Args:
        *marks: The markers.
        call: Text of a call up to its arguments, of a tool called NAME: what a turn that has to call it begins with.
    """

    def start(name: str | None) -> str:
        before, _, after = (call or "").partition("NAME")
        return before if name is None else before + name + after

    def declare(parse: Callable[[str], ParsedTurn]) -> Callable[[str], ParsedTurn]:
        vars(parse)["opened_by"] = marks
        if call is not None:
            vars(parse)["call_start"] = start
        return parse

    return declare


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


@opened_by("<tool_call>", "<think>", call='<tool_call>\n{"name": "NAME", "arguments": ')
def hermes(text: str) -> ParsedTurn:
    """Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them.

    Format: https://github.com/NousResearch/Hermes-Function-Calling.
    """
    reasoning, text = split_reasoning(text)
    content, insides, is_open = blocks(text, "<tool_call>", "</tool_call>")
    calls = [call for inside in insides for call in calls_of_json(inside)]
    if is_open and calls[-1].error:
        calls[-1] = malformed("</tool_call> is missing")
    return turn(content, calls, reasoning)


@opened_by("<|python_tag|>", "{", call='{"name": "NAME", "parameters": ')
def llama(text: str) -> ParsedTurn:
    """Llama 3: a turn that is one JSON object, or several separated by `;`, after an optional `<|python_tag|>`.

    Format: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1.
    """
    content, tag, body = text.partition("<|python_tag|>")
    if not tag:
        content, body = "", text.strip()
        if not body.startswith('{"name"') and not (body.startswith("{") and '"parameters"' in body):
            return turn(text, ())
    return turn(content, _json_objects(body.strip()))


def _json_objects(body: str) -> list[ToolCall]:
    decoder, calls = json.JSONDecoder(), list[ToolCall]()
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


@opened_by("[TOOL_CALLS]", call='[TOOL_CALLS] [{"name": "NAME", "arguments": ')
def mistral(text: str) -> ParsedTurn:
    """Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` once per call.

    Format: https://docs.mistral.ai/capabilities/function_calling (tokenizers v3 to v13).
    """
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


@opened_by(*("<｜tool▁calls▁begin｜>", "<think>"), call="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>")
def deepseek(text: str) -> ParsedTurn:
    """DeepSeek: calls in `<｜tool▁calls▁begin｜>`; of V3 and R1 with a JSON block each, of V3.1 with bare arguments.

    Format: the chat templates of https://huggingface.co/deepseek-ai.
    """

    def call(inside: str) -> ToolCall:
        before, mark, after = inside.partition("<｜tool▁sep｜>")
        if not mark:
            return malformed("<｜tool▁sep｜> is missing")
        if found := _FENCE.match(after):  # `function<sep>name`, then a fenced block
            return call_of(found["name"], found["arguments"])
        return call_of(before, after)

    return _section(text, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", call)


@opened_by(
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<think>"),
    call="<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
)
def kimi(text: str) -> ParsedTurn:
    """Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`.

    Format: https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs.
    """

    def call(inside: str) -> ToolCall:
        identifier, mark, arguments = inside.partition("<|tool_call_argument_begin|>")
        if not mark:
            return malformed("<|tool_call_argument_begin|> is missing")
        identifier = identifier.strip()
        return call_of((identifier.rpartition(":")[0] or identifier).removeprefix("functions."), arguments)

    return _section(text, "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>", call)


def _section(text: str, section: str, begin: str, end: str, read: Callable[[str], ToolCall]) -> ParsedTurn:
    """Parse a turn whose calls are between `begin` and `end`, after the mark `section`."""
    reasoning, text = split_reasoning(text)
    content, mark, rest = text.partition(section)
    _, insides, is_open = blocks(rest, begin, end)
    calls = [read(inside) for inside in insides]
    if is_open and calls[-1].error:
        calls[-1] = malformed(f"{end} is missing")
    if mark and not calls:
        calls = [malformed(f"there is no {begin} after {section}")]
    return turn(content, calls, reasoning)


@opened_by("<tool_call>", "<think>", call="<tool_call>NAME\n")
def glm(text: str) -> ParsedTurn:
    """GLM 4.5 and later: `<tool_call>name`, then pairs of `<arg_key>` and `<arg_value>`; a value may be JSON.

    Format: the chat templates of https://huggingface.co/zai-org.
    """
    reasoning, text = split_reasoning(text)
    content, insides, is_open = blocks(text, "<tool_call>", "</tool_call>")
    calls = [_pairs_call(inside) for inside in insides]
    if is_open:
        calls[-1] = malformed("</tool_call> is missing", calls[-1].name)
    return turn(content, calls, reasoning)


def _pairs_call(inside: str) -> ToolCall:
    name, mark, rest = inside.partition("<arg_key>")
    rest = mark + rest
    if left := _PAIR.sub("", rest).strip():
        return malformed(f"{left[:40]!r} is not a pair of <arg_key> and <arg_value>", name.strip())
    return call_of(name, {key.strip(): _json_or_text(value) for key, value in _PAIR.findall(rest)})


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


@opened_by("<|", " to=", call=" to=functions.NAME<|channel|>commentary json<|message|>")
def gpt_oss(text: str) -> ParsedTurn:
    """gpt-oss: Harmony messages on channels; a call is a message `to=functions.name` on the commentary channel.

    Format: https://developers.openai.com/cookbook/articles/openai-harmony.
    """
    content, reasoning, calls = "", "", list[ToolCall]()
    for message in _MESSAGES.split(text):
        header, mark, body = message.partition("<|message|>")
        if not mark:
            if "to=" in header:
                calls.append(malformed("<|message|> is missing"))
            elif not header.startswith("<|channel|>"):
                content += header
        elif found := _RECIPIENT.search(header):
            calls.append(call_of(found[1].removeprefix("functions."), body))
        elif "<|channel|>analysis" in header:
            reasoning += body
        else:
            content += body
    return turn(content, calls, reasoning)
