"""The TensorRT-LLM backend against a fake that speaks its protocol. The real server was never run.

RL_ROLLOUT_TRTLLM is the folder of a virtual environment with TensorRT-LLM, Ray and rl-ckpt, and RL_ROLLOUT_MODEL that
of a model in bfloat16, with its tokenizer.
"""

import asyncio
import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rollout_servers import TRTLLM, real_trtllm, serve

from rl_bench.waiting import until_async
from rl_ckpt.adapters import tensorrt_llm as adapter
from rl_rollout import (
    ConfigError,
    FinishReason,
    GenerateRequest,
    GenerationError,
    SamplingParams,
    ServerConfig,
    ServerLostError,
    ServerParallel,
    ServerStartError,
    TokenChunk,
    UnsupportedError,
    WeightUpdateError,
    create_server,
)
from rl_rollout.backends import tensorrt_llm
from rl_rollout.backends.tensorrt_llm import LAUNCHER, put_together, read_event
from rl_rollout.testing import FakeReceiver, ServerConformance, load_weights
from rl_rollout.testing.conformance import InFlight, expect, other_weights

FAKE = [sys.executable, str(Path(__file__).parents[2] / "peers/fake_trtllm.py")]
START_S = 240.0
LONG = 1900


def config_of(folder, **fields):
    fields = {"options": {"command": FAKE, "sleeps": True}} | fields
    return ServerConfig(model_path=str(folder), num_threads=1, timeout_s=START_S, **fields)


def request(request_id="r", prompt=(5, 6, 7), **params):
    params = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True} | params
    return GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=SamplingParams(**params))


@pytest.mark.process
@pytest.mark.contract
class TestProtocol(ServerConformance):
    """Where TensorRT-LLM can less than the suite asks for, a test of the same name says what it does instead."""

    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, long_folder, new_trainer):
        yield from serve(
            "tensorrt_llm", config_of(long_folder, max_model_len=4096), new_trainer(60), max_model_len=4096
        )

    def test_pause_keep_freezes_and_holds(self, served):
        expect(UnsupportedError, lambda: served.run(served.server.pause("keep")), "pause with abort or wait")
        assert served.generate().token_ids

    @pytest.mark.promise(
        "Requests in flight at TensorRT-LLM end under the weights before an update (a fake of its protocol)"
    )
    def test_a_request_in_flight_goes_on_under_new_weights(self, served):
        """It ends under the old ones, with none of the new, and what comes meanwhile waits for the new ones."""
        weights = load_weights(served.model_path)
        served.install(weights)
        old = served.version

        async def scenario():
            asked = served.request((5,), max_new_tokens=500)
            first = asyncio.create_task(served.server.generate(asked))
            await served.server.generate(served.request((6,), max_new_tokens=1))
            was_in_flight = not first.done()
            update = asyncio.create_task(served.update(served, other_weights(weights), old + 1))
            await until_async(lambda: served.server.requests.is_held)
            second = asyncio.create_task(served.server.generate(served.request((5,), max_new_tokens=20)))
            await update
            return was_in_flight, await first, await second

        was_in_flight, first, second = served.run(scenario())
        served.version = old + 1
        assert was_in_flight
        assert first.weight_versions == (old,) * 500
        assert second.weight_versions == (old + 1,) * 20
        assert second.token_ids == served.generate((5,), max_new_tokens=20).token_ids
        served.install(weights)
        assert first.token_ids == served.generate((5,), max_new_tokens=500).token_ids

    def test_an_update_waits_at_most_its_deadline_for_requests(self, served, monkeypatch):
        receiver = FakeReceiver(load_weights(served.model_path), served.version + 1)
        receiver.address = "shm://nobody"

        async def scenario():
            going = InFlight(served)
            await going.proceed()
            monkeypatch.setattr(served.server.requests, "timeout_s", 0.2)
            with pytest.raises(WeightUpdateError, match=r"did not finish the requests in flight .* still serves"):
                await served.server.update_weights(receiver, served.version + 1)
            assert not served.server.requests.is_held
            return await going.end()

        assert served.run(scenario()).token_ids

    def test_logprobs_are_of_the_distribution_that_was_sampled_from(self, served):
        for params in ({"temperature": 0.7}, {"top_p": 0.9, "temperature": 1.0}, {"top_k": 5, "temperature": 1.0}):
            expect(UnsupportedError, lambda params=params: served.generate(**params), "log-probs of the raw logits")

    def test_sleep_gives_back_the_cache_and_loses_nothing(self, served):
        """Requests in flight are finished first: `test_sleep_waits_for_what_is_in_flight_and_holds_the_rest`."""
        old = served.generate()
        served.run(served.server.sleep(1))
        served.run(served.server.wake())
        new = served.generate()
        assert replace(new, request_id=old.request_id) == old

    def test_what_the_real_one_is_asked_for_on_a_gpu(self, served):
        check_updates(served)

    test_stop_ends_it = ServerConformance.test_stop_ends_it


@real_trtllm
@pytest.mark.gpu
@pytest.mark.parametrize("tp", [1, 2])
def test_the_real_one_serves_what_it_is_sent(tp, new_trainer):
    if torch.cuda.device_count() < tp:
        pytest.skip(f"{tp} GPUs are needed")
    options = {"command": f"{TRTLLM}/bin/python -m {LAUNCHER}", "sleeps": True}
    model = os.environ["RL_ROLLOUT_MODEL"]
    config = config_of(model, options=options, parallel=ServerParallel(tp=tp), max_model_len=512)
    for served in serve("tensorrt_llm", config, new_trainer(300), max_model_len=512):
        check_updates(served)


