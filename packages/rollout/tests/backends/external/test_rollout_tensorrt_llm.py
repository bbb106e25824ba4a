"""The TensorRT-LLM backend against a fake that speaks its protocol. The real server was never run."""

import asyncio
import sys
from pathlib import Path

import pytest

from rl_rollout import (
    ConfigError,
    FinishReason,
    GenerateRequest,
    GenerationError,
    SamplingParams,
    ServerConfig,
    ServerLostError,
    TokenChunk,
    UnsupportedError,
    create_server,
)
from rl_rollout.backends.tensorrt_llm import put_together, read_event
from rl_rollout.testing import FakeReceiver, load_weights

FAKE = [sys.executable, str(Path(__file__).parents[2] / "peers/fake_trtllm.py")]
START_S = 240.0
LONG = 1900


def config_of(folder, **fields):
    fields = {"options": {"command": FAKE, "sleeps": True}} | fields
    return ServerConfig(model_path=str(folder), num_threads=1, timeout_s=START_S, **fields)


def request(request_id="r", prompt=(5, 6, 7), **params):
    params = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True} | params
    return GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=SamplingParams(**params))


@pytest.fixture(scope="module")
def servers(long_folder):
    """The backend over the fake, and the embedded engine that is behind it."""
    with asyncio.Runner() as runner:
        theirs = create_server("tensorrt_llm", config_of(long_folder))
        ours = create_server("embedded", ServerConfig(model_path=str(long_folder), num_threads=1))
        runner.run(theirs.start())
        runner.run(ours.start())
        yield runner.run, theirs, ours
        runner.run(theirs.stop())
        runner.run(ours.stop())


def test_it_gives_what_the_engine_gives(servers):
    run, theirs, ours = servers
    stop = run(ours.generate(request())).token_ids[4]
    for params in ({}, {"stop_token_ids": (stop,)}, {"temperature": 1.0, "seed": 3, "max_new_tokens": 30}):
        assert run(theirs.generate(request(**params))) == run(ours.generate(request(**params)))


def test_an_abort_returns_what_had_come(servers):
    run, theirs, ours = servers

    async def scenario():
        whole = await ours.generate(request(max_new_tokens=LONG))
        task = asyncio.create_task(theirs.generate(request(max_new_tokens=LONG)))
        while not theirs._reading:  # noqa: ASYNC110  there is no event to wait for
            await asyncio.sleep(0.001)
        await theirs.pause("abort")
        part = await task
        await theirs.resume()
        return whole, part

    whole, part = run(scenario())
    assert part.finish_reason is FinishReason.ABORT
    assert len(part.token_ids) < LONG
    assert part.token_ids == whole.token_ids[: len(part.token_ids)]


def test_sleep_waits_for_what_is_in_flight_and_holds_the_rest(servers):
    run, theirs, _ = servers

    async def scenario():
        first = asyncio.create_task(theirs.generate(request("first", max_new_tokens=300)))
        await asyncio.sleep(0)
        await theirs.sleep(1)
        was_done = first.done()
        second = asyncio.create_task(theirs.generate(request("second")))
        await asyncio.sleep(0.05)
        states = was_done, second.done()
        await theirs.wake()
        return states, len((await first).token_ids), len((await second).token_ids)

    assert run(scenario()) == ((True, False), 300, 8)


def test_what_it_cannot_do_is_refused(servers, long_folder):
    run, theirs, _ = servers
    receiver = FakeReceiver(load_weights(long_folder), 1)
    for call, message in (
        (theirs.generate(request(temperature=0.7)), "log-probs of the raw logits"),
        (theirs.generate(request(top_p=0.9)), "log-probs of the raw logits"),
        (theirs.pause("keep"), "pause with abort or wait"),
        (theirs.update_weights(receiver, 1), "takes no new weights"),
        (theirs.sleep(2), "cannot sleep at level 2"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            run(call)
    assert run(theirs.generate(request())).token_ids


def test_settings_that_it_cannot_honour_are_refused(long_folder):
    with pytest.raises(ConfigError, match="kv_cache_bytes=100: .*--extra_llm_api_options FILE"):
        create_server("tensorrt_llm", config_of(long_folder, kv_cache_bytes=100))
    with pytest.raises(ConfigError, match="sleeps='yes' must be true or false"):
        create_server("tensorrt_llm", config_of(long_folder, options={"sleeps": "yes"}))


def test_answers_that_would_be_wrong_in_silence_are_errors():
    with pytest.raises(GenerationError, match="told no token ids"):
        read_event({"choices": [{"text": "a", "token_ids": None}]}, 0)
    with pytest.raises(GenerationError, match="told 2 tokens and 1 log-probs"):
        read_event({"choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0]}}]}, 0)
    with pytest.raises(GenerationError, match="out of memory"):
        read_event({"message": "out of memory"}, 0)
    half = [TokenChunk(token_ids=(5,), logprobs=(-0.5,), weight_versions=(0,), finish_reason=None)]
    with pytest.raises(ServerLostError, match="ended the stream of 'r' without a reason") as lost:
        put_together(request(), half, is_aborted=False)
    assert lost.value.partial.token_ids == (5,)
