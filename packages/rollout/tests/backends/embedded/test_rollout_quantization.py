"""Rollout with int8 weights: how near the products are, and what changes weights or rows."""

import asyncio

import pytest
import torch

from rl_rollout import ConfigError, GenerateRequest, SamplingParams, ServerConfig, create_server
from rl_rollout.backends.embedded.model.linear import int8_linear, quantise
from rl_rollout.testing import FakeReceiver, load_weights, write_tiny_model

PROMPT = tuple(range(3, 40))


def test_int8_product_is_near_and_the_same_in_any_batch():
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 64, generator=generator) for rows in (48, 9))
    x[3] = 0
    stored, scales = quantise(weight)
    assert stored.dtype == torch.int8
    assert (stored * scales - weight).abs().max() <= scales.max() / 2 * 1.001
    out = int8_linear(x, stored, scales)
    want = x.double() @ weight.double().T
    assert (out - want).norm() / want.norm() < 0.015
    for row, alone in zip(out, x, strict=True):
        assert torch.equal(row, int8_linear(alone[None], stored, scales)[0])


def config(folder, **fields):
    return ServerConfig(model_path=str(folder), num_threads=1, **fields)


async def ask(server, name, adapter=None):
    sampling = SamplingParams(max_new_tokens=12, temperature=0.7, ignore_eos=True, seed=5)
    request = GenerateRequest(request_id=name, prompt_token_ids=PROMPT, sampling_params=sampling, adapter=adapter)
    output = await server.generate(request)
    return output.token_ids, output.logprobs


def served(folder, use=ask, **fields):
    async def run():
        server = create_server("embedded", config(folder, **fields))
        await server.start()
        try:
            return await use(server, "a")
        finally:
            await server.stop()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("other") / "model", seed=7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_logprobs_are_near_the_full_precision_ones(qwen3_folder, dtype):
    tokens, logprobs = served(qwen3_folder, quantization="int8", dtype=dtype)
    want_tokens, want = served(qwen3_folder, dtype=dtype)
    assert tokens[0] == want_tokens[0]
    assert 0 < abs(logprobs[0] - want[0]) < 0.1


@pytest.mark.process
@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "slept"])
def test_an_update_is_quantised_again(qwen3_folder, other_folder, sleeps):
    async def use(server, name):
        before = await ask(server, name)
        if sleeps:
            await server.sleep(2)
            await server.wake(["weights"])
        await server.update_weights(FakeReceiver(load_weights(other_folder), 1), 1)
        if sleeps:
            await server.wake(["kv_cache"])
        after = await ask(server, "b")
        again = await ask(server, "c")  # its prompt is in the prefix cache
        return before, after, again

    before, after, again = served(qwen3_folder, use, quantization="int8")
    want = served(other_folder, quantization="int8")
    assert after == want != before
    assert again[0] == want[0]
    assert again[1] == pytest.approx(want[1], abs=1e-5)


@pytest.mark.process
def test_an_adapter_is_added_to_int8_layers(qwen3_folder, write_adapters):
    folders = write_adapters(qwen3_folder)
    options = {"adapters": {"one": str(folders["one"][0])}}

    async def use(server, name):
        return await ask(server, name), await ask(server, "b", adapter="one")

    plain, adapted = served(qwen3_folder, use, quantization="int8", options=options)
    full, want = served(qwen3_folder, use, options=options)
    assert plain[1][0] == pytest.approx(full[1][0], abs=0.1)
    assert adapted[1][0] == pytest.approx(want[1][0], abs=0.1)
    assert adapted != plain


@pytest.mark.parametrize("backend", ["sglang", "tensorrt_llm", "openai"])
def test_servers_that_cannot_quantise_refuse(qwen3_folder, backend):
    with pytest.raises(ConfigError, match="quantization='int8'"):
        create_server(backend, ServerConfig(model_path=str(qwen3_folder), quantization="int8"))


def test_an_unknown_quantization_names_the_known_ones(qwen3_folder):
    with pytest.raises(ConfigError, match="quantization='int4' is unknown; use one of none, int8, fp8, fp8_block"):
        create_server("embedded", config(qwen3_folder, quantization="int4"))
