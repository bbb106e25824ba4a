"""The proxy's responses endpoint under the OpenAI client, over real sockets."""

import asyncio
import json

import pytest

from rl_agent import validate_output
from rl_agent.proxy import RecordingProxy
from rl_agent.testing import FakeGenerator, FakeTokenizer

openai = pytest.importorskip("openai", reason="needs the openai client")

TOKENIZER = FakeTokenizer()
ADD = {
    "type": "function",
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def with_client(turns, use):
    """Run `use(client)` against a proxy whose model says `turns`; its result, the trajectories, the server."""
    turns = iter(turns)
    server = FakeGenerator(lambda _: [*TOKENIZER.encode(next(turns)), 1])

    async def main():
        proxy = RecordingProxy(server, TOKENIZER, sampling_params={"max_new_tokens": 512})
        async with openai.AsyncOpenAI(base_url=await proxy.start(), api_key="one", max_retries=0, timeout=60) as client:
            result = await use(client.responses.create)
        await proxy.stop()
        return result, proxy.finish("one", reward=1.0)

    result, outputs = asyncio.run(main())
    for output in outputs:
        validate_output(output)
    return result, outputs, server


def decoded(output, flag):
    pairs = zip(output.completion_token_ids, output.loss_mask, strict=True)
    return TOKENIZER.decode([i for i, m in pairs if m == flag])


@pytest.mark.process
def test_a_conversation_by_items_is_one_trajectory_of_tokens():
    async def use(create):
        one = await create(model="policy", input="go", instructions="be brief", tools=[ADD], max_output_tokens=99)
        assert [item.type for item in one.output] == ["message", "function_call"]
        assert (one.output_text, one.status, json.loads(one.output[1].arguments)) == ("I add", "completed", {"a": 1})
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
            *(item.model_dump(exclude_none=True) for item in one.output),
            {"type": "function_call_output", "call_id": one.output[1].call_id, "output": "7"},
        ]
        return await create(model="policy", input=items, instructions="be brief", tools=[ADD], temperature=0.5)

    first = "  I add " + CALL
    two, (output,), server = with_client([first, "seven"], use)
    assert two.output_text == "seven"
    assert decoded(output, 1) == first + "<|im_end|>seven<|im_end|>"
    assert decoded(output, 0) == "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    assert "system\nbe brief<|im_end|>" in TOKENIZER.decode(output.prompt_token_ids)
    assert [r.sampling_params.max_new_tokens for r in server.requests] == [99, 512]
    assert server.requests[1].sampling_params.temperature == 0.5
    assert two.usage.input_tokens == len(server.requests[1].prompt_token_ids)


@pytest.mark.process
def test_a_response_can_be_gone_on_with_by_its_id_from_two_sides():
    async def use(create):
        one = await create(model="policy", input="go", instructions="be brief")
        left = await create(model="policy", input="left", instructions="be brief", previous_response_id=one.id)
        await create(model="policy", input="right", previous_response_id=one.id)
        with pytest.raises(openai.BadRequestError, match="instructions differ"):
            await create(model="policy", input="x", instructions="be long", previous_response_id=one.id)
        with pytest.raises(openai.BadRequestError, match="not a response of this session"):
            await create(model="policy", input="x", previous_response_id="resp_0")
        with pytest.raises(openai.BadRequestError, match="tools differ"):
            await create(model="policy", input="x", previous_response_id=one.id, tools=[ADD])
        return left

    left, outputs, _ = with_client(["root", "L", "R"], use)
    assert left.output_text == "L"
    assert [decoded(output, 1) for output in outputs] == ["root<|im_end|>L<|im_end|>", "R<|im_end|>"]
    assert "root<|im_end|>" in decoded(outputs[1], 0)


@pytest.mark.parametrize("says", ["plain words", "hm " + CALL, CALL + CALL, "<think>well</think>so " + CALL])
def test_the_events_add_up_to_what_is_said_in_one_piece(says):
    async def use(create):
        whole = await create(model="policy", input="go", tools=[ADD])
        stream = await create(model="policy", input="go", tools=[ADD], stream=True)
        return whole, [event async for event in stream]

    (whole, events), outputs, _ = with_client([says, says], use)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert [event.type for event in events].count("response.output_item.added") == len(whole.output)
    final = events[-1].response
    assert final.output_text == whole.output_text
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    keep = {"type", "name", "arguments"}
    assert [i.model_dump(include=keep) for i in final.output] == [i.model_dump(include=keep) for i in whole.output]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in final.output]
    assert len(outputs) == 2


def test_an_answer_that_is_cut_says_so():
    async def use(create):
        whole = await create(model="policy", input="go", max_output_tokens=3)
        stream = await create(model="policy", input="go", max_output_tokens=3, stream=True)
        return whole, [event async for event in stream]

    (whole, events), outputs, _ = with_client(["abcdef", "abcdef"], use)
    for response in (whole, events[-1].response):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output_text == "abc"
    assert events[-1].type == "response.incomplete"
    assert {output.finish_reason for output in outputs} == {"length"}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"input": []}, "at least one item"),
        ({"background": True}, "background=True is not supported"),
        ({"text": {"format": {"type": "xml"}}}, "asks for no structure that is known"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference' is not supported"),
        ({"max_output_tokens": "many"}, "max_output_tokens is 'many'"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice is {'type': 'web_search'}"),
        ({"tools": [{"type": "function"}]}, "a tool is .*; .* is needed"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
            "text and images are supported",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "text and images are supported",
        ),
    ],
)
def test_what_is_not_honoured_is_refused(fields, sentence):
    async def use(create):
        with pytest.raises(openai.BadRequestError, match=sentence):
            await create(**{"model": "policy", "input": "go", **fields})

    assert with_client(["x"], use)[1] == []
