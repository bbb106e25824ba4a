"""Fields of requests: each is honoured to the token, refused by name, or ignored with one warning."""

import asyncio
import json
import logging

import pytest

from rl_agent import validate_output
from rl_agent.proxy import RecordingProxy
from rl_agent.registry import load_plugin
from rl_agent.testing import FakeGenerator, FakeTokenizer
from rl_rollout.types import Capabilities, FinishReason, TokenChunk

openai = pytest.importorskip("openai", reason="needs the openai client")

TOKENIZER = FakeTokenizer()
USER = {"role": "user", "content": "go"}
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def tool(name):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Streamed(FakeGenerator):
    """Streams two tokens at a time, and counts those that it was asked for."""

    num_tokens = 0

    async def generate_stream(self, request):
        self.requests.append(request)
        ids = self._reply(request)
        for start in range(0, len(ids), 2):
            piece = tuple(ids[start : start + 2])
            self.num_tokens += len(piece)
            yield TokenChunk(
                token_ids=piece,
                logprobs=tuple(-(start + i + 1) / 64 for i in range(len(piece))),
                weight_versions=(7,) * len(piece),
                finish_reason=FinishReason.STOP if start + 2 >= len(ids) else None,
            )


def says(*turns, kind=FakeGenerator):
    turns = iter(turns)
    return kind(lambda _: [*TOKENIZER.encode(next(turns)), 1])


def with_client(server, use, **settings):
    async def main():
        proxy = RecordingProxy(server, TOKENIZER, sampling_params={"max_new_tokens": 512}, **settings)
        client = openai.AsyncOpenAI(base_url=await proxy.start(), api_key="one", max_retries=0, timeout=60)
        async with client:
            try:
                result = await use(client)
            finally:
                await proxy.stop()
        outputs = proxy.finish("one", reward=1.0)
        for output in outputs:
            validate_output(output)
        return result, outputs

    return asyncio.run(main())


def ask(client, messages=(USER,), **fields):
    return client.chat.completions.create(model="policy", messages=list(messages), **fields)


def written(output):
    pairs = zip(output.completion_token_ids, output.loss_mask, strict=True)
    return TOKENIZER.decode([i for i, m in pairs if m])


async def streamed_text(stream):
    return "".join([part.choices[0].delta.content or "" async for part in stream if part.choices])


@pytest.mark.parametrize("kind", [FakeGenerator, Streamed], ids=["whole", "streamed"])
@pytest.mark.parametrize("streams", [False, True], ids=["answer", "events"])
def test_a_stop_string_ends_the_answer_and_the_generation(kind, streams):
    server = says("I think. Observation: none of this is seen", "done", kind=kind)

    async def use(client):
        first = await ask(client, stop=["never", "Observation:"], stream=streams)
        text = await streamed_text(first) if streams else first.choices[0].message.content
        if not streams:
            assert first.choices[0].finish_reason == "stop"
        await ask(client, [USER, {"role": "assistant", "content": text}, USER])
        return text

    text, (output,) = with_client(server, use)
    assert text.rstrip() == "I think."
    assert written(output) == "I think. Observation:done<|im_end|>"
    if kind is Streamed:
        assert server.num_tokens <= len("I think. Observation:") + 1, "the server went on after the stop string"


def test_n_choices_are_branches_with_seeds_of_their_own():
    server = says("a", "b", "c", "on")

    async def use(client):
        many = await ask(client, n=3, seed=5)
        texts = [choice.message.content for choice in many.choices]
        assert [choice.index for choice in many.choices] == [0, 1, 2]
        assert many.usage.completion_tokens == 6
        await ask(client, [USER, {"role": "assistant", "content": "b"}, USER])
        return texts

    texts, outputs = with_client(server, use)
    assert texts == ["a", "b", "c"]
    assert [written(output) for output in outputs] == ["a<|im_end|>", "c<|im_end|>", "b<|im_end|>on<|im_end|>"]
    assert [request.sampling_params.seed for request in server.requests[:3]] == [5, 6, 7]


def test_streamed_choices_are_told_apart():
    async def use(client):
        found = {0: "", 1: ""}
        async for part in await ask(client, n=2, stream=True):
            for choice in part.choices:
                found[choice.index] += choice.delta.content or ""
        return found

    found, outputs = with_client(says("left", "right", kind=Streamed), use)
    assert found == {0: "left", 1: "right"}
    assert len(outputs) == 2


def test_tool_choice_none_leaves_calls_as_text():
    async def use(client):
        answer = await ask(client, tools=[tool("f")], tool_choice="none")
        return answer.choices[0].message

    message, (output,) = with_client(says("so: " + call("f", a=1)), use)
    assert (message.content, message.tool_calls) == ("so: " + call("f", a=1), None)
    assert '"name": "f"' in TOKENIZER.decode(output.prompt_token_ids), "the prompt stays that of the conversation"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}], ids=str)
