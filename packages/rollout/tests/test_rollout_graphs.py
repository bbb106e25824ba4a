"""Decode graphs: which bucket a step takes, and what its static buffers hold. On a GPU, the graphs themselves."""

import pytest
import torch

from rl_rollout import GenerateRequest, SamplingParams, ServerConfig
from rl_rollout.backends.embedded.engine import Engine
from rl_rollout.backends.embedded.graphs import DecodeGraphs, round_up
from rl_rollout.backends.embedded.model import load_model

PROMPTS = [tuple(3 + (7 * i + n) % 45 for i in range(n)) for n in (1, 5, 13, 34, 13)]


def requests():
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_new_tokens=8 + 5 * i, temperature=0.0, ignore_eos=True)
        yield GenerateRequest(request_id=str(i), prompt_token_ids=prompt, sampling_params=params), 0


def run(engine):
    engine.submit(requests())
    while engine.can_step:
        engine.step()
    return {name: output.token_ids for name, output in engine.take_events()}


def plain(folder, **config):
    config = ServerConfig(model_path=str(folder), **config)
    engine = Engine(load_model(config), config)
    engine.graphs = None
    return engine


def test_sizes_are_powers_of_two():
    assert [round_up(n) for n in (1, 2, 3, 4, 5, 64, 65, 256)] == [1, 2, 4, 4, 8, 64, 128, 256]


def test_a_step_over_static_buffers_gives_the_same_tokens(qwen3_folder):
    want = run(plain(qwen3_folder))
    engine = plain(qwen3_folder, kv_cache_bytes=2**20)
    captured, calls = [], []

    def capture(work):
        captured.append(work)

        def replay():
            calls.append(work)
            return work()

        return replay

    spare = engine.reserve_cache()
    engine.graphs = DecodeGraphs(engine.model, engine.cache, spare, capture)
    assert run(engine) == want
    # Rows fall from 5 to 1, columns rise from 4 to 8: few graphs, many steps.
    assert len(captured) <= 6
    assert len(calls) > 20
    assert engine.scheduler.pool.limit == spare  # no sequence is ever given that block
    assert engine.cache.num_blocks == spare + 1
    before = len(captured)
    engine.set_version(1)
    assert run(engine) == want
    assert len(captured) == 2 * before  # new weights lie elsewhere: all captured anew


@pytest.mark.gpu
def test_graphs_on_a_gpu_give_the_tokens_of_plain_steps(qwen3_folder):
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    config = ServerConfig(model_path=str(qwen3_folder), device="cuda", dtype="float32", kv_cache_bytes=2**24)
    engine = Engine(load_model(config), config)
    assert engine.graphs is not None
    want = run(plain(qwen3_folder, device="cuda", dtype="float32", kv_cache_bytes=2**24))
    assert run(engine) == want == run(plain(qwen3_folder, device="cpu"))
    engine.set_version(1)
    assert run(engine) == want
    engine.drop_cache()
    assert run(engine) == want
