"""RMSNorms by torch's kernel: which classes are taken, and that a step is the one that transformers' take."""

from importlib import import_module

import pytest
import torch

from rl_engine import EngineConfig, OptimizerConfig, create_engine
from rl_engine.backends import fsdp as norms
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged_batch, write_tiny_model

DATA = ragged_batch([[5, 6, 7], [8]], [[9, 10], [11, 12, 13]])
CLASSES = {
    "llama.modeling_llama.LlamaRMSNorm": True,
    "qwen2.modeling_qwen2.Qwen2RMSNorm": True,
    "qwen3.modeling_qwen3.Qwen3RMSNorm": True,
    "qwen3_moe.modeling_qwen3_moe.Qwen3MoeRMSNorm": True,
    "mistral.modeling_mistral.MistralRMSNorm": True,
    "deepseek_v3.modeling_deepseek_v3.DeepseekV3RMSNorm": True,
    "gpt_oss.modeling_gpt_oss.GptOssRMSNorm": True,
    "gemma2.modeling_gemma2.Gemma2RMSNorm": False,  # by 1 + weight
    "gemma3.modeling_gemma3.Gemma3RMSNorm": False,
    "qwen3_next.modeling_qwen3_next.Qwen3NextRMSNormGated": False,  # takes a gate as well
    "llama.modeling_llama.LlamaMLP": False,
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_is_taken_if_it_computes_the_same(name):
    module, _, kind = f"transformers.models.{name}".rpartition(".")
    assert norms.is_rms_norm(getattr(import_module(module), kind)) is CLASSES[name]


def steps(folder, **changes):
    """Norms of two steps, and the weights after them."""
    options = {"optimizer": OptimizerConfig(lr=1e-2), "precision": "float32", **changes}
    engine = create_engine("fsdp", EngineConfig(model_path=str(folder), **options))
    engine.initialize()
    found = []
    for _ in range(2):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(DATA, sft_loss)
        found.append(engine.optimizer_step())
    weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    engine.close()
    return found, weights


@pytest.mark.process
@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": True}, {"precision": "bfloat16"}], ids=str)
def test_a_step_is_that_of_transformers_norms(tmp_path, monkeypatch, changes):
    """As if the CPU had the kernel; it is asked of every norm in every pass, and without it nothing changes."""
    asked = []
    monkeypatch.setattr(norms, "has_kernel", lambda hidden: asked.append(hidden.shape[-1]))
    write_tiny_model(tmp_path)
    plain, weights = steps(tmp_path, **changes)
    assert len(asked) >= 2 * (2 * 4 + 1)  # two steps of two layers with four norms, and the last
    monkeypatch.setattr(norms, "fuse_norms", lambda model: None)
    untouched, theirs = steps(tmp_path, **changes)
    assert plain == untouched
    torch.testing.assert_close(weights, theirs, rtol=0, atol=0)
    monkeypatch.undo()
    monkeypatch.setattr(norms, "has_kernel", lambda hidden: True)
    found, ours = steps(tmp_path, **changes)
    near = {"rtol": 2e-2, "atol": 2e-2} if changes.get("precision") == "bfloat16" else {"rtol": 1e-4, "atol": 1e-5}
    assert found == pytest.approx(plain, rel=near["rtol"])
    torch.testing.assert_close(ours, weights, **near)


def test_on_a_cpu_a_norm_is_transformers_own():
    module = import_module("transformers.models.llama.modeling_llama").LlamaRMSNorm(16)
    model = torch.nn.Sequential(module)
    norms.fuse_norms(model)
    x = torch.randn(2, 16).bfloat16()
    assert not norms.has_kernel(x)
    torch.testing.assert_close(model(x), type(module).forward(module, x), rtol=0, atol=0)
