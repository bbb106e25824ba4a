"""The fused pass: the logits of transformers' module for every architecture that it knows, and no other is taken."""

import logging

import pytest
import torch

from rl_rollout import ServerConfig
from rl_rollout.backends.embedded.kv_cache import KVCache
from rl_rollout.backends.embedded.model import cpu_decoder as fused_module
from rl_rollout.backends.embedded.model.model_runner import load_model
from rl_rollout.backends.embedded.model.paged_attention import PagedBatch, ProbeBatch
from rl_rollout.testing import write_tiny_model

KNOWN = {
    "llama": {"mlp_bias": False, "attention_bias": True},
    "llama-scaled": {
        "family": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 4},
}
OTHERS = {
    "gemma2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "llama": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "qwen3": {"hidden_act": "gelu"},
}


def load(folder, **options):
    return load_model(ServerConfig(model_path=str(folder), options=options))


def write(folder, name, overrides):
    overrides = dict(overrides)
    folder = write_tiny_model(folder, family=overrides.pop("family", name), **overrides)
    # Scales of ones and biases of zeros would hide that they are left out.
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for key, weight in weights.items():
        if weight.ndim == 1:
            weights[key] = torch.rand(weight.shape, generator=generator) + 0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def both(model, lengths):
    """Logits of the fused pass and of the module, of sequences of these lengths that are packed."""
    rows = torch.tensor([row for row, length in enumerate(lengths) for _ in range(length)])
    positions = torch.cat([torch.arange(length) for length in lengths])
    ids = (positions * 31 + rows * 7 + 3) % model.vocab_size

    def batch():
        cache = KVCache(model.layer_shapes, block_size=32, dtype=model.dtype, device=model.device)
        cache.resize(len(lengths))
        chunks = [(row, 0, length) for row, length in enumerate(lengths)]
        tables = torch.arange(len(lengths))[:, None]
        return PagedBatch(cache, tables, rows, positions, num_single=0, num_blocks=0, chunks=chunks)

    with torch.inference_mode():
        module = model.module(input_ids=ids[None], position_ids=positions[None], use_cache=False, rl_batch=batch())
        return model.fused.logits(ids, batch()), module.logits[0]


@pytest.mark.parametrize("name", KNOWN)
def test_it_gives_the_logits_of_the_module(name, tmp_path):
    model = load(write(tmp_path / "model", name, KNOWN[name]))
    torch.testing.assert_close(*both(model, [1, 20, 7]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_known_is_left_to_the_module(name, tmp_path):
    assert load(write_tiny_model(tmp_path / "model", family=name, **OTHERS[name])).fused is None


def test_other_dtypes_and_adapters_are_left_to_the_module(qwen3_folder, write_adapters):
    folders = {name: folder for name, (folder, _) in write_adapters(qwen3_folder).items()}
    assert load(qwen3_folder, adapters=folders).fused is None
    assert load_model(ServerConfig(model_path=str(qwen3_folder), dtype="bfloat16")).fused is None


def test_new_weights_are_repacked_and_released_ones_freed(qwen3_folder):
    model = load(qwen3_folder)
    before, _ = both(model, [5])
    for parameter in model.module.parameters():
        parameter.data = parameter.data.roll(1, 0)
    model.note_new_weights()
    got, want = both(model, [5])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(got, before, atol=1e-2)
    for parameter in model.module.parameters():
        parameter.data = parameter.data.new_empty(0)
    model.note_new_weights()
    assert model.fused._decoder is None


def test_a_custom_module_is_served_unchanged(qwen3_folder, monkeypatch, caplog):
    real = fused_module.FusedDecoder.__init__

    def other(self, module, max_model_len, settings):
        real(self, module, max_model_len, settings)
        self._sin = -self._sin
        self.repack()

    monkeypatch.setattr(fused_module.FusedDecoder, "__init__", other)
    with caplog.at_level(logging.WARNING):
        assert load(qwen3_folder).fused is None
    assert "differs from the decoder that was written for it" in caplog.text


def test_the_probe_tells_what_each_layer_asks_for(tmp_path):
    model = load(write_tiny_model(tmp_path / "model", family="mistral", sliding_window=4))
    probe = ProbeBatch()
    zero = torch.zeros(1, 1, dtype=torch.int64)
    with torch.inference_mode():
        model.module(input_ids=zero, position_ids=zero, use_cache=False, rl_batch=probe)
    assert [settings.window for settings in probe.settings.values()] == [4, 4]
