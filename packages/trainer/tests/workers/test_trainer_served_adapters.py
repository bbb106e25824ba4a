"""Adapters trained by an engine and served by the embedded server give the engine's own tokens and log-probs."""

import asyncio

import pytest
import torch

from rl_engine import (
    AdamParams,
    EngineConfig,
    LoraConfig,
    OptimizerConfig,
    TrainingRow,
    create_engine,
    create_loss,
    create_worker,
)
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged_batch, write_tiny_model
from rl_rollout import GenerateRequest, SamplingParams, ServerConfig, create_server
from rl_rollout.testing import FakeReceiver

pytestmark = pytest.mark.process
PROMPT = (5, 6, 7, 8)
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)


async def generated(server, adapter=None):
    request = GenerateRequest(request_id=f"{adapter}", prompt_token_ids=PROMPT, sampling_params=GREEDY, adapter=adapter)
    return await server.generate(request)


def serve(folder, scenario, **options):
    async def life():
        server = create_server("embedded", ServerConfig(model_path=str(folder), num_threads=1, options=options))
        await server.start()
        try:
            return await scenario(server)
        finally:
            await server.stop()

    return asyncio.run(life())


def row_of(output, adapter=None):
    """The served tokens as a row to score."""
    ids = [*PROMPT, *output.token_ids]
    return TrainingRow(
        adapter=adapter, token_ids=ids[:-1], target_token_ids=ids[1:], inputs={"weights": [1.0] * (len(ids) - 1)}
    )


def test_many_adapters_of_a_worker_are_served_side_by_side(tmp_path):
    folder, losses = write_tiny_model(tmp_path / "model"), {}
    with create_worker(EngineConfig(model_path=str(folder), optimizer=None)) as worker:
        for seed, (name, lora) in enumerate(
            {"ann": LoraConfig(rank=4), "bob": LoraConfig(rank=2, target_modules=("q_proj", "up_proj"))}.items()
        ):
            worker.add_adapter(name, lora, seed)
            losses[name] = create_loss("cross_entropy")
        rows = [
            TrainingRow(
                adapter=name,
                token_ids=[*range(5, 25)],
                target_token_ids=[*range(first, first + 20)],
                inputs={"weights": [1.0] * 20},
            )
            for name, first in (("ann", 6), ("bob", 30))
        ]
        for _ in range(5):
            worker.forward_backward_rows(rows, losses)
            for name in losses:
                worker.optim_step(AdamParams(lr=2e-2), name)
        exported = {name: {key: tensor.clone() for key, tensor in worker.export_adapter(name)[0]} for name in losses}

        async def scenario(server):
            for version, update in enumerate(exported.values(), start=1):
                await server.update_weights(FakeReceiver(update), version)
            return await asyncio.gather(*(generated(server, name) for name in (*losses, None)))

        outputs = serve(folder, scenario, max_adapters=2)
        scored = worker.forward_rows(
            [row_of(output, name) for output, name in zip(outputs, (*losses, None), strict=True)]
        )
    assert len({output.token_ids for output in outputs}) == 3
    for output, logprobs in zip(outputs, scored.logprobs, strict=True):
        assert output.logprobs == pytest.approx(logprobs[len(PROMPT) - 1 :].tolist(), abs=1e-4)
    assert [set(output.weight_versions) for output in outputs] == [{1}, {2}, {0}]


def test_a_mixture_with_adapted_experts_is_served_merged(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 79, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_experts": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes)).save_pretrained(tmp_path / "moe")
    lora = LoraConfig(rank=2, alpha=4.0, target_modules=("experts",))
    config = EngineConfig(model_path=str(tmp_path / "moe"), lora=lora, optimizer=OptimizerConfig(lr=3e-2))
    engine = create_engine("fsdp", config)
    engine.initialize()
    for _ in range(5):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(ragged_batch([[5, 6]], [[*range(7, 27)]]), sft_loss)
        engine.optimizer_step()
    weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}

    async def scenario(server):
        before = await generated(server)
        await server.update_weights(FakeReceiver(weights), 1)
        return before, await generated(server)

    before, after = serve(tmp_path / "moe", scenario)
    found = engine.forward_backward_batch(ragged_batch([PROMPT], [after.token_ids]), None).columns["logprobs"].values()
    engine.close()
    assert before.token_ids != after.token_ids
    assert after.logprobs == pytest.approx(found.tolist(), abs=1e-4)
