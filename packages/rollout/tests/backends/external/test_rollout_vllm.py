"""The vLLM backend keeps the contract: against a fake that speaks its protocol, and against the real server."""

import asyncio
import json
from dataclasses import replace

import pytest
from rollout_servers import (
    alone,
    fake_sglang_config,
    fake_vllm_config,
    mtp_model,
    real_model,
    real_vllm,
    real_vllm_config,
    request,
    serve,
)

from rl_rollout import (
    ConfigError,
    ServerParallel,
    ServerStartError,
    create_server,
)
from rl_rollout.testing import ServerConformance, load_weights

pytestmark = pytest.mark.process


@pytest.mark.contract
class TestProtocol(ServerConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, long_folder, new_trainer):
        yield from serve(
            "vllm", fake_vllm_config(long_folder, "--enable-sleep-mode"), new_trainer(60), max_model_len=4096
        )


@pytest.mark.contract
@real_vllm
class TestRealVllm(ServerConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, tmp_path_factory, new_trainer):
        folder = real_model(tmp_path_factory.mktemp("vllm"))
        config = real_vllm_config(folder, max_model_len=8192)
        yield from serve("vllm", config, new_trainer(60), max_model_len=8192)

    test_stop_ends_it = ServerConformance.test_stop_ends_it


CACHE_TOKENS = 512
CACHE_BYTES = (CACHE_TOKENS + 128) * 2 * 2 * 32 * 4
"""Of `real_model`: keys and values, layers, numbers of one head, float32; and a page that vLLM keeps to itself."""


async def fill_the_cache(config):
    """Requests that fit into the cache one at a time, all at once; and each of them alone."""
    prompts = [tuple(range(3, 40 + i)) for i in range(6)]
    requests = [replace(request(str(i), max_new_tokens=400), prompt_token_ids=p) for i, p in enumerate(prompts)]
    server = create_server("vllm", config)
    await server.start()
    try:
        outputs = await asyncio.gather(*map(server.generate, requests))
        return outputs, [await server.generate(each) for each in requests]
    finally:
        await server.stop()


@real_vllm
def test_a_full_cache_of_the_real_one(tmp_path):
    """Sequences that outgrow it are put off and lose nothing; one that could never fit is told at the start."""
    config = real_vllm_config(real_model(tmp_path), max_model_len=CACHE_TOKENS, kv_cache_bytes=CACHE_BYTES)
    outputs, alone = asyncio.run(fill_the_cache(config))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]
    assert all(len(output.token_ids) == 400 for output in outputs)
    with pytest.raises(ServerStartError, match="one request with the model's max seq len"):
        asyncio.run(create_server("vllm", replace(config, max_model_len=2 * CACHE_TOKENS)).start())


@real_vllm
def test_the_real_one_on_a_cpu_cannot_sleep(qwen3_folder):
    """Its own words, if it is a build for CPUs: the fake is all that sleep has been run against."""
    server = create_server("vllm", real_vllm_config(qwen3_folder, "--enable-sleep-mode"))
    with pytest.raises(ServerStartError, match="Sleep mode is not supported on current platform"):
        asyncio.run(server.start())


