"""Anthropic's messages endpoint, as its clients speak to it: blocks, tools, thinking, events, token counts."""

import asyncio
import json

import aiohttp
import pytest

from rl_agent import validate_output
from rl_agent.proxy import RecordingProxy
from rl_agent.testing import FakeGenerator, FakeTokenizer

TOKENIZER = FakeTokenizer()
TOOL = {"name": "edit", "description": "Edit.", "input_schema": {"type": "object", "properties": {}}}
PIXEL = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def with_endpoint(turns, use, **settings):
    """Run `use(post)` against a proxy whose model says `turns`; its result, the trajectories and the server."""
    says = iter(turns)
    server = FakeGenerator(lambda _: [*TOKENIZER.encode(next(says)), 1])

    async def main():
        proxy = RecordingProxy(server, TOKENIZER, sampling_params={"max_new_tokens": 512}, **settings)
        base = await proxy.start()
        async with aiohttp.ClientSession(headers={"x-api-key": "one", "anthropic-version": "2023-06-01"}) as http:

            async def post(messages, path="/messages", **fields):
                body = {"model": "policy", "max_tokens": 256, "messages": messages, **fields}
                async with http.post(base + path, json=body) as response:
                    if response.content_type == "text/event-stream":
                        lines = (await response.text()).splitlines()
                        return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
                    return await response.json()

            try:
                result = await use(post)
            finally:
                await proxy.stop()
        outputs = proxy.finish("one", reward=1.0)
        for output in outputs:
            validate_output(output)
        return result, outputs, server

    return asyncio.run(main())


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def text(words):
    return {"type": "text", "text": words}


def put_together(events):
    """The message that a stream of events is of."""
    message = next(event["message"] for event in events if event["type"] == "message_start")
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                kind = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
                if name := kind.get(delta["type"]):
                    block[name] = block.get(name, "") + delta[name]
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    for block in message["content"]:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("partial_json"))
    assert [event["type"] for event in events][-1] == "message_stop"
    return message


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_turns_with_tools_and_thinking_are_one_trajectory(streams):
    turns = [
        "<think>hm</think>I edit. " + call("edit", path="a", line=1),
        call("edit", path="b") + call("edit"),
        "done",
    ]

    async def use(post):
        messages, found = [{"role": "user", "content": "go"}], []
        for _ in turns:
            answer = await post(messages, system=[text("be brief")], tools=[TOOL], stream=streams)
            message = put_together(answer) if streams else answer
            found.append(message)
            calls = [block for block in message["content"] if block["type"] == "tool_use"]
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": [text(f"ok {i}")]}
                for i, block in enumerate(calls)
            ]
            messages += [{"role": "assistant", "content": message["content"]}, user(*results)]
        return found

    (first, second, third), (output,), server = with_endpoint(turns, use)
    assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
    assert (first["content"][0]["thinking"], first["content"][1]["text"]) == ("hm", "I edit.")
    assert first["content"][2]["input"] == {"path": "a", "line": 1}
    assert [block["type"] for block in second["content"]] == ["tool_use", "tool_use"]
    assert [each["stop_reason"] for each in (first, second, third)] == ["tool_use", "tool_use", "end_turn"]
    assert first["usage"]["input_tokens"] == len(server.requests[0].prompt_token_ids)
    assert first["usage"]["output_tokens"] == len(turns[0]) + 1
    pairs = [*zip(output.completion_token_ids, output.loss_mask, strict=True)]
    assert TOKENIZER.decode([i for i, m in pairs if m]) == "".join(turn + "<|im_end|>" for turn in turns)
    assert "tool\nok 0<|im_end|>\n<|im_start|>tool\nok 1" in TOKENIZER.decode([i for i, m in pairs if not m])
    prompt = TOKENIZER.decode(output.prompt_token_ids)
    assert '"name": "edit"' in prompt
    assert "system\nbe brief<|im_end|>" in prompt


def test_tokens_are_counted_and_nothing_is_recorded():
    async def use(post):
        counted = await post([user(text("go"))], "/messages/count_tokens", tools=[TOOL])
        answer = await post([user(text("go"))], tools=[TOOL])
        return counted["input_tokens"], answer["usage"]["input_tokens"]

    (counted, used), outputs, _ = with_endpoint(["x"], use)
    assert counted == used
    assert len(outputs) == 1


def test_results_images_and_words_of_a_message_keep_their_order():
    async def use(post):
        asked = {"type": "tool_use", "id": "abc", "name": "edit", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "abc", "content": [text("seen"), PIXEL]}
        await post([user(text("go")), {"role": "assistant", "content": [asked]}, user(result, text("and?"))])

    _, (output,), server = with_endpoint(["x"], use)
    prompt = TOKENIZER.decode(output.prompt_token_ids)
    assert f"tool\nseen{TOKENIZER.image}<|im_end|>\n<|im_start|>user\nand?<|im_end|>" in prompt
    assert server.requests[0].images == ("data:image/png;base64,iVBORw0KGgo=",) == output.images


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"stop_sequences": ["END"]}, ("stop_sequence", "END", "abc")),
        ({"max_tokens": 2}, ("max_tokens", None, "ab")),
        ({}, ("end_turn", None, "abcENDdef")),
    ],
)
def test_an_answer_says_why_it_ended(fields, end):
    async def use(post):
        answer = await post([user(text("go"))], **fields)
        return answer["stop_reason"], answer["stop_sequence"], answer["content"][0]["text"]

    assert with_endpoint(["abcENDdef"], use)[0] == end


@pytest.mark.parametrize(
    ("choice", "begun"),
    [({"type": "any"}, '{"name": "edit", "arguments": '), ({"type": "tool", "name": "edit"}, "edit")],
)
def test_tool_choice_makes_the_model_call(choice, begun):
    async def use(post):
        return await post([user(text("go"))], tools=[TOOL], tool_choice=choice)

    answer, (output,), _ = with_endpoint(["{}}</tool_call>"], use)
    assert [(block["type"], block["name"]) for block in answer["content"]] == [("tool_use", "edit")]
    assert begun in TOKENIZER.decode(output.prompt_token_ids[-40:])


@pytest.mark.parametrize(
    ("messages", "fields", "sentence"),
    [
        ([], {}, "at least one message"),
        (
            [user(text("a")), {"role": "assistant", "content": "I"}],
            {},
            "a turn that the client begins is not supported",
        ),
        ([{"role": "tool", "content": ""}], {}, "has no role of user, assistant and system"),
        ([user({"type": "document"})], {}, "text and images are supported"),
        ([user(text("a"))], {"tool_choice": {"type": "some"}}, "its type is one of auto, any, tool and none"),
        ([user(text("a"))], {"max_tokens": 0}, "max_tokens is 0; at least 1 is needed"),
        ([user(text("a"))], {"output_format": {"type": "xml"}}, "asks for no structure that is known"),
        ([user(text("a"))], {"tools": [{"type": "custom"}]}, "a tool is "),
    ],
)
def test_what_cannot_be_honoured_is_an_error_of_the_api(messages, fields, sentence):
    async def use(post):
        return await post(messages, **fields)

    answer, outputs, _ = with_endpoint(["x"], use)
    assert (answer["type"], answer["error"]["type"], outputs) == ("error", "invalid_request_error", [])
    assert __import__("re").search(sentence, answer["error"]["message"])