def test_a_required_call_is_begun_for_the_model(choice):
    is_named = choice != "required"
    rest = ('{"a": 1}}' if is_named else 'g", "arguments": {"a": 1}}') + "</tool_call>"

    async def use(client):
        answer = await ask(client, tools=[tool("f"), tool("g")], tool_choice=choice)
        (made,) = answer.choices[0].message.tool_calls
        return made.function.name, json.loads(made.function.arguments)

    found, (output,) = with_client(says(rest), use)
    assert found == ("g", {"a": 1})
    start = '<tool_call>\n{"name": "' + ('g", "arguments": ' if is_named else "")
    assert TOKENIZER.decode(output.prompt_token_ids).endswith(start), "what was not sampled is no completion"
    assert written(output) == rest + "<|im_end|>"


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral", "deepseek", "glm", "kimi", "gpt_oss"])
def test_every_parser_says_how_a_call_begins(name):
    parse = load_plugin("parsers", name)
    ends = {"hermes": "}</tool_call>", "llama": "}", "mistral": "}]", "deepseek": "<｜tool▁call▁end｜>"}
    ends |= {"glm": "</tool_call>", "kimi": "<|tool_call_end|>", "gpt_oss": ""}
    arguments = "" if name == "glm" else "{}"
    assert [call.name for call in parse(parse.call_start("f") + arguments + ends[name]).calls] == ["f"]
    assert parse.call_start("f").startswith(parse.call_start(None))


