"""Streamed answers: tokens are passed on as they come, and what is shown is what is recorded."""

import asyncio

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rl_agent import load_tokenizer, validate_output
from rl_agent.proxy import RecordingProxy
from rl_agent.proxy.live_text import LiveText, opens_thinking
from rl_agent.registry import load_plugin
from rl_agent.testing import FakeGenerator, FakeTokenizer
from rl_rollout import ServerConfig, create_server
from rl_rollout.errors import ServerLostError
from rl_rollout.testing import write_tiny_model
from rl_rollout.types import FinishReason, TokenChunk

openai = pytest.importorskip("openai", reason="needs the openai client")

TOKENIZER = FakeTokenizer()
USER = {"role": "user", "content": "go"}


class Stepwise(FakeGenerator):
    """Says one token at a time, each when it is allowed to; the stop token comes before the last, empty chunk."""

    def __init__(self, text, *, fails_at=None):
        super().__init__()
        self.ids = [*TOKENIZER.encode(text), 1]
        self.allowed = asyncio.Semaphore(0)
        self.fails_at = fails_at
        self.was_left = False

    async def generate_stream(self, request):
        self.requests.append(request)
        try:
            for i, token in enumerate(self.ids):
                await self.allowed.acquire()
                if i == self.fails_at:
                    raise ServerLostError("the fake server went away")
                yield chunk(token)
        except (GeneratorExit, asyncio.CancelledError):
            self.was_left = True
            raise
        yield TokenChunk(token_ids=(), logprobs=(), weight_versions=(), finish_reason=FinishReason.STOP)


def chunk(*ids):
    return TokenChunk(token_ids=ids, logprobs=(-0.5,) * len(ids), weight_versions=(3,) * len(ids), finish_reason=None)


def with_proxy(server, use, tokenizer=TOKENIZER, **settings):
    async def main():
        proxy = RecordingProxy(server, tokenizer, **settings)
        async with openai.AsyncOpenAI(base_url=await proxy.start(), api_key="one", max_retries=0, timeout=60) as client:
            try:
                async with asyncio.timeout(60):
                    return await use(client, proxy)
            finally:
                await proxy.stop()

    return asyncio.run(main())


def chat(client, **fields):
    return client.chat.completions.create(model="policy", messages=[USER], stream=True, **fields)


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
def test_a_token_is_at_the_client_before_the_next_is_made(endpoint):
    server = Stepwise("abc d")

    async def use(client, proxy):
        server.allowed.release()
        if endpoint == "chat":
            stream = await chat(client)
            texts = (event.choices[0].delta.content async for event in stream if event.choices)
        else:
            stream = await client.responses.create(model="policy", input="go", stream=True)
            texts = (event.delta async for event in stream if event.type == "response.output_text.delta")
        seen = ""
        async for text in texts:
            if text:
                seen += text
                server.allowed.release()  # the next token is made only after this one was seen
            if seen == "abc":
                server.allowed.release()  # a space is shown with what follows it
                server.allowed.release()
        (output,) = proxy.finish("one", reward=1.0)
        return seen, output

    seen, output = with_proxy(server, use)
    assert seen == "abc d"
    validate_output(output)
    assert output.completion_token_ids == tuple(server.ids)
    assert set(output.weight_versions) == {3}


def test_a_client_that_leaves_ends_its_generation_unrecorded():
    server = Stepwise("x" * 5000)

    async def use(client, proxy):
        server.allowed.release()
        stream = await chat(client)
        async for event in stream:
            if event.choices[0].delta.content:
                break
        await stream.close()
        while not server.was_left:
            server.allowed.release()
            await asyncio.sleep(0.001)
        return proxy.finish("one")

    assert with_proxy(server, use) == []


def test_a_failure_after_the_first_token_is_an_unrecorded_event():
    server = Stepwise("abcdef", fails_at=3)

    async def use(client, proxy):
        for _ in range(9):
            server.allowed.release()
        seen = ""

        async def read():
            nonlocal seen
            async for event in await chat(client):
                seen += event.choices[0].delta.content or ""

        with pytest.raises(openai.APIError, match="went away"):
            await read()
        return seen, proxy.finish("one")

    assert with_proxy(server, use) == ("abc", [])


