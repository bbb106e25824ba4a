"""Each family's calls, well formed and not."""

from importlib.metadata import entry_points

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_agent import PluginError
from rl_agent.registry import load_plugin

FAMILIES = ["hermes", "qwen", "llama", "mistral", "deepseek", "glm", "kimi", "gpt_oss"]
DS, DE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CS, CE, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
KS, KE, KB, KA, KD = (
    f"<|{name}|>"
    for name in (
        "tool_calls_section_begin",
        "tool_calls_section_end",
        "tool_call_begin",
        "tool_call_argument_begin",
        "tool_call_end",
    )
)

TWO = [("add", {"a": 1, "b": "x"}), ("now", {})]
WELL_FORMED = [
    ("hermes", "<think>hm</think>\nok\n<tool_call>\n" '{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>\n'
     '<tool_call>{"name": "now", "arguments": {}}</tool_call>', "ok", "hm", TWO),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}', "", "", TWO[1:]),
    ("hermes", "\n <think>hm", "", "hm", []),
    ("kimi", f"{KS}{KB}functions.now{KA}{{}}{KD}{KE}", "", "", TWO[1:]),
    ("llama", '{"name": "add", "parameters": {"a": 1, "b": "x"}}; {"name": "now", "parameters": {}}', "", "", TWO),
    ("llama", '<|python_tag|>{"name": "now", "parameters": {}}', "", "", TWO[1:]),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "x"}, "id": "abcdefghi"}, '
     '{"name": "now", "arguments": {}}]', "", "", TWO),
    ("mistral", 'ok[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1, "b": "x"}[TOOL_CALLS]now[ARGS]{}', "ok", "", TWO),
    ("mistral", '[TOOL_CALLS]add{"a": 1, "b": "x"}', "", "", TWO[:1]),
    ("deepseek", f'hm</think>ok{DS}{CS}add{SEP}{{"a": 1, "b": "x"}}{CE}{CS}now{SEP}{{}}{CE}{DE}', "ok", "hm", TWO),
    ("deepseek", f'{DS}{CS}function{SEP}add\n```json\n{{"a": 1, "b": "x"}}\n```{CE}{DE}', "", "", TWO[:1]),
    ("glm", "\n<think>hm</think>\nok\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
     "<arg_key>b</arg_key>\n<arg_value>x</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>", "ok", "hm", TWO),
    ("kimi", f'ok{KS}{KB}functions.add:0{KA}{{"a": 1, "b": "x"}}{KD}{KB}functions.now:1{KA}{{}}{KD}{KE}',
     "ok", "", TWO),
    ("gpt_oss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.add "
     '<|constrain|>json<|message|>{"a": 1, "b": "x"}', "", "hm", TWO[:1]),
    ("gpt_oss", "<|channel|>final<|message|>ok", "ok", "", []),
    ("gpt_oss", " to=functions.now<|channel|>commentary json<|message|>{}", "", "", TWO[1:]),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "content", "reasoning", "calls"), WELL_FORMED)
def test_calls_are_read(family, text, content, reasoning, calls):
    turn = load_plugin("parsers", family)(text)
    assert [call.error for call in turn.calls] == [""] * len(calls)
    assert [(call.name, call.arguments) for call in turn.calls] == calls
    assert (turn.content, turn.reasoning) == (content, reasoning)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", ["", "an answer", "2 < 3 and 4 > 1", "[1, 2] {x}", '{"answer": 42}'])
def test_an_answer_is_no_call(family, text):
    turn = load_plugin("parsers", family)(text)
    assert (turn.content, turn.calls) == (text, ())


MALFORMED = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}', "</tool_call> is missing"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": </tool_call>', "not valid JSON"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "its name is None"),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "are a list; a JSON object"),
    ("hermes", '<tool_call>"add"</tool_call>', "it is a str"),
    ("llama", '{"name": "add", "parameters": {"a": 1', "not valid JSON"),
    ("llama", "<|python_tag|>print(1)", "not valid JSON"),
    ("llama", '{"name": "add", "parameters": {}} and more', "calls are separated by ';'"),
    ("mistral", "[TOOL_CALLS] [", "not valid JSON"),
    ("mistral", "[TOOL_CALLS] []", "list of calls is empty"),
    ("mistral", "[TOOL_CALLS]add[ARGS]{", "not valid JSON"),
    ("deepseek", f"{DS}{CS}add{CE}{DE}", "tool▁sep｜> is missing"),
    ("deepseek", f"{DS}{CS}add{SEP}{{", "call▁end｜> is missing"),
    ("deepseek", f"{DS}{DE}", "no <｜tool▁call▁begin"),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n</tool_call>", "not a pair of"),
    ("glm", "<tool_call>add", "</tool_call> is missing"),
    ("glm", "<tool_call></tool_call>", "its name is ''"),
    ("kimi", f"{KS}{KB}functions.add:0{KD}{KE}", "argument_begin|> is missing"),
    ("kimi", f"{KS}{KB}functions.add:0{KA}{{", "call_end|> is missing"),
    ("kimi", f"{KS}{KE}", "no <|tool_call_begin|>"),
    ("gpt_oss", "<|channel|>commentary to=functions.add<|message|>{", "not valid JSON"),
    ("gpt_oss", " to=functions.add<|channel|>commentary", "<|message|> is missing"),
]


@pytest.mark.parametrize(("family", "text", "sentence"), MALFORMED)
def test_a_call_that_cannot_be_read_says_why(family, text, sentence):
    call = load_plugin("parsers", family)(text).calls[-1]
    assert sentence in call.error


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        DS,
        DE,
        CS,
        CE,
        SEP,
        KS,
        KE,
        KB,
        KA,
        KD,
        "<|channel|>",
        "<|message|>",
        " to=functions.add",
        "<|start|>assistant",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        '{"name": "add", "arguments": {}}',
        "{",
        "}",
        "[",
        "]",
        ";",
        "a",
        "\n",
    ]
)


@pytest.mark.process
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=50, deadline=None)
@given(pieces=st.lists(PIECES, max_size=10))
def test_whatever_a_model_writes_is_read_without_an_exception(family, pieces):
    turn = load_plugin("parsers", family)("".join(pieces))
    assert all(call.error or (call.name and isinstance(call.arguments, dict)) for call in turn.calls)


def test_an_unknown_parser_lists_what_is_installed():
    with pytest.raises(
        PluginError, match="no parser 'hermez' is installed as an entry point of rl_agent.parsers; there are: .*hermes"
    ):
        load_plugin("parsers", "hermez")


def test_a_server_finds_the_same_parsers():
    ours = {point.name: point.value for point in entry_points(group="rl_agent.parsers")}
    assert {point.name: point.value for point in entry_points(group="rl_rollout.tool_parsers")} == ours
    assert set(FAMILIES) <= ours.keys()