def test_a_parser_that_does_not_is_an_error_by_name():
    async def use(client):
        with pytest.raises(openai.BadRequestError, match="tool_choice=required is not supported with parser 'mine'"):
            await ask(client, tools=[tool("f")], tool_choice="required")

    def mine(text):
        return load_plugin("parsers", "hermes")(text)

    with_client(says("x"), use, parser=mine)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_without_parallel_calls_tokens_of_others_are_left_out(streams):
    server = says("Both. " + call("f", a=1) + "\n" + call("g"), "done", kind=Streamed)

    async def use(client):
        given = {"tools": [tool("f"), tool("g")], "parallel_tool_calls": False}
        if streams:
            parts = [part async for part in await ask(client, **given, stream=True)]
            calls = [made for part in parts if part.choices for made in part.choices[0].delta.tool_calls or ()]
            message = {"role": "assistant", "content": "Both.", "tool_calls": [each.model_dump() for each in calls]}
        else:
            message = (await ask(client, **given)).choices[0].message.model_dump(exclude_none=True)
        (made,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": made["id"], "content": "ok"}
        await ask(client, [USER, message, result], tools=given["tools"])
        return made["function"]["name"]

    name, (output,) = with_client(server, use)
    assert name == "f"
    assert written(output).rstrip().startswith("Both. " + call("f", a=1))
    assert "g" not in written(output).replace("arguments", "")


def test_template_variables_arrive_and_separate_conversations():
    class Noted(FakeTokenizer):
        seen: list = []  # noqa: RUF012 - read by the test

        def apply_chat_template(self, conversation, **kwargs):
            self.seen.append(kwargs.get("enable_thinking"))
            return super().apply_chat_template(conversation, **kwargs)

    async def main():
        proxy = RecordingProxy(says("a", "b"), Noted(), template_kwargs={"enable_thinking": True})
        async with openai.AsyncOpenAI(base_url=await proxy.start(), api_key="one", max_retries=0) as client:
            assert set(Noted.seen) == {True}
            Noted.seen.clear()
            await ask(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
            assert set(Noted.seen) == {False}
            await ask(client, [USER, {"role": "assistant", "content": "a"}, USER])
        await proxy.stop()
        return proxy.finish("one")

    assert len(asyncio.run(main())) == 2, "another prompt, and so another trajectory"


def test_sampling_fields_reach_the_server():
    async def use(client):
        await ask(client, temperature=0.5, top_p=0.9, seed=3, extra_body={"top_k": 7})
        await ask(client, extra_body={"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.2}, presence_penalty=0.5)

    server = says("a", "b")
    with_client(server, use)
    first, second = (request.sampling_params for request in server.requests)
    assert (first.temperature, first.top_p, first.seed, first.top_k) == (0.5, 0.9, 3, 7)
    assert (second.top_k, second.min_p, second.repetition_penalty, second.presence_penalty) == (0, 0.1, 1.2, 0.5)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_logprobs_are_those_that_are_recorded(streams):
    async def use(client):
        answer = await ask(client, logprobs=True, stream=streams)
        if not streams:
            return answer.choices[0].logprobs.content
        return [each async for part in answer if part.choices for each in (part.choices[0].logprobs or NONE).content]

    class NONE:
        content = ()

    content, (output,) = with_client(says("hey", kind=Streamed), use)
    assert [each.token for each in content] == ["h", "e", "y", "<|im_end|>"]
    assert tuple(each.logprob for each in content) == output.rollout_logprobs
    assert bytes(content[0].bytes) == b"h"


def test_top_logprobs_are_asked_of_the_server():
    class Tops(FakeGenerator):
        async def generate(self, request):
            output = await super().generate(request)
            from dataclasses import replace

            tops = tuple(((i, -0.1), (103, -2.0))[: request.num_top_logprobs] for i in output.token_ids)
            return replace(output, top_logprobs=tops)

    async def use(client):
        return (await ask(client, logprobs=True, top_logprobs=2)).choices[0].logprobs.content

    content, _ = with_client(says("h", kind=Tops), use)
    assert [(each.token, each.logprob) for each in content[0].top_logprobs] == [("h", -0.1), ("d", -2.0)]


@pytest.mark.parametrize("has_responses", [False, True], ids=["chat", "responses"])
def test_images_travel_unchanged_through_all_turns(has_responses):
    other = PIXEL + "AAAA"
    server = says("red", "blue")

    def show(url):
        if has_responses:
            return {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
        return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}

    async def use(client):
        history = [show(PIXEL), {"role": "assistant", "content": "red"}, show(other)]
        for messages in (history[:1], history):
            if has_responses:
                await client.responses.create(model="policy", input=messages)
            else:
                await ask(client, messages)

    _, (output,) = with_client(server, use)
    assert [request.images for request in server.requests] == [(PIXEL,), (PIXEL, other)]
    assert (output.images, output.num_turns) == ((PIXEL, other), 2)
    assert TOKENIZER.image in TOKENIZER.decode(output.prompt_token_ids)


def test_other_images_are_another_conversation():
    async def use(client):
        for url in (PIXEL, PIXEL + "AAAA"):
            user = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
            await ask(client, [user, {"role": "assistant", "content": "red"}, USER] if url != PIXEL else [user])

    assert len(with_client(says("red", "x"), use)[1]) == 2


@pytest.mark.promise("A field that is not known is one warning per session, or refused by a strict proxy")
def test_an_unknown_field_is_one_warning_per_session(caplog):
    async def use(client):
        for _ in range(3):
            await ask(client, extra_body={"sparkle": 1, "web": {}})
        await client.responses.create(model="policy", input="go", tools=[{"type": "web_search"}])

    with caplog.at_level(logging.WARNING, "rl_agent.proxy.sessions"):
        with_client(says(*"abcd"), use)
    assert [record.getMessage() for record in caplog.records] == [
        "session 'one': ignored in its requests: sparkle, web",
        "session 'one': ignored in its requests: the hosted tool 'web_search'",
    ]


def test_a_strict_proxy_refuses_unknown_fields():
    async def use(client):
        with pytest.raises(openai.BadRequestError, match="sparkle not known here; leave it out"):
            await ask(client, extra_body={"sparkle": 1})
        await ask(client, user="me", metadata={"a": "b"}, store=False)

    assert len(with_client(says("a"), use, strict=True)[1]) == 1


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def structure_asked(use, **settings):
    """Structure of the request that the server got."""
    server = says("ok")
    with_client(server, use, **settings)
    params = server.requests[-1].sampling_params
    return params.json_schema, params.regex, params.choice


@pytest.mark.process
def test_structured_outputs_of_every_endpoint_reach_the_server():
    wanted = (json.dumps(SCHEMA), None, ())
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    flat = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    assert structure_asked(lambda client: ask(client, response_format=named)) == wanted
    assert structure_asked(lambda client: ask(client, response_format={"type": "json_object"}))[0]
    regex = {"structured_outputs": {"regex": "a+"}}
    assert structure_asked(lambda client: ask(client, extra_body=regex)) == (None, "a+", ())
    respond = {"model": "policy", "input": "go", "text": {"format": flat}}
    assert structure_asked(lambda client: client.responses.create(**respond)) == wanted
    message = {"model": "policy", "max_tokens": 9, "messages": [USER], "output_config": {"format": flat}}
    assert structure_asked(lambda client: client.post("/messages", body=message, cast_to=object)) == wanted


def test_a_structured_output_with_tools_is_refused():
    with pytest.raises(openai.BadRequestError, match="a structured output cannot call tools"):
        with_client(says("ok"), lambda client: ask(client, response_format={"type": "json_object"}, tools=[tool("a")]))


def test_log_probs_that_cannot_be_trained_on_are_refused():
    server = says("ok")
    server.capabilities = Capabilities(structured="restricted")
    with pytest.raises(openai.BadRequestError, match="are of the restricted distribution"):
        with_client(server, lambda client: ask(client, response_format={"type": "json_object"}))