def test_a_finished_session_records_nothing_and_reports_it():
    server = Stepwise("abc")

    async def use(client, proxy):
        server.allowed.release()
        stream = await chat(client)
        assert proxy.finish("one") == []
        for _ in range(9):
            server.allowed.release()
        with pytest.raises(openai.APIError, match="was finished while"):
            async for _ in stream:
                pass
        return proxy.finish("one")

    assert with_proxy(server, use) == []


@pytest.mark.process
def test_the_embedded_server_streams_what_it_would_say_whole(tmp_path):
    pytest.importorskip("transformers", reason="needs the extra rl-agent[hf]")
    path = str(write_tiny_model(tmp_path))
    tokenizer = load_tokenizer(path)

    async def main():
        server = create_server("embedded", ServerConfig(model_path=path, num_threads=1))
        await server.start()
        proxy = RecordingProxy(server, tokenizer, sampling_params={"max_new_tokens": 24, "temperature": 1.0})
        async with openai.AsyncOpenAI(base_url=await proxy.start(), api_key="one", max_retries=0, timeout=60) as client:
            whole = await client.chat.completions.create(model="policy", messages=[USER], seed=5)
            text, num_events = "", 0
            async for event in await chat(client, seed=5):
                text += event.choices[0].delta.content or ""
                num_events += bool(event.choices[0].delta.content)
        await proxy.stop()
        await server.stop()
        return whole.choices[0].message.content, text, num_events, proxy.finish("one")

    whole, text, num_events, outputs = asyncio.run(main())
    assert whole == text
    assert num_events > 2, "it came in pieces"
    assert len({output.completion_token_ids for output in outputs}) == 1
    assert len(outputs) == 2


# ---- what may be shown already

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
PIECES = ["a", " ", "\n", "word", "<", "<tool", "<tool_call>", CALL, "<think>", "</think>", "é", "{", "[TOOL_CALLS]"]


@pytest.mark.process
@given(st.lists(st.sampled_from(PIECES), max_size=12), st.sampled_from(["hermes", "llama", "mistral", "gpt_oss"]))
@example(["<think>", "<", "</think>"], "hermes")
def test_what_is_shown_is_never_taken_back(pieces, parser):
    parse, text = load_plugin("parsers", parser), "".join(pieces)
    live, reasoning, content = LiveText(TOKENIZER, parse.opened_by, is_thinking=False), "", ""
    for token in TOKENIZER.encode(text):
        more = live.push([token])
        reasoning, content = reasoning + more[0], content + more[1]
        assert (reasoning, content) == (live.reasoning, live.content)
    turn = parse(text)
    if "</think>" not in text and not any(each.error for each in turn.calls):
        assert turn.content.startswith(content)
        assert turn.reasoning.startswith(reasoning)
    assert live.rest(text).startswith(content)
    assert "<tool_call>" not in content or parser != "hermes"


def test_reasoning_is_shown_as_it_comes():
    live = LiveText(TOKENIZER, ("<tool_call>", "<think>"), is_thinking=True)
    assert live.push(TOKENIZER.encode("so")) == ("so", "")
    assert live.push(TOKENIZER.encode(" it</thi")) == (" it", "")
    assert live.push(TOKENIZER.encode("nk>\n\nyes")) == ("", "yes")
    assert opens_thinking("<|im_start|>assistant\n<think>\n")
    assert not opens_thinking("<think>\n\n</think>\n\n")


def test_a_parser_without_call_start_shows_nothing_early():
    live = LiveText(TOKENIZER, None, is_thinking=False)
    assert live.push(TOKENIZER.encode("plain")) == ("", "")


def test_a_character_of_several_tokens_is_shown_whole():
    class Bytes(FakeTokenizer):
        def decode(self, token_ids, *, skip_special_tokens=False):
            return bytes(token_ids).decode(errors="replace")

    live = LiveText(Bytes(), ("<tool_call>",), is_thinking=False)
    shown = [live.push([byte])[1] for byte in "aé€b".encode()]
    assert shown == ["a", "", "é", "", "", "€", "b"]
