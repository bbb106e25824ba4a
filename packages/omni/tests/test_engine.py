import asyncio
import json
from pathlib import Path

import pytest
import torch
from packages.omni.tests.test_server import Weights, request, served
from tensordict import TensorDict

import rl_tq
from rl_engine.errors import BatchError, CheckpointError, ConfigError, ModelFolderError
from rl_engine.registry import create_engine
from rl_engine.types import EngineConfig, LoraConfig, OptimizerConfig, Precision
from rl_omni.pipeline import TRANSFORMERS
from rl_omni.testing import write_tiny_pipeline

TRAINED = OptimizerConfig(lr=1e-2, weight_decay=0.0)


def engine_of(folder, **settings):
    engine = create_engine("diffusion", EngineConfig(model_path=folder, **{"optimizer": TRAINED} | settings))
    engine.initialize()
    return engine


def sampled(folder, count=4, **options):
    requests = [request(str(i), prompt=(1 + i % 3,), seed=i) for i in range(count)]

    async def all_of(server):
        return await asyncio.gather(*(server.generate(each) for each in requests))

    outputs = asyncio.run(served(folder, all_of, **options))
    return columns_of(requests, outputs), outputs


def columns_of(requests, outputs):
    names = ("latents", "timesteps", "step_stds")
    return {
        "prompt_token_ids": [torch.tensor(each.prompt_token_ids) for each in requests],
        **{name: [each.columns[name] for each in outputs] for name in names},
        "loss_mask": [(each.columns["step_stds"] > 0).long() for each in outputs],
        "rollout_logprobs": [torch.tensor(each.logprobs) for each in outputs],
    }


def batch_of(columns):
    def jagged(rows):
        return torch.nested.nested_tensor_from_jagged(torch.cat(rows), torch.tensor([0, *map(len, rows)]).cumsum(0))

    return TensorDict({name: jagged(rows) for name, rows in columns.items()}, [len(next(iter(columns.values())))])


@pytest.fixture(scope="module")
def batch(pipeline):
    return batch_of(sampled(pipeline)[0])


def loss(output, rows):
    """Push up the log-probs."""
    return -output.logprobs.sum() / output.counts.tokens / 1000, {"seen": torch.tensor(float(len(rows)))}


@pytest.mark.promise("Engine and server give the same log-probs, for transformers of SD3, Flux and Qwen-Image")
@pytest.mark.process
@pytest.mark.parametrize("transformer", TRANSFORMERS)
def test_an_engine_gives_the_log_probs_of_the_server(tmp_path, transformer):
    folder = str(write_tiny_pipeline(tmp_path, transformer))
    columns, outputs = sampled(folder, size=8)
    found = engine_of(folder).forward_backward_batch(batch_of(columns), None).columns["logprobs"]
    for own, output in zip(found.unbind(), outputs, strict=True):
        assert own.tolist() == pytest.approx(output.logprobs, abs=2e-3)


@pytest.mark.process
def test_the_cut_into_micro_batches_changes_no_number(pipeline, batch):
    results = []
    for budget in (3, 6, 100):
        engine = engine_of(pipeline, max_tokens_per_gpu=budget)
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(batch, loss)
        results.append((output, engine.optimizer_step()))
    assert [output.num_micro_batches for output, _ in results] == [4, 2, 1]
    for output, norm in results[1:]:
        assert norm == pytest.approx(results[0][1], rel=1e-4)
        assert output.metrics["loss"] == pytest.approx(results[0][0].metrics["loss"], rel=1e-5)
        assert output.metrics["seen"] == 4
        torch.testing.assert_close(output.columns["logprobs"].values(), results[0][0].columns["logprobs"].values())


@pytest.mark.process
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, alpha=8.0)])
def test_a_step_raises_the_log_probs_that_the_loss_wants(pipeline, batch, lora):
    engine = engine_of(pipeline, lora=lora)
    before = engine.forward_backward_batch(batch, None).columns["logprobs"].values().sum()
    for _ in range(5):
        engine.optimizer_zero_grad()
        with engine.train_mode():
            engine.forward_backward_batch(batch, loss)
        assert engine.optimizer_step() > 0
    after = engine.forward_backward_batch(batch, None).columns["logprobs"].values().sum()
    assert after > before
    if lora is not None:
        with engine.adapter_off():
            off = engine.forward_backward_batch(batch, None).columns["logprobs"].values().sum()
        assert off.item() == pytest.approx(before.item(), rel=1e-5)


