"""Several steps in one native call: the same outputs as step by step, and nobody waits longer for it."""

import asyncio

import pytest
import torch

from rl_rollout import FinishReason, GenerateRequest, SamplingParams, ServerConfig, create_server
from rl_rollout.backends.embedded import decode_engine as engine_module
from rl_rollout.backends.embedded.decode_engine import Engine
from rl_rollout.backends.embedded.model.model_runner import load_model


@pytest.fixture(scope="module")
def model(qwen3_folder):
    return load_model(ServerConfig(model_path=str(qwen3_folder)))


def request(request_id, length, **params):
    number = int(request_id)
    sampling_params = SamplingParams(**{"max_new_tokens": length, "ignore_eos": True, "seed": number, **params})
    prompt = tuple(3 + (number + i) % 40 for i in range(2 + number % 5))
    return GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=sampling_params)


def run(model, requests, report_every=0, **config):
    """Outputs by id, chunks by id, and how many steps each call was allowed; 0 where it was no native one."""
    engine = Engine(model, ServerConfig(model_path="unused", **config))
    steps, plan = [], engine.scheduler.plan

    def noting(*arguments):
        steps.append(plan(*arguments))
        return steps[-1]

    engine.scheduler.plan = noting
    engine.submit((each, report_every) for each in requests)
    outputs, chunks = {}, {}
    while engine.can_step:
        engine.step()
        for name, event in engine.take_events():
            if hasattr(event, "request_id"):
                outputs[name] = event
            else:
                chunks.setdefault(name, []).append(event)
    assert engine.scheduler.pool.num_held == 0
    return outputs, chunks, [plan.steps for plan in steps], engine.scheduler.num_preemptions


def test_outputs_do_not_depend_on_how_many_steps_a_call_takes(model, monkeypatch):
    kinds = [{}, {"temperature": 0.0}, {"temperature": 0.7, "stop_token_ids": tuple(range(30, 45))}]
    requests = [request(str(i), 1 + 7 * i % 50, **kinds[i % 3]) for i in range(20)]
    found = {}
    for most in (1, 3, 16):
        monkeypatch.setattr(engine_module, "MOST_STEPS", most)
        found[most], _, steps, _ = run(model, requests)
        assert max(steps) == most
    assert found[3] == found[16] == found[1]
    assert {output.finish_reason for output in found[1].values()} == {FinishReason.STOP, FinishReason.LENGTH}
    # A request whose draws are cut off takes the batch to single steps, over the same logits.
    cut = request("90", 60, top_k=5)
    beside, _, steps, _ = run(model, [*requests, cut])
    assert {name: beside[name].token_ids for name in found[1]} == {name: found[1][name].token_ids for name in found[1]}


def test_many_steps_are_taken_where_only_tokens_happen(model):
    requests = [request(str(i), 33) for i in range(4)]
    assert run(model, requests)[2] == [0, 16, 16]  # prompts and first tokens, then 32 of each
    # Who waits for a place gets it when another leaves.
    _, _, steps, _ = run(model, requests, max_num_seqs=3)
    assert steps == [0, *[1] * 32, 0, 16, 16]


def test_a_stream_is_told_each_token_and_a_listener_now_and_then(model):
    whole = run(model, [request("0", 40)])[0]["0"]
    outputs, chunks, steps, _ = run(model, [request("0", 40)], report_every=1)
    assert outputs["0"] == whole
    assert [len(chunk.token_ids) for chunk in chunks["0"]] == [1] * 39  # the last comes with the reason
    assert steps == [0] + [1] * 39
    outputs, chunks, steps, _ = run(model, [request("0", 40)], report_every=8)
    told = [token for chunk in chunks["0"] for token in chunk.token_ids]
    assert outputs["0"] == whole
    assert 8 <= len(told) < 40
    assert told == list(whole.token_ids[: len(told)])
    assert max(steps) == 16


def test_blocks_for_steps_to_come_are_taken_from_nobody(model, monkeypatch):
    """2 x (2 + 30) tokens in 8 blocks of 8 just fit; a block more for each does not, beside a third that fits too."""
    bytes_per_block = 8 * 256
    requests = [request("0", 31), request("5", 31)]
    outputs, _, steps, num_preemptions = run(
        model, requests, kv_cache_bytes=8 * bytes_per_block, options={"block_size": 8}
    )
    assert num_preemptions == 0
    assert 16 in steps
    requests.append(request("10", 31))
    config = {"kv_cache_bytes": 9 * bytes_per_block, "options": {"block_size": 8}}
    tight = run(model, requests, **config)
    assert 16 in tight[2]
    assert 1 in tight[2]
    assert {name: tight[0][name] for name in outputs} == outputs
    monkeypatch.setattr(engine_module, "MOST_STEPS", 1)
    assert run(model, requests, **config)[0] == tight[0]


def test_a_command_waits_for_one_step_at_most(qwen3_folder, monkeypatch):
    monkeypatch.setattr(engine_module, "MOST_STEPS", 200)

    async def scenario():
        server = create_server("embedded", ServerConfig(model_path=str(qwen3_folder), num_threads=1))
        await server.start()
        decoder, counts = server.model.fused, []
        real = decoder.generate

        def generate(*arguments):
            if not counts:
                server.requests.thread.call(lambda engine: None)
            drawn = real(*arguments)
            counts.append(drawn[2].tolist())
            return drawn

        decoder.generate = generate
        outputs = await asyncio.gather(*(server.generate(request(str(i), 101)) for i in range(3)))
        await server.stop()
        return counts, outputs

    counts, outputs = asyncio.run(scenario())
    assert counts == [[1] * 3, [99] * 3]
    assert all(len(output.token_ids) == 101 for output in outputs)


def test_a_step_that_is_interrupted_is_one(model):
    engine = Engine(model, ServerConfig(model_path="unused"))
    engine.submit((request(str(i), 30), 0) for i in range(3))
    for _ in range(4):
        engine.step(torch.ones(1, dtype=torch.int64))
    assert engine.table.lengths_host[:3].tolist() == [2 + 4, 3 + 4, 4 + 4]
    engine.abort()
    assert [len(output.token_ids) for _, output in engine.take_events()] == [4, 4, 4]
