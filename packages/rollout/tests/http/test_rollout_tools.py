"""Tools and alternatives at the OpenAI-compatible endpoint, by OpenAI's own client; the model's text is scripted."""

import asyncio
import json
from importlib.metadata import entry_points
from types import SimpleNamespace

import openai
import pytest
from transformers import AutoTokenizer

from rl_rollout import ConfigError, FinishReason, ServerConfig, create_server
from rl_rollout.testing import write_tiny_model
from rl_rollout.types import TokenOutput

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}*{{ call.function.arguments.a + 1 }}{% endfor %}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
PARSERS = "rl_rollout.tool_parsers"


def parse(text):
    """`sum *add 1 *add 2`: content, then calls with one number each."""
    content, *rest = text.split("*")
    calls = []
    for name, _, number in (each.strip().partition(" ") for each in rest):
        is_fine = number.isdigit()
        calls.append(
            SimpleNamespace(
                name=name, arguments={"a": int(number)} if is_fine else {}, error="" if is_fine else "no number"
            )
        )
    return SimpleNamespace(content=content.strip(), calls=calls)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-tools")
    config = json.loads((path / "tokenizer_config.json").read_text())
    for file in path.glob("chat_template*"):
        file.unlink()
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return path


@pytest.fixture
def ask(folder, monkeypatch):
    """A function: what the model is made to write, and a chat, to the answer and the prompts that the model saw."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    point = SimpleNamespace(name="stars", load=lambda: parse)
    monkeypatch.setattr(
        "rl_rollout.validation.entry_points",
        lambda group: [point] if group == PARSERS else entry_points(group=group),
    )
    seen = []

    def run(written, *, parser="stars", reason=FinishReason.STOP, **settings):
        async def scenario():
            options = {} if parser is None else {"tool_parser": parser}
            server = create_server("embedded", ServerConfig(model_path=str(folder), num_threads=1, options=options))

            async def scripted(request):
                seen.append(tokenizer.decode(request.prompt_token_ids))
                ids = (*tokenizer.encode(written), *[tokenizer.eos_token_id] * (reason is FinishReason.STOP))
                return TokenOutput(
                    request_id=request.request_id,
                    token_ids=ids,
                    logprobs=(-0.5,) * len(ids),
                    weight_versions=(0,) * len(ids),
                    finish_reason=reason,
                )

            url = (await server.start()).url
            if written is not None:
                server.generate = scripted
            try:
                async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=240) as client:
                    given = {"model": folder.name, "messages": [{"role": "user", "content": "1+2"}]} | settings
                    answer = await client.chat.completions.create(**given)
                    return [chunk async for chunk in answer] if settings.get("stream") else answer
            finally:
                await server.stop()

        return asyncio.run(scenario()), seen

    return run


def test_the_model_hears_of_tools_and_its_calls_are_read(ask):
    answer, (prompt,) = ask("let me *add 1 *add 20", tools=TOOLS)
    assert prompt == "add 1+2"
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "let me"
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert calls == [("add", {"a": 1}), ("add", {"a": 20})]
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_calls_and_results_go_back_into_the_prompt(ask):
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 6}'}}
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "7"},
    ]
    answer, (prompt,) = ask("ok", tools=TOOLS, messages=messages)
    assert prompt == "add 1add*77"
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("ok", "stop")
    assert answer.choices[0].message.tool_calls is None


def test_a_call_that_cannot_be_read_stays_text(ask):
    answer, _ = ask("x *add 1 *add y", tools=TOOLS)
    assert answer.choices[0].message.content == "x *add 1 *add y"
    assert answer.choices[0].finish_reason == "stop"


def test_a_turn_that_was_cut_says_so_beside_its_calls(ask):
    answer, _ = ask("*add 1", tools=TOOLS, reason=FinishReason.LENGTH)
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].message.tool_calls) == 1


def test_a_stream_tells_calls_in_one_piece(ask):
    chunks, _ = ask("*add 3", tools=TOOLS, stream=True)
    (chunk,) = chunks
    (call,) = chunk.choices[0].delta.tool_calls
    assert (call.index, call.function.name, call.function.arguments) == (0, "add", '{"a": 3}')
    assert chunk.choices[0].finish_reason == "tool_calls"


def test_tools_that_may_not_be_called_are_not_offered(ask):
    answer, (prompt,) = ask("*add 3", tools=TOOLS, tool_choice="none", parser=None)
    assert prompt == "1+2"
    assert answer.choices[0].message.content == "*add 3"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tools": TOOLS, "parser": None}, "start it with the option tool_parser=NAME"),
        ({"tools": TOOLS, "tool_choice": "required"}, "it must be 'auto' or 'none'"),
        ({"tools": TOOLS, "stop": "x"}, "go without stop strings"),
        ({"tools": [{"type": "web_search"}]}, "a tool is"),
        ({"logprobs": True, "top_logprobs": 2, "stop": "x"}, "go without stream and stop"),
        ({"top_logprobs": 2}, "needs logprobs=true"),
    ],
)
def test_what_cannot_be_done_is_refused(ask, settings, told):
    with pytest.raises(openai.APIStatusError, match=told):
        ask("", **settings)


def test_a_parser_that_is_not_installed_is_refused_before_start(folder):
    with pytest.raises(ConfigError, match="no tool parser 'starz'"):
        create_server("embedded", ServerConfig(model_path=str(folder), options={"tool_parser": "starz"}))


def test_alternatives_are_told(ask):
    answer, _ = ask(None, logprobs=True, top_logprobs=3, max_tokens=4, temperature=0, extra_body={"ignore_eos": True})
    content = answer.choices[0].logprobs.content
    assert len(content) == 4
    for told in content:
        assert len(told.top_logprobs) == 3
        best = told.top_logprobs[0]  # greedy: the token itself
        assert (best.token, best.logprob) == (told.token, pytest.approx(told.logprob, abs=1e-5))
        assert told.top_logprobs == sorted(told.top_logprobs, key=lambda each: -each.logprob)
