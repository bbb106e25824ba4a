"""Decode graphs: which bucket a step takes, and what its static buffers hold. On a GPU, the graphs themselves."""

import asyncio
from dataclasses import replace

import pytest
import torch
from host_memory import HostMemory
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from rl_csrc import paged, sampling
from rl_rollout import GenerateRequest, SamplingParams, ServerConfig, create_server
from rl_rollout.backends.embedded.batch_state import BatchState
from rl_rollout.backends.embedded.decode_engine import Engine
from rl_rollout.backends.embedded.kv_cache import KVCache
from rl_rollout.backends.embedded.model.cuda_graphs import DecodeGraphs, round_up, round_up_columns
from rl_rollout.backends.embedded.model.model_runner import load_model
from rl_rollout.backends.embedded.model.paged_attention import PagedBatch
from rl_rollout.testing import FakeReceiver, load_weights, write_tiny_model

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
    engine = Engine(replace(load_model(config), fused=None), config)  # which no GPU has
    engine.steps.graphs = None
    return engine


class Captures:
    """Stands in for CUDA graphs: a capture runs its work once, as the warm-up of a real one does; a replay runs it."""

    def __init__(self):
        self.num_captured = self.num_replayed = self.num_pools = 0

    def __call__(self, device):
        self.num_pools += 1
        return self.capture

    def capture(self, work):
        self.num_captured += 1
        work()

        def replay():
            self.num_replayed += 1
            return work()

        return replay


def replaying(folder, **config):
    """An engine that decodes by graphs, which keep the addresses that they see; and its captures."""
    engine, captures = plain(folder, kv_cache_bytes=2**20, **config), Captures()
    engine.cache._new_memory = HostMemory
    engine.steps.graphs = engine.decode_graphs(new_capture=captures)
    return engine, captures


def test_sizes_are_powers_of_two_and_closer_without_a_kernel():
    assert [round_up(n) for n in (1, 2, 3, 4, 5, 64, 65, 256, 512)] == [1, 2, 4, 4, 8, 64, 128, 256, 512]
    assert [round_up_columns(n, has_kernel=True) for n in (1, 16, 17, 64, 65)] == [16, 16, 32, 64, 128]
    columns = [round_up_columns(n, has_kernel=False) for n in range(1, 70)]
    assert sorted(set(columns)) == [1, 2, 4, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80]
    assert all(count <= size <= max(1.25 * count, 8) for count, size in enumerate(columns, start=1))


def sampled():
    """Requests of every kind: drawn, greedy, cut off, with prompt log-probs asked for."""
    kinds = [{}, {"temperature": 0.0}, {"temperature": 0.7, "seed": 9}, {"top_p": 0.8}, {"top_k": 5}, {}]
    for i, kind in enumerate(kinds):
        params = SamplingParams(max_new_tokens=9 + 4 * i, ignore_eos=True, **({"seed": i} | kind))
        told = {"num_top_logprobs": 2} if i == 5 else {}
        yield GenerateRequest(request_id=str(i), prompt_token_ids=PROMPTS[i % 5], sampling_params=params, **told), 0


def outputs(engine, asked):
    engine.submit(asked)
    while engine.can_step:
        engine.step()
    return {name: (output.token_ids, output.weight_versions) for name, output in engine.take_events()}


@pytest.mark.process
def test_a_replayed_step_gives_the_same_tokens(qwen3_folder):
    want = run(plain(qwen3_folder))
    engine, captures = replaying(qwen3_folder)
    assert run(engine) == want
    # Rows fall from 5 to 1: few graphs, many steps.
    assert captures.num_captured <= 4
    assert captures.num_replayed > 20
    assert engine.steps.num_passes > captures.num_replayed  # and those of the prompts
    assert engine.cache.num_blocks == engine.scheduler.pool.limit + 1  # no sequence is ever given the last block
    before = captures.num_captured
    engine.set_version(1, has_moved=False)
    assert run(engine) == want
    assert captures.num_captured == before
    engine.set_version(2)
    assert run(engine) == want
    assert captures.num_captured == 2 * before  # new weights lie elsewhere: all captured anew


@pytest.mark.process
def test_tokens_are_drawn_within_the_graph_as_they_are_without(qwen3_folder):
    every = [*sampled()]
    for asked in (every[:3], every):
        engine, captures = replaying(qwen3_folder)
        engine.set_version(7, has_moved=False)
        other = plain(qwen3_folder)
        other.set_version(7)
        assert outputs(engine, asked) == outputs(other, asked)
        assert captures.num_replayed > 10


def stopping(want):
    """The greedy requests, each with a token of its completion that ends it, somewhere in a chain of replays."""
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            max_new_tokens=60, temperature=0.0, ignore_eos=True, stop_token_ids=(want[str(i)][3 * i],)
        )
        yield GenerateRequest(request_id=str(i), prompt_token_ids=prompt, sampling_params=params), 0


@pytest.mark.process
@pytest.mark.parametrize("most", [1, 3, 64])
def test_rows_ending_in_a_replay_chain_leave_their_output(qwen3_folder, monkeypatch, most):
    """What was drawn after the end is nobody's, and blocks that come free hold what those who take them wrote."""
    other = plain(qwen3_folder)
    want = run(other)
    stopped = outputs(other, stopping(want))
    monkeypatch.setattr("rl_rollout.backends.embedded.decode_engine.MOST_REPLAYS", most)
    engine, captures = replaying(qwen3_folder, max_num_seqs=5)
    for _ in range(2):
        assert outputs(engine, stopping(want)) == stopped
        assert run(engine) == want
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.limit
    assert not engine.scheduler.running
    assert captures.num_captured < 12