@pytest.mark.process
def test_a_server_with_the_merged_adapter_agrees(pipeline, batch, tmp_path):
    engine = engine_of(pipeline, lora=LoraConfig(rank=2))
    engine.forward_backward_batch(batch, loss)
    engine.optimizer_step()
    weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}

    async def updated(server):
        await server.update_weights(Weights(weights.items()), 1)
        return await server.generate(request(seed=3))

    output = asyncio.run(served(pipeline, updated))
    own = engine.forward_backward_batch(batch_of(columns_of([request(seed=3)], [output])), None).columns["logprobs"]
    assert own.values().tolist() == pytest.approx(output.logprobs, abs=2e-3)
    engine.save_model(tmp_path)
    assert torch.equal(
        sampled(str(tmp_path), 1)[1][0].columns["latents"], sampled(str(tmp_path), 1)[1][0].columns["latents"]
    )
    reloaded = dict(engine_of(str(tmp_path)).get_per_tensor_param()[0])
    assert reloaded.keys() == weights.keys()
    assert all(torch.equal(reloaded[name], tensor) for name, tensor in weights.items())


@pytest.mark.process
def test_a_checkpoint_continues_bit_by_bit(pipeline, batch, tmp_path):
    def step(engine):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, loss)
        engine.optimizer_step()

    first, second = engine_of(pipeline), engine_of(pipeline)
    step(first)
    first.save_checkpoint(tmp_path / "a", 1)
    step(first)
    assert second.load_checkpoint(tmp_path / "a") == 1
    step(second)
    own, other = (dict(engine.get_per_tensor_param()[0]) for engine in (first, second))
    assert all(torch.equal(own[name], other[name]) for name in own)
    (tmp_path / "a/model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        second.load_checkpoint(tmp_path / "a")


@pytest.mark.process
@pytest.mark.promise("Denoising steps travel through the queue as columns with a step axis, without token ids")
def test_pictures_travel_through_the_queue_unchanged(pipeline):
    columns, _ = sampled(pipeline, 2)
    queue = rl_tq.serve("inproc://")
    queue.put(columns, partition="train")
    meta = queue.get_meta(partition="train", columns=list(columns), batch_size=2, task="actor", timeout_s=10)
    batch = queue.get(meta, list(columns))
    for name, rows in columns.items():
        assert all(torch.equal(a, b) for a, b in zip(batch[name].unbind(), rows, strict=True)), name
    assert "completion_token_ids" not in columns
    expected = engine_of(pipeline).forward_backward_batch(batch_of(columns), None).columns["logprobs"].values()
    found = engine_of(pipeline).forward_backward_batch(batch, None).columns["logprobs"].values()
    assert torch.equal(found, expected)
    queue.close()


@pytest.mark.parametrize(
    ("column", "change", "message"),
    [
        ("latents", None, "no column latents"),
        ("latents", lambda x: x[:-1], "row 0 has lengths"),
        ("timesteps", lambda x: x.flip(0), "row 0 has timesteps"),
        ("step_stds", lambda x: x * 0, "row 0 has loss_mask 1"),
        ("prompt_token_ids", lambda x: x + 90, "takes 1 to 4 ids"),
    ],
)
def test_a_wrong_batch_is_refused(pipeline, column, change, message):
    data = batch_of(sampled(pipeline, 1)[0])
    if change is None:
        del data[column]
    else:
        data[column] = batch_of({"latents": [change(row) for row in data[column].unbind()]})["latents"]
    with pytest.raises(BatchError, match=message):
        engine_of(pipeline).forward_backward_batch(data, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": Precision.BFLOAT16}, "float32"),
        ({"torch_compile": True}, "torch_compile=True"),
        ({"optimizer": OptimizerConfig(warmup_steps=3)}, "constant rate"),
        ({"lora": LoraConfig(target_modules=("q_proj",))}, "target_modules"),
    ],
)
def test_a_wrong_setting_is_refused(pipeline, settings, message):
    with pytest.raises(ConfigError, match=message):
        engine_of(pipeline, **settings)


def test_two_ranks_and_a_frozen_step_are_refused(pipeline, batch):
    with pytest.raises(ConfigError, match="world_size is 2"):
        engine_of(pipeline).check(2)
    with pytest.raises(ConfigError, match="frozen"):
        engine_of(pipeline, optimizer=None).forward_backward_batch(batch, loss)


def test_a_component_that_is_not_supported_is_named(tmp_path):
    folder = write_tiny_pipeline(tmp_path)
    index = json.loads((folder / "model_index.json").read_text())
    index["text_encoder_2"] = ["transformers", "T5EncoderModel"]
    Path(folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFolderError, match="text_encoder_2"):
        engine_of(str(folder))
