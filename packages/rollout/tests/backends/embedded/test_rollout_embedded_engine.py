"""What the embedded engine promises beyond the conformance suite: memory, streaming, faults."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rl_rollout import (
    ConfigError,
    FinishReason,
    GenerateRequest,
    GenerationError,
    ModelFolderError,
    RequestError,
    SamplingParams,
    ServerConfig,
    ServerLostError,
    WeightUpdateError,
    create_server,
)
from rl_rollout.backends.embedded.model.model_runner import choose_num_threads
from rl_rollout.testing import FakeReceiver, load_weights, write_tiny_model


def request(request_id="r", prompt=(5, 6, 7), timeout_s=None, **params):
    params = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True} | params
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(**params),
        timeout_s=timeout_s,
    )


def serve(folder, scenario, **config):
    """Run `scenario(server)` on a server of its own."""

    async def life():
        server = create_server("embedded", ServerConfig(**{"model_path": str(folder), "num_threads": 1, **config}))
        await server.start()
        try:
            return await scenario(server)
        finally:
            await server.stop()

    return asyncio.run(life())


def test_memory_is_bounded_and_everyone_is_served(qwen3_folder):
    # 2 layers x 2 heads x (8 + 8) numbers x 4 bytes = 256 bytes per position: room for 128 positions, 8 blocks of 16.
    async def scenario(server):
        lengths = [3, 3, 70, 3, 3, 60, 80, 3]
        requests = [request(f"r{i}", prompt=(5, i + 3), max_new_tokens=n) for i, n in enumerate(lengths)]
        outputs = await asyncio.gather(*map(server.generate, requests))
        alone = [await server.generate(each) for each in requests]
        return outputs, alone, lengths, server.engine

    outputs, alone, lengths, engine = serve(qwen3_folder, scenario, kv_cache_bytes=128 * 256)
    assert [len(output.token_ids) for output in outputs] == lengths
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]
    # Not a bit differs, whoever was beside a token and however often it was computed.
    assert [output.logprobs for output in outputs] == [output.logprobs for output in alone]
    assert engine.cache.num_blocks <= 8
    assert engine.scheduler.num_preemptions > 0  # 210 tokens do not fit at once


def test_a_small_model_takes_one_thread_and_tells_it(qwen3_folder, tmp_path):
    assert [choose_num_threads(n, 16, is_fused=False) for n in (794_496, 2_770_000, 2**30)] == [1, 2, 16]
    assert [choose_num_threads(n, 16, is_fused=True) for n in (200_000, 794_496, 2**30)] == [1, 3, 16]

    async def scenario(server):
        asked = await asyncio.wrap_future(server.requests.thread.call(lambda engine: torch.get_num_threads()))
        return asked, server.status()["num_threads"]

    try:
        torch.set_num_threads(3)
        assert serve(qwen3_folder, scenario, num_threads=2) == (1, 2)  # the native pass takes none of torch's
        assert torch.get_num_threads() == 3
        assert ThreadPoolExecutor(1).submit(torch.get_num_threads).result() == 3  # nor has who comes later
        assert serve(qwen3_folder, scenario, num_threads=0) == (1, 1)
        assert serve(write_tiny_model(tmp_path, family="gemma"), scenario, num_threads=2) == (2, 2)
    finally:
        torch.set_num_threads(1)


def test_a_request_that_can_never_fit_is_refused(qwen3_folder):
    async def scenario(server):
        with pytest.raises(RequestError, match=r"needs 203 tokens of cache and there are 128; raise kv_cache_bytes"):
            await server.generate(request(max_new_tokens=200))
        return await server.generate(request())

    assert len(serve(qwen3_folder, scenario, kv_cache_bytes=128 * 256).token_ids) == 8


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"options": {"block_sise": 16}}, "no option 'block_sise'; did you mean 'block_size'"),
        ({"options": {"block_size": 0}}, "block_size=0 must be a whole number, at least 1"),
        ({"kv_cache_bytes": 100}, r"kv_cache_bytes=100 holds no block of the cache, which takes 4096; raise"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(qwen3_folder, config, told):
    with pytest.raises(ConfigError, match=told):
        serve(qwen3_folder, None, **config)


def test_a_stream_gives_the_tokens_of_the_whole_output(qwen3_folder):
    async def scenario(server):
        whole = await server.generate(request())
        return whole, [chunk async for chunk in server.generate_stream(request())]

    whole, chunks = serve(qwen3_folder, scenario)
    assert len(chunks) == 8
    assert tuple(i for chunk in chunks for i in chunk.token_ids) == whole.token_ids
    assert tuple(x for chunk in chunks for x in chunk.logprobs) == whole.logprobs
    assert [chunk.finish_reason for chunk in chunks] == [None] * 7 + [FinishReason.LENGTH]


def test_leaving_a_stream_or_a_call_ends_the_request(qwen3_folder):
    async def scenario(server):
        stream = server.generate_stream(request("left", max_new_tokens=250))
        await anext(stream)
        await stream.aclose()
        await server.resume()  # commands run in order: this one after the abort of the stream
        task = asyncio.create_task(server.generate(request("cancelled", max_new_tokens=250)))
        await asyncio.wait([task], timeout=0.02)
        task.cancel()
        await asyncio.wait([task])
        await server.resume()  # commands run in order: this one after the aborts
        return server.status()

    status = serve(qwen3_folder, scenario)
    assert (status["num_running"], status["num_waiting"]) == (0, 0)


def test_weights_that_are_not_numbers_fail_their_requests_alone(qwen3_folder):
    async def scenario(server):
        weights = load_weights(qwen3_folder)
        good = await server.generate(request())
        bad = {name: torch.full_like(tensor, float("nan")) for name, tensor in weights.items()}
        await server.update_weights(FakeReceiver(bad), 1)
        failed = await asyncio.gather(*(server.generate(request(f"r{i}")) for i in range(3)), return_exceptions=True)
        await server.update_weights(FakeReceiver(weights), 2)
        return good, failed, await server.generate(request())

    good, failed, again = serve(qwen3_folder, scenario)
    assert all(isinstance(error, GenerationError) for error in failed)
    assert "not finite; check the weights of version 1" in str(failed[0])
    # Nothing of the broken keys and values is left in the cache.
    assert again.token_ids == good.token_ids
    assert again.logprobs == pytest.approx(good.logprobs, abs=1e-5)


def test_a_failing_step_is_reported_to_all_and_serving_continues(qwen3_folder, caplog):
    async def scenario(server):
        engine, real = server.engine, server.engine.step

        def broken(_interrupt):
            engine.step = real
            raise MemoryError("no memory")

        engine.step = broken
        failed = await asyncio.gather(*(server.generate(request(f"r{i}")) for i in range(3)), return_exceptions=True)
        return failed, await server.generate(request())

    failed, output = serve(qwen3_folder, scenario)
    assert ["no memory" in str(error) for error in failed] == [True] * 3
    assert len(output.token_ids) == 8
    assert "a decode step failed" in caplog.text


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda weights: FakeReceiver(weights, fail_after=3), "the sender was lost after 3 tensors"),
        (lambda weights: FakeReceiver(weights, 8), "version 8 arrived instead"),
        (lambda weights: FakeReceiver({}), "weights did not arrive"),
        (
            lambda weights: FakeReceiver({**weights, "model.norm.wight": weights["model.norm.weight"]}),
            "model.norm.weight",
        ),
        (lambda weights: FakeReceiver({**weights, "model.norm.weight": torch.ones(3)}), r"arrived as \(3,\)"),
        (
            lambda weights: FakeReceiver({**weights, "lm_head.weight": weights["model.embed_tokens.weight"] + 1}),
            "is tied to",
        ),
    ],
)
def test_an_update_that_fails_says_why_and_who_serves(qwen3_folder, spoil, told):
    async def scenario(server):
        before = await server.generate(request())
        with pytest.raises(WeightUpdateError, match=told) as caught:
            await server.update_weights(spoil(load_weights(qwen3_folder)), 7)
        return before, str(caught.value), await server.generate(request())

    before, message, after = serve(qwen3_folder, scenario)
    assert "version 7 was not installed from 'fake:weights'" in message
    assert "version 0 still serves" in message
    assert after == before


@pytest.mark.parametrize("version", [-1, 2**63])
def test_a_version_that_tokens_cannot_carry_is_refused(qwen3_folder, version):
    async def scenario(server):
        with pytest.raises(WeightUpdateError, match=f"weight version {version} must be 0 or above, in 64 bits"):
            await server.update_weights(FakeReceiver(load_weights(qwen3_folder), version), version)
        return await server.generate(request())

    assert serve(qwen3_folder, scenario).weight_versions == (0,) * 8


def test_an_update_may_name_a_tied_weight_twice(qwen3_folder):
    async def scenario(server):
        weights = load_weights(qwen3_folder)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        await server.update_weights(FakeReceiver(weights), 1)
        return await server.generate(request())

    assert serve(qwen3_folder, scenario).weight_versions == (1,) * 8


def test_sleep_gives_memory_back(qwen3_folder):
    async def scenario(server):
        await server.generate(request())
        cache, module = server.engine.cache, server.engine.model.module
        before = cache.num_blocks, sum(p.numel() for p in module.parameters()) > 0
        await server.sleep(2)
        after = cache.num_blocks, sum(p.numel() for p in module.parameters()) > 0
        with pytest.raises(WeightUpdateError, match="call wake"):
            await server.update_weights(FakeReceiver(load_weights(qwen3_folder)), 1)
        await server.wake(["weights"])
        await server.update_weights(FakeReceiver(load_weights(qwen3_folder)), 1)
        task = asyncio.create_task(server.generate(request()))
        await asyncio.sleep(0.05)
        is_done = task.done()
        await server.wake(["kv_cache"])
        return before, after, is_done, await task

    before, after, is_done, output = serve(qwen3_folder, scenario)
    assert before[0] > 0
    assert (before[1], after) == (True, (0, False))
    assert not is_done
    assert output.weight_versions == (1,) * 8


def test_stop_tells_those_in_flight(qwen3_folder):
    async def scenario(server):
        await server.pause("keep")
        tasks = [asyncio.create_task(server.generate(request(f"r{i}"))) for i in range(3)]
        await asyncio.sleep(0.02)
        await server.stop()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(error, ServerLostError) for error in serve(qwen3_folder, scenario))


def test_unseeded_requests_follow_the_server_s_seed(qwen3_folder):
    async def scenario(server):
        requests = [request(f"r{i}", temperature=1.0, max_new_tokens=20) for i in range(4)]
        return [output.token_ids for output in await asyncio.gather(*map(server.generate, requests))]

    first, again, other = (serve(qwen3_folder, scenario, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_folder_without_all_weights_is_refused(tmp_path):
    from safetensors.torch import save_file

    folder = write_tiny_model(tmp_path / "model")
    weights = load_weights(folder)
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    async def scenario(server):
        raise AssertionError("it must not start")

    with pytest.raises(ModelFolderError, match=r"lacks 1 weights of Qwen3ForCausalLM, e\.g\. 'model\.norm\.weight'"):
        serve(folder, scenario)