def check_updates(served):
    weights = load_weights(served.model_path)
    others = other_weights(weights)
    without = {name: tensor for name, tensor in others.items() if not name.endswith("norm.weight")}

    def tokens():
        return served.generate(max_new_tokens=20).token_ids

    old = tokens()
    assert tokens() == old
    expect(WeightUpdateError, lambda: served.install(without), "still serves")  # undone with what is on disk
    assert tokens() == old
    served.version += 1
    version = served.install(others)
    new = served.generate(max_new_tokens=20)
    assert new.token_ids != old
    assert new.weight_versions == (version,) * 20
    expect(WeightUpdateError, lambda: served.install(without), "still serves")  # undone with the version before
    assert tokens() == new.token_ids
    served.version += 1
    served.run(served.server.sleep(1))
    served.run(served.server.wake())
    served.install(weights)
    assert tokens() == old


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


@pytest.mark.process
def test_it_gives_what_the_engine_gives(servers):
    run, theirs, ours = servers
    stop = run(ours.generate(request())).token_ids[4]
    for params in ({}, {"stop_token_ids": (stop,)}, {"temperature": 1.0, "seed": 3, "max_new_tokens": 30}):
        assert run(theirs.generate(request(**params))) == run(ours.generate(request(**params)))


@pytest.mark.process
def test_an_abort_returns_what_had_come(servers):
    run, theirs, ours = servers

    async def scenario():
        whole = await ours.generate(request(max_new_tokens=LONG))
        task = asyncio.create_task(theirs.generate(request(max_new_tokens=LONG)))
        await until_async(lambda: theirs._reading)
        await theirs.pause("abort")
        part = await task
        await theirs.resume()
        return whole, part

    whole, part = run(scenario())
    assert part.finish_reason is FinishReason.ABORT
    assert len(part.token_ids) < LONG
    assert part.token_ids == whole.token_ids[: len(part.token_ids)]


@pytest.mark.process
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


@pytest.mark.process
def test_what_it_cannot_do_is_refused(servers):
    run, theirs, _ = servers
    for call, message in (
        (theirs.generate(request(temperature=0.7)), "log-probs of the raw logits"),
        (theirs.generate(request(top_p=0.9)), "log-probs of the raw logits"),
        (theirs.pause("keep"), "pause with abort or wait"),
        (theirs.sleep(2), "cannot sleep at level 2"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            run(call)
    assert run(theirs.generate(request())).token_ids


def test_settings_that_it_cannot_honour_are_refused(long_folder):
    for fields, message in (
        ({"kv_cache_bytes": 100}, "kv_cache_bytes=100: .*--extra_llm_api_options FILE"),
        ({"parallel": ServerParallel(tp=2, pp=2)}, r"parallel=ServerParallel\(tp=2, .*pp=2"),
        ({"options": {"sleeps": "yes"}}, "sleeps='yes' must be true or false"),
        ({"options": {"sleeps": True, "command": "/bin/trtllm-serve"}}, "sleeps=true: trtllm-serve cannot"),
        ({"options": {"args": "--tp_size 2"}}, "args have --tp_size, .* set parallel tp"),
    ):
        with pytest.raises(ConfigError, match=message):
            create_server("tensorrt_llm", config_of(long_folder, **fields))


def test_trtllm_serve_takes_no_new_weights_and_the_launcher_does(long_folder):
    receiver = FakeReceiver(load_weights(long_folder), 1)
    plain = create_server("tensorrt_llm", config_of(long_folder, options={"command": "/bin/trtllm-serve"}))
    assert not plain.capabilities.updates_weights
    with pytest.raises(UnsupportedError, match="takes no new weights"):
        asyncio.run(plain.update_weights(receiver, 1))
    both = create_server("tensorrt_llm", config_of(long_folder, options={}, parallel=ServerParallel(tp=2)))
    assert (both.capabilities.updates_weights, both.capabilities.num_receivers) == (True, 2)
    command = both._command()
    assert command[:3] == [sys.executable, "-m", "rl_ckpt.adapters.tensorrt_llm"]
    assert command[-2:] == ["--tp_size", "2"]


def test_both_packages_mean_the_same_message():
    for name in ("KEY_VARIABLE", "AUTH_HEADER"):
        assert getattr(tensorrt_llm, name) == getattr(adapter, name)
    fields = {"url": "shm://a", "version": 3, "timeout_s": 1.0, "folder": "/f"}
    assert tensorrt_llm.update_message(**fields) == adapter.update_message(**fields)
    assert importlib.util.find_spec(f"{LAUNCHER}.__main__") is not None
    assert adapter.__name__ == LAUNCHER


@pytest.mark.slow
def test_a_server_whose_workers_take_no_messages_fails_at_start(long_folder):
    config = config_of(long_folder, options={"command": FAKE, "args": "--without-extension"})
    server = create_server("tensorrt_llm", config)
    with pytest.raises(ServerStartError, match=r"do not take weights \(.*not found in ipc_handles.*rl_ckpt.adapters"):
        asyncio.run(server.start())


@pytest.mark.process
def test_answers_that_would_be_wrong_in_silence_are_errors():
    with pytest.raises(GenerationError, match="returned no token ids"):
        read_event({"choices": [{"text": "a", "token_ids": None}]}, 0)
    with pytest.raises(GenerationError, match="returned 2 tokens and 1 log-probs"):
        read_event({"choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0]}}]}, 0)
    with pytest.raises(GenerationError, match="out of memory"):
        read_event({"message": "out of memory"}, 0)
    half = [TokenChunk(token_ids=(5,), logprobs=(-0.5,), weight_versions=(0,), finish_reason=None)]
    with pytest.raises(ServerLostError, match="ended the stream of 'r' without a reason") as lost:
        put_together(request(), half, is_aborted=False)
    assert lost.value.partial.token_ids == (5,)
