"""Folders with layers for multi-token prediction: refused, or kept as they were."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl_engine import EngineConfig, ModelFolderError, OptimizerConfig, create_engine
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged_batch, write_tiny_model

BACKENDS = ("fsdp", "megatron", "torchtitan")
DATA = ragged_batch([[5, 6, 7], [8]], [[9, 10], [11, 12, 13]])


def engine_of(folder, backend="fsdp", **changes):
    return create_engine(backend, EngineConfig(model_path=str(folder), optimizer=OptimizerConfig(lr=1e-2), **changes))


def add(folder, tensors):
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


@pytest.mark.promise("Layers for multi-token prediction are refused, or kept as they were")
@pytest.mark.process
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["mtp.fc.weight", "model.layers.2.eh_proj.weight"])
def test_layers_are_kept_as_they_were(tmp_path, backend, name):
    folder, further = write_tiny_model(tmp_path / "model"), torch.randn(3, 5)
    add(folder, {name: further})
    refused = rf"has 1 tensor\(s\) for multi-token prediction, such as {name}\. mtp=freeze leaves them"
    for call in (lambda: engine_of(folder, backend).check(1), engine_of(folder, backend).initialize):
        with pytest.raises(ModelFolderError, match=refused):
            call()
    engine = engine_of(folder, backend, mtp="freeze")
    engine.check(1)
    engine.initialize()
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(DATA, sft_loss)
        engine.optimizer_step()
    assert name not in dict(engine.get_per_tensor_param()[0])
    engine.save_model(tmp_path / "saved")
    engine.close()
    assert torch.equal(load_file(tmp_path / "saved" / "model.safetensors")[name], further)
    again = engine_of(tmp_path / "saved", backend, mtp="freeze", exports_mtp=True)
    again.initialize()
    assert torch.equal(dict(again.get_per_tensor_param()[0])[name], further)
    again.close()


def test_the_layers_that_transformers_leaves_out_are_found(tmp_path):
    config = AutoConfig.for_model(
        "glm4_moe", vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        first_k_dense_replace=1, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    layer = "".join(filter(str.isdigit, next(iter(model._keys_to_ignore_on_load_unexpected))))
    add(tmp_path, {f"model.layers.{layer}.eh_proj.weight": torch.ones(2, 2)})  # behind the last that was published
    with pytest.raises(ModelFolderError, match=r"1 tensor\(s\) for multi-token prediction, such as .*eh_proj"):
        engine_of(tmp_path).initialize()
    engine = engine_of(tmp_path, mtp="freeze")
    engine.initialize()
    engine.close()


@pytest.mark.process
def test_quantised_layers_are_written_dequantised(tmp_path):
    """In blocks of 2 by 2 numbers with a scale each, as DeepSeek-V3's; the saved folder is not quantised."""
    folder = write_tiny_model(tmp_path / "model")
    narrow = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).to(torch.float8_e4m3fn)
    add(folder, {"mtp.fc.weight": narrow, "mtp.fc.weight_scale_inv": torch.tensor([[2.0, 0.5]])})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [2, 2]}
    (folder / "config.json").write_text(json.dumps(settings))
    engine = engine_of(folder, mtp="freeze")
    engine.initialize()
    engine.save_model(tmp_path / "saved")
    engine.close()
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved["mtp.fc.weight"].tolist() == [[2.0, 4.0, 1.5], [8.0, 10.0, 3.0]]
    assert "mtp.fc.weight_scale_inv" not in saved
