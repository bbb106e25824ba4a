"""rl-agent: parsers of tool calls, which read what a model wrote."""

import json
import time

from _forms import text_of

from rl_agent.parsers import families

FAMILIES = ("deepseek", "glm", "gpt_oss", "hermes", "kimi", "llama", "mistral")
PARSERS = [getattr(families, name) for name in FAMILIES]
EXPECTED = ()


def seeds():
    for text in (
        '<think>x</think><tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}]',
        "[TOOL_CALLS]f[ARGS]{}",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        '<|channel|>commentary to=functions.f json<|message|>{"a": 1}<|call|>',
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>",
    ):
        yield text.encode()


def one(data):
    text = text_of(data)
    for parse in PARSERS:
        start = time.perf_counter()
        turn = parse(text)
        for call in turn.calls:
            json.dumps(call.arguments)
        assert time.perf_counter() - start < 5.0, "a parser must not hang on what a model wrote"