@pytest.mark.promise("CUDA graphs outlive a sleep and weight updates")
def test_graphs_outlive_a_sleep_and_new_weights_in_their_place(qwen3_folder):
    engine, captures = replaying(qwen3_folder)
    want, before = run(engine), captures.num_captured
    engine.submit(requests())
    for _ in range(3):
        engine.step()
    engine.drop_cache()  # level 1: all of the cache leaves, and what is in flight is computed anew
    memory = engine.cache._memory[1]
    assert memory.calls == ["give back"]
    assert not memory.is_there
    while engine.can_step:
        engine.step()
    assert {name: output.token_ids for name, output in engine.take_events()} == want
    assert memory.calls == ["give back", "take"]
    assert captures.num_captured == before
    assert captures.num_pools == 2  # the first, and that of the table's place, which was not known before


@pytest.mark.process
def test_an_expert_model_keeps_its_cache_while_blocks_are_added(tmp_path, monkeypatch):
    """It has no graphs on a GPU, and its cache lies in one allocation, which cannot grow with its content."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    folder = write_tiny_model(tmp_path, family="qwen3_moe", **experts)
    options = {"kv_cache_bytes": 2**20, "options": {"block_size": 1}}  # the requests take more than the first 64 blocks
    want = run(plain(folder, **options))
    monkeypatch.setattr("rl_rollout.backends.embedded.decode_engine.device_memory", lambda device: HostMemory)
    engine = plain(folder, **options)
    assert run(engine) == want
    assert engine.cache.num_blocks == engine.scheduler.pool.limit > 64
    assert engine.cache._memory[1].calls == []  # taken once


@pytest.mark.process
def test_a_table_that_moves_voids_the_graphs(qwen3_folder):
    engine, captures = replaying(qwen3_folder)
    want, before = run(engine), captures.num_captured
    engine.table.reserve(0, 10_000, 1)
    assert run(engine) == want
    assert captures.num_captured == 2 * before


@pytest.mark.process
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
def test_a_decode_step_asks_the_host_nothing(family, tmp_path, monkeypatch):
    """A CUDA graph cannot be captured of a step that waits for a number; tensors without content have none to give."""
    monkeypatch.setattr(paged, "has_kernel", lambda query: False)
    monkeypatch.setattr(sampling, "_kernel", None)
    sizes = {"attn_logit_softcapping": 30.0, "sliding_window": 8} if family == "gemma2" else {}
    config = ServerConfig(model_path=str(write_tiny_model(tmp_path / family, family=family, **sizes)))
    model = replace(load_model(config), fused=None)
    cache = KVCache(model.layer_shapes, block_size=4, dtype=model.dtype, device=model.device)
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True):
        cache.resize(9)
        rows, positions = torch.arange(4), torch.zeros(4, dtype=torch.int64)
        batch = PagedBatch(cache, torch.zeros(4, 2, dtype=torch.int64), rows, positions, num_single=4, num_blocks=2)
        assert model.logits(rows, positions, batch).shape == (4, model.vocab_size)
        table, works = BatchState(model.device), []
        table.reserve(9, 50, 1, 4)
        graphs = DecodeGraphs(model, cache, table, 8, 8, lambda device: lambda work: works.append(work) or work)
        assert graphs._make(4, 2, draws=True)().shape == (2, 4)
        assert graphs._make(4, 2, draws=False)().shape == (4, model.vocab_size)
        assert len(works) == 2
        with pytest.raises(DataDependentOutputException):
            positions.max().item()


@pytest.mark.gpu
def test_graphs_on_a_gpu_give_the_tokens_of_plain_steps(qwen3_folder):
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    config = ServerConfig(model_path=str(qwen3_folder), device="cuda", dtype="float32", kv_cache_bytes=2**24)
    engine = Engine(load_model(config), config)
    assert engine.steps.graphs is not None
    want = run(plain(qwen3_folder, device="cuda", dtype="float32", kv_cache_bytes=2**24))
    assert run(engine) == want == run(plain(qwen3_folder, device="cpu"))
    engine.set_version(1, has_moved=False)
    assert run(engine) == want
    engine.set_version(2)
    assert run(engine) == want
    engine.drop_cache()
    assert run(engine) == want


@pytest.mark.gpu
def test_new_weights_reach_the_graphs_of_a_gpu_while_it_decodes(qwen3_folder):
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    weights = load_weights(qwen3_folder)
    others = {name: tensor.roll(1, dims=0) if tensor.ndim > 1 else tensor for name, tensor in weights.items()}

    async def scenario(device):
        config = ServerConfig(model_path=str(qwen3_folder), device=device, dtype="float32", kv_cache_bytes=2**24)
        server = create_server("embedded", config)
        await server.start()
        asked = [request for request, _ in requests()]
        try:
            old = await asyncio.gather(*map(server.generate, asked))
            going = [replace(request, request_id=f"{request.request_id} going") for request in asked]
            task = asyncio.gather(*map(server.generate, going))
            await server.update_weights(FakeReceiver(others, 1), 1)
            await task
            new = await asyncio.gather(*map(server.generate, asked))
            await server.sleep(2)
            await server.wake()
            await server.update_weights(FakeReceiver(weights, 2), 2)
            again = await asyncio.gather(*map(server.generate, asked))
        finally:
            await server.stop()
        return [[output.token_ids for output in outputs] for outputs in (old, new, again)]

    found = asyncio.run(scenario("cuda"))
    assert found == asyncio.run(scenario("cpu"))
    assert found[0] == found[2] != found[1]