@real_vllm
def test_the_real_one_on_a_cpu_tells_no_routed_experts(tmp_path):
    """Its own words, where Triton has no backend for CPUs: the runner that tells them is asked for, and needs it."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    folder = real_model(tmp_path, family="qwen3_moe", **experts)
    server = create_server("vllm", real_vllm_config(folder, "--enable-return-routed-experts"))
    with pytest.raises(ServerStartError, match="Model Runner V2 requires Triton"):
        asyncio.run(server.start())


@real_vllm
def test_int8_of_the_real_one_converts_each_update(tmp_path, new_trainer):
    """Log-probs after an update are near those of the new model, and not its own: vLLM has converted the update."""
    first, second = (real_model(tmp_path / name, seed=seed) for name, seed in (("first", 0), ("second", 3)))
    config = real_vllm_config(first, quantization="int8", dtype="bfloat16")
    for served in serve("vllm", config, new_trainer(60), max_model_len=4096):
        before = served.run(served.server.generate(request("before", prompt=tuple(range(3, 40)), max_new_tokens=1)))
        served.run(served.update(served, load_weights(second), 1))
        after = served.run(served.server.generate(request("after", prompt=tuple(range(3, 40)), max_new_tokens=1)))
    want = alone(second, request("want", prompt=tuple(range(3, 40)), max_new_tokens=1))
    assert after.weight_versions == (1,)
    assert after.token_ids == want.token_ids != before.token_ids
    assert 0 < abs(after.logprobs[0] - want.logprobs[0]) < 0.1


@real_vllm
def test_drafts_of_the_real_one_follow_updates(tmp_path, new_trainer):
    """Tokens and log-probs are those of a server without drafts; an update loads and attests the layer that drafts."""
    first, second = (mtp_model(tmp_path / name, seed) for name, seed in (("first", 0), ("second", 3)))
    asked, found = request("asked", prompt=tuple(range(3, 40)), max_new_tokens=24), {}
    for folder, num_mtp_tokens in ((first, 1), (second, None)):
        config = real_vllm_config(folder, num_mtp_tokens=num_mtp_tokens, max_model_len=256)
        for served in serve("vllm", config, new_trainer(60), max_model_len=256):
            for version in (1, 2) if num_mtp_tokens else ():
                served.run(served.update(served, load_weights((first, second)[version - 1]), version))
            found[num_mtp_tokens] = served.run(served.server.generate(asked))
    drafted, plain = found[1], found[None]
    assert drafted.token_ids == plain.token_ids
    assert drafted.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    assert set(drafted.weight_versions) == {2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_mtp_tokens": 0}, "num_mtp_tokens=0 must be a number of tokens, 1 or more"),
        ({"adapters": {}}, "num_mtp_tokens=2 does not go with this: the server has adapters"),
        ({"quantization": "int8", "dtype": "bfloat16"}, "with this: quantization='int8'"),
        ({"parallel": ServerParallel(pp=2)}, "with this: parallel pp=2"),
        ({"speculates": True}, "with this: args have --speculative arguments"),
    ],
)
def test_settings_that_drafts_do_not_go_with(qwen3_folder, changes, message):
    args = ["--speculative-config={}"] if changes.pop("speculates", False) else []
    with pytest.raises(ConfigError, match=message):
        create_server("vllm", fake_vllm_config(qwen3_folder, *args, **{"num_mtp_tokens": 2} | changes))


def test_drafts_by_the_models_own_layer_are_arguments(qwen3_folder, new_trainer):
    """Weights come whole; the plug-in learns of the model that drafts, or the fake has no such path."""
    config = fake_vllm_config(qwen3_folder, num_mtp_tokens=2)
    for served in serve("vllm", config, new_trainer(60), max_model_len=4096):
        can, words = served.server.capabilities, served.server.process.command
        served.run(served.update(served, load_weights(qwen3_folder), 1))
    assert (can.takes_mtp, can.takes_slices, can.attests_weights) == (True, False, True)
    assert json.loads(words[words.index("--speculative-config") + 1]) == {"method": "mtp", "num_speculative_tokens": 2}
    server = create_server("sglang", fake_sglang_config(qwen3_folder, num_mtp_tokens=2))
    line = " ".join(server.process.command)
    for part in ("algorithm EAGLE", "eagle-topk 1", "num-steps 2", "num-draft-tokens 3"):
        assert f"--speculative-{part}" in line
    assert (server.capabilities.takes_mtp, server.capabilities.takes_slices) == (True, False)
    asyncio.run(server.stop())


def test_formats_of_vllm_are_its_arguments(qwen3_folder):
    """Weights come whole, and are verified before they are converted."""
    for quantization, argument in (("fp8", "fp8_per_tensor"), ("fp8_block", "fp8_per_block")):
        server = create_server("vllm", fake_vllm_config(qwen3_folder, quantization=quantization, dtype="bfloat16"))
        words = server.process.command
        assert words[words.index("--quantization") + 1] == argument
        can = server.capabilities
        assert (can.updates_weights, can.takes_slices, can.attests_weights) == (True, False, False)
        asyncio.run(server.stop())
    with pytest.raises(ConfigError, match="vLLM converts weights in bfloat16 or float16, and dtype is float32"):
        create_server("vllm", fake_vllm_config(qwen3_folder, quantization="fp8"))
