"""One GPU: the backends there step like a plain Hugging Face model on the CPU, and nothing waits in between.

`pytest -m gpu packages/engine`; the rest of the package's tests takes the CPU, so give it no device
(`CUDA_VISIBLE_DEVICES= pytest packages/engine`).
"""

import warnings
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_engine import EngineConfig, LoraConfig, OptimizerConfig, Precision, create_engine
from rl_engine.losses import sft_loss
from rl_engine.testing import EngineConformance, write_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
_spec = spec_from_file_location("engine_ranks", Path(__file__).parents[1] / "support" / "engine_ranks.py")
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)
NEEDS = {
    name: pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("megatron", "torchtitan")
}
BACKENDS = ["fsdp", *(pytest.param(name, marks=mark) for name, mark in NEEDS.items())]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_attention_heads": 4}
SEEDS = (1, 2, 4)
NEAR = {
    Precision.FLOAT32: {"rtol": 1e-3, "atol": 1e-4},
    Precision.BFLOAT16: {"rtol": 5e-2, "atol": 5e-2},
}


class OnOneGpu(EngineConformance):
    backend = ""

    def make_engine(self, folder, **changes):
        return create_engine(self.backend, EngineConfig(model_path=str(write_tiny_model(folder)), **changes))


class TestFsdp(OnOneGpu):
    backend = "fsdp"


@NEEDS["megatron"]
class TestMegatron(OnOneGpu):
    backend = "megatron"
    precision = Precision.FLOAT32  # the widest that megatron-core's optimizer takes


@NEEDS["torchtitan"]
class TestTorchtitan(OnOneGpu):
    backend = "torchtitan"


def rows_of_all():
    return [row for seed in SEEDS for row in ranks.draw_rows(seed)]


def built(folder, backend="fsdp", **changes):
    options = {"optimizer": OptimizerConfig(lr=1e-3), "precision": Precision.BFLOAT16, "max_tokens_per_gpu": 128}
    engine = create_engine(backend, EngineConfig(model_path=str(folder), **(options | changes)))
    engine.initialize()
    return engine


def oracle(folder):
    """Loss, gradient norm and log-probs of a plain model on the CPU that sees one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    total, tokens, scores = 0.0, 0, []
    for prompt, completion, mask in rows_of_all():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        scores.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
        total, tokens = total - (scores[-1] * torch.tensor(mask)).sum(), tokens + sum(mask)
    (total / tokens).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    return float(total.detach()) / tokens, float(norm), torch.cat(scores).detach().float()


@pytest.mark.parametrize("precision", NEAR)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_is_that_of_a_plain_model_on_the_cpu(tmp_path, backend, precision):
    loss, norm, scores = oracle(write_tiny_model(tmp_path, **SIZES))
    changes = {"precision": precision, "activation_checkpointing": precision == Precision.BFLOAT16}
    engine = built(tmp_path, backend, max_tokens_per_gpu=48, **changes)
    output = engine.forward_backward_batch(ranks.batch_of(rows_of_all()), sft_loss)
    found = output.columns["logprobs"].values()
    assert found.device.type == "cpu"  # where the batch is
    assert output.num_micro_batches > 1
    torch.testing.assert_close(found.float(), scores, **NEAR[precision])
    assert output.metrics["loss"] == pytest.approx(loss, rel=NEAR[precision]["rtol"])
    assert engine.optimizer_step() == pytest.approx(norm, rel=NEAR[precision]["rtol"])
    assert {tensor.device.type for _, tensor in engine.get_per_tensor_param()[0]} == {"cuda"}
    engine.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_micro_batches_cause_no_more_device_waits(tmp_path, backend):
    write_tiny_model(tmp_path, **SIZES)
    waits = []
    for budget in (4096, 48):
        engine = built(tmp_path, backend, max_tokens_per_gpu=budget)
        data = ranks.batch_of(rows_of_all())
        engine.forward_backward_batch(data, sft_loss)  # what is compiled or allocated once
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                count = engine.forward_backward_batch(data, sft_loss).num_micro_batches
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found = [entry for entry in caught if "synchronizing CUDA operation" in str(entry.message)]
        waits.append((count, len(found)))
        engine.close()
    assert waits[1][0] > waits[0][0]
    assert waits[1][1] == waits[0][1], waits


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_background_checkpoint_is_a_snapshot_of_its_request(tmp_path, backend):
    write_tiny_model(tmp_path / "model")
    data = ranks.batch_of(rows_of_all())
    engine = built(tmp_path / "model", backend, async_checkpoints=True)
    ranks.one_step(engine, data)
    engine.save_checkpoint(tmp_path / "checkpoint", 1)
    straight = ranks.one_step(engine, data)
    assert engine.load_checkpoint(tmp_path / "checkpoint") == 1
    assert ranks.one_step(engine, data) == pytest.approx(straight, rel=1e-3)
    engine.close()


@pytest.mark.parametrize("precision", NEAR)
def test_everything_goes_to_the_cpu_and_comes_back(tmp_path, precision):
    """In bfloat16 the parameters are FSDP's shards."""
    write_tiny_model(tmp_path)
    data = ranks.batch_of(rows_of_all())
    steps = []
    for is_moved in (False, True):
        engine = built(tmp_path, precision=precision)
        with engine.train_mode():
            first = ranks.one_step(engine, data)
        if is_moved:
            engine.to("cpu")
            assert not any(parameter.is_cuda for parameter in engine.parts.built.scorer.parameters())
        with engine.train_mode():
            steps.append((first, ranks.one_step(engine, data)))
        engine.close()
    assert steps[1] == tuple(pytest.approx(step, rel=1e-3) for step in steps[0])


def test_an_adapter_and_experts_learn(tmp_path):
    write_tiny_model(tmp_path / "dense")
    ranks.moe_oracle.write_model(tmp_path / "experts")
    data = ranks.batch_of(rows_of_all())
    for folder, backend, changes in (
        ("dense", "fsdp", {"lora": LoraConfig(rank=4)}),
        ("experts", "fsdp", {"router_aux_loss_coef": 0.01}),
        ("experts", "megatron", {"router_aux_loss_coef": 0.01}),
    ):
        engine = built(tmp_path / folder, backend, optimizer=OptimizerConfig(lr=1e-2), **changes)
        losses = [ranks.one_step(engine, data)[0] for _ in range(10)]
        engine.close()
        assert losses[-1] < losses[0] - 0.05
