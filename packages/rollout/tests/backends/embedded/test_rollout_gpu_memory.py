"""Memory of a GPU that a sleeping server gives back, as another process sees it."""

import asyncio

import pytest
import torch

from rl_rollout import GenerateRequest, SamplingParams, ServerConfig, launch_server
from rl_rollout.testing import write_tiny_model

pytestmark = pytest.mark.process

GIB = 2**30
SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 24, "num_attention_heads": 16}


def held_since(before):
    return before - torch.cuda.mem_get_info()[0]


@pytest.mark.promise("A sleeping server leaves another process all of a GPU but 1 GiB")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_sleeping_server_leaves_all_but_a_gibibyte_free(tmp_path):
    """Its context and libraries stay; cache, graphs' memory, weights and what torch keeps do not."""
    write_tiny_model(tmp_path, num_key_value_heads=8, head_dim=64, **SIZES)
    params = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    requests = [
        GenerateRequest(request_id=str(i), prompt_token_ids=(3, 4, 5 + i), sampling_params=params) for i in range(8)
    ]

    async def scenario():
        torch.zeros(1, device="cuda")  # this process's own context
        before = torch.cuda.mem_get_info()[0]
        config = ServerConfig(model_path=str(tmp_path), device="cuda", dtype="bfloat16", kv_cache_bytes=4 * GIB)
        server = launch_server("embedded", config)
        await server.start()
        try:
            want = [output.token_ids for output in await asyncio.gather(*map(server.generate, requests))]
            awake = held_since(before)
            await server.sleep(1)
            level_1 = held_since(before)
            await server.wake()
            again = [output.token_ids for output in await asyncio.gather(*map(server.generate, requests))]
            await server.sleep(2)
            level_2 = held_since(before)
        finally:
            await server.stop()
        return want, again, awake, level_1, level_2

    want, again, awake, level_1, level_2 = asyncio.run(scenario())
    weights = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) // 2  # stored as float32
    assert again == want
    assert awake > 4 * GIB + weights
    assert level_1 <= GIB + weights
    assert level_2 <= GIB
