"""The recording proxy under what nobody here wrote: the OpenAI client and openai-agents, over real sockets."""

import asyncio
import json

import pytest

from rl_agent import validate_output
from rl_agent.proxy import RecordingProxy
from rl_agent.testing import FakeGenerator, FakeTokenizer
from rl_rollout.errors import RequestError, ServerLostError

openai = pytest.importorskip("openai", reason="needs the openai client")

TOKENIZER = FakeTokenizer()
USER = {"role": "user", "content": "go"}
IMAGE = {"type": "image_url", "image_url": {"url": "/etc/passwd"}}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def says(*turns):
    turns = iter(turns)
    return FakeGenerator(lambda _: [*TOKENIZER.encode(next(turns)), 1], weight_version=2)


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def with_client(server, use, reward=1.0, **settings):
    """Run `use(client)` against a proxy; its result and the session's trajectories."""

    async def main():
        proxy = RecordingProxy(server, TOKENIZER, sampling_params={"max_new_tokens": 512}, **settings)
        client = openai.AsyncOpenAI(base_url=await proxy.start(), api_key="one", max_retries=0, timeout=60)
        try:
            result = await use(client)
        finally:
            await client.close()
            await proxy.stop()
        outputs = proxy.finish("one", reward=reward)
        assert proxy.finish("one") == []
        for output in outputs:
            validate_output(output)
        return result, outputs

    return asyncio.run(main())


def ask(client, messages, **fields):
    return client.chat.completions.create(model="policy", messages=messages, **fields)


def decoded(output, flag):
    pairs = zip(output.completion_token_ids, output.loss_mask, strict=True)
    return TOKENIZER.decode([i for i, m in pairs if m == flag])


def test_turns_that_extend_each_other_are_one_trajectory():
    first = "  I add:  " + call("add", a=1, b=2)  # spaces that a rendering of the parsed message would lose

    async def use(client):
        one = await ask(client, [USER], tools=[ADD])
        message = one.choices[0].message
        assert (message.content, one.choices[0].finish_reason) == ("I add:", "tool_calls")
        assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1, "b": 2}
        answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        messages = [USER, message.model_dump(exclude_none=True), answer]
        assert len(answer["tool_call_id"]) == 9
        two = await ask(client, messages, tools=[ADD], temperature=0.5, seed=9)
        assert (two.choices[0].message.content, two.choices[0].finish_reason) == ("three", "stop")
        return two.usage

    server = says(first, "three")
    usage, (output,) = with_client(server, use)
    assert decoded(output, 1) == first + "<|im_end|>three<|im_end|>"
    assert decoded(output, 0) == "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    assert (output.num_turns, output.reward, set(output.weight_versions)) == (2, 1.0, {2, -1})
    assert usage.prompt_tokens == len(server.requests[1].prompt_token_ids)
    params = server.requests[1].sampling_params
    assert (params.temperature, params.seed, params.max_new_tokens) == (0.5, 9, 512)
    assert {request.session_id for request in server.requests} == {"one"}
    ((start, end),) = server.requests[1].sampled_spans
    assert TOKENIZER.decode(server.requests[1].prompt_token_ids[start:end]) == first + "<|im_end|>"


@pytest.mark.promise("The proxy: what extends becomes one trajectory, branches become several")
def test_branches_become_trajectories_that_train_prefixes_once():
    async def use(client):
        one = (await ask(client, [USER])).choices[0].message.content
        base = [USER, {"role": "assistant", "content": one}]
        await ask(client, [*base, {"role": "user", "content": "left"}])
        await ask(client, [*base, {"role": "user", "content": "right"}])
        await ask(client, [{"role": "user", "content": "anew"}])

    _, outputs = with_client(says("root", "L", "R", "new"), use)
    trained = [decoded(output, 1) for output in outputs]
    assert trained == ["root<|im_end|>L<|im_end|>", "R<|im_end|>", "new<|im_end|>"]
    assert "root<|im_end|>" in decoded(outputs[1], 0)
    assert [output.num_turns for output in outputs] == [2, 2, 1]


def test_a_changed_past_starts_a_trajectory_of_its_own():
    async def use(client):
        await ask(client, [USER])
        await ask(client, [USER, {"role": "assistant", "content": "summary"}, {"role": "user", "content": "on"}])

    _, outputs = with_client(says("a long answer", "yes"), use)
    assert [decoded(output, 1) for output in outputs] == ["a long answer<|im_end|>", "yes<|im_end|>"]


def test_streaming_says_the_same():
    async def use(client):
        stream = await ask(client, [USER], tools=[ADD], stream=True, stream_options={"include_usage": True})
        return [chunk async for chunk in stream]

    chunks, (output,) = with_client(says("hm " + call("add", a=1) + call("add", a=2)), use)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "hm"
    calls = [each for delta in deltas for each in delta.tool_calls or ()]
    assert [(each.index, json.loads(each.function.arguments)) for each in calls] == [(0, {"a": 1}), (1, {"a": 2})]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage.completion_tokens == len(output.completion_token_ids)


def test_a_broken_call_is_text_to_a_framework():
    async def use(client):
        return (await ask(client, [USER], tools=[ADD])).choices[0].message

    message, (output,) = with_client(says("<tool_call>{"), use)
    assert (message.content, message.tool_calls) == ("<tool_call>{", None)
    assert output.num_turns == 1


@pytest.mark.promise("A field that is not honoured is refused")
@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"n": 0}, "n is 0; an integer from 1 to 128 is needed"),
        ({"stop": [5]}, r"stop is \[5\]; text or a list of texts"),
        ({"response_format": {"type": "xml"}}, "asks for no structure that is known"),
        ({"logit_bias": {"5": 1}}, "logit_bias=.* is not supported"),
        ({"presence_penalty": "much"}, "presence_penalty is 'much'; a number is needed"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21; an integer from 0 to 20"),
        ({"tool_choice": "always", "tools": [ADD]}, "tool_choice is 'always'; auto, none, required"),
        ({"tool_choice": "required"}, "the request has the tools: none"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": [ADD]}, "has the tools: add"),
        ({"extra_body": {"chat_template_kwargs": "no"}}, "chat_template_kwargs is 'no'; an object is needed"),
        ({"extra_body": {"best_of": 3}}, "best_of=3 is not supported"),
        ({"parallel_tool_calls": "no", "tools": [ADD]}, "parallel_tool_calls is 'no'; true or false"),
        ({"max_tokens": 5, "max_completion_tokens": 7}, "max_tokens and max_completion_tokens are one setting"),
        ({"tools": [{"type": "function"}]}, "a tool is {'type': 'function'}"),
        ({"max_tokens": 0}, "max_tokens is 0; at least 1 is needed"),
        ({"extra_body": {"tools": "add"}}, "tools is 'add'; a list of objects is needed"),
        ({"extra_body": {"stream": "false"}}, "stream is 'false'; true or false is needed"),
        ({"extra_body": {"stream_options": []}}, "not of the format of this endpoint: AttributeError"),
        ({"messages": [{"role": "user", "content": 5}]}, "content is 5; text or a list of parts"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]}, "KeyError: 'function'"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "'/etc/passwd' is not a data URL"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "text and images are supported"),
    ],
)
def test_a_field_that_is_not_honoured_is_refused(fields, sentence):
    async def use(client):
        with pytest.raises(openai.BadRequestError, match=sentence):
            await ask(client, **{"messages": [USER], **fields})

    assert with_client(says("x"), use)[1] == []


@pytest.mark.parametrize(("error", "status"), [(ServerLostError("gone"), 503), (RequestError("too long"), 400)])
def test_a_failing_server_is_a_request_error_and_unrecorded(error, status):
    def fail(_):
        raise error

    async def use(client):
        with pytest.raises(openai.APIStatusError, match=str(error)) as caught:
            await ask(client, [USER])
        return caught.value.status_code

    found, outputs = with_client(FakeGenerator(fail), use)
    assert (found, outputs) == (status, [])


@pytest.mark.process
def test_sessions_do_not_mix():

    num_sessions = 100

    async def main():
        server = FakeGenerator(lambda request: [*request.prompt_token_ids[-40:], 1], delay_s=0.01)
        proxy = RecordingProxy(server, TOKENIZER)
        base = (await proxy.start()).removesuffix("/v1")
        async with openai.AsyncOpenAI(base_url=base, api_key="x", max_retries=0, timeout=120) as client:

            async def talk(i):
                own = client.with_options(base_url=f"{base}/sessions/s{i}/v1")
                await ask(own, [{"role": "user", "content": f"number {i}"}])

            await asyncio.gather(*(talk(i) for i in range(num_sessions)))
        await proxy.stop()
        return [proxy.finish(f"s{i}") for i in range(num_sessions)]

    for i, outputs in enumerate(asyncio.run(main())):
        assert f"number {i}<|im_end|>" in outputs[0].text + TOKENIZER.decode(outputs[0].prompt_token_ids)
        assert len(outputs) == 1


@pytest.mark.process
@pytest.mark.parametrize("endpoint", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("is_streaming", [False, True])
def test_openai_agents_runs_unchanged(endpoint, is_streaming):
    agents = pytest.importorskip("agents", reason="needs openai-agents")

    async def use(client):
        agents.set_tracing_disabled(True)

        @agents.function_tool
        def add(a: int, b: int) -> int:
            """Add."""
            return a + b

        model = getattr(agents, endpoint)(model="policy", openai_client=client)
        agent = agents.Agent(name="adder", instructions="use the tool", tools=[add], model=model)
        if not is_streaming:
            return (await agents.Runner.run(agent, "1 + 2?")).final_output
        result = agents.Runner.run_streamed(agent, "1 + 2?")
        async for _ in result.stream_events():
            pass
        return result.final_output

    turn = "I add. " + call("add", a=1, b=2)
    answer, (output,) = with_client(says(turn, "it is 3"), use)
    assert answer == "it is 3"
    assert decoded(output, 1) == turn + "<|im_end|>it is 3<|im_end|>"
    assert "tool\n3<|im_end|>" in decoded(output, 0)
    assert output.num_turns == 2
