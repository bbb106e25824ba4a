"""Loading in slices: every rank reads its shards of a folder, and none holds the whole model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl_engine import ConfigError, EngineConfig, LoraConfig, create_engine
from rl_engine.checkpoint import hf_folder
from rl_engine.checkpoint.slices import SliceReader, find_pieces, read_shards
from rl_engine.model.hf import HuggingFaceScorer, find_linear_head, without_layers
from rl_engine.testing import ragged_batch, write_tiny_model

SCRIPT = Path(__file__).parents[1] / "support" / "load_ranks.py"
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = SIZES | {
    "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
LARGE = SIZES | {
    "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 4096, "tie_word_embeddings": False,
}  # fmt: skip


def write(folder, kind, sizes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.float32)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters()) * 4


@pytest.fixture(scope="module")
def two(tmp_path_factory, start_ranks):
    folder = tmp_path_factory.mktemp("slices")
    write_tiny_model(folder / "tiny")
    write(folder / "experts", "qwen3_moe", EXPERTS)
    size = write(folder / "dense", "qwen3", LARGE)
    return start_ranks(SCRIPT, folder, 2) | {"size": size}


def alone(folder):
    engine = create_engine("fsdp", EngineConfig(model_path=str(folder), optimizer=None))
    engine.initialize()
    scores = engine.forward_backward_batch(ragged_batch([[1, 2, 3]], [[4, 5]]), None).columns["logprobs"].values()
    weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    engine.close()
    return scores, weights


@pytest.mark.process
@pytest.mark.parametrize("kind", ["tiny", "experts"])
def test_the_shards_are_those_of_the_whole_model(two, kind):
    scores, weights = alone(two["folder"] / kind)
    found = two[f"{kind} fsdp"]
    assert found["weights"].keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found["weights"].items())
    torch.testing.assert_close(torch.tensor(found["scores"]), scores, rtol=1e-5, atol=1e-5)


@pytest.mark.promise("Every rank reads its shards of the folder, and none holds the whole model")
@pytest.mark.process
@pytest.mark.parametrize("backend", ["fsdp", "torchtitan"])
def test_no_rank_holds_the_whole_model(two, backend):
    """Half is this rank's; beside that stand one slice at a time, and of fsdp two layers of 16 where the head is found.

    Where rank 0 reads the folder whole, it holds more than all of it.
    """
    found = two[f"dense {backend}"]
    assert max(found["grown"]) < 0.9 * two["size"], [grown / two["size"] for grown in found["grown"]]


@pytest.mark.process
def test_both_backends_score_alike(two):
    scores = [torch.tensor(two[f"dense {backend}"]["scores"]) for backend in ("fsdp", "torchtitan")]
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "llama"])
def test_pieces_make_up_the_model(tmp_path, kind):
    """Tensors of the folder, found by their pieces, are those that transformers loads."""
    extra = {"deepseek_v3": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
                             "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
                             "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
             "glm4_moe": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
                          "num_experts_per_tok": 2, "first_k_dense_replace": 1},
             "gpt_oss": {"num_local_experts": 4}, "mixtral": {"num_local_experts": 4}}  # fmt: skip
    write(tmp_path, kind, (EXPERTS if kind == "qwen3_moe" else SIZES | {"pad_token_id": 0}) | extra.get(kind, {}))
    model = hf_folder.load_model(tmp_path, init="pretrained", dtype=torch.float32, seed=0)
    scorer = HuggingFaceScorer(model)
    named = scorer.named_weights()
    pieces = find_pieces(named, scorer.to_folder)
    assert pieces is not None
    files = {}
    for file in tmp_path.glob("*.safetensors"):
        with hf_folder.open_shard(file) as opened:
            files |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    filled = {name: torch.full_like(tensor, float("nan")) for name, tensor in named.items()}
    read_shards(filled, pieces, lambda name, part: files[name][part])
    for name, tensor in named.items():
        assert torch.equal(filled[name], tensor), name


BLOCK = 16


def quantise(folder, kind, sizes):
    """Write a folder in float8 blocks to `folder / "fp8"`, and what its numbers are to `folder / "wide"`."""
    write(folder / "wide", kind, sizes)
    (file,) = (folder / "wide").glob("*.safetensors")
    narrow, wide = {}, load_file(file)
    for name, tensor in wide.items():
        narrow[name] = tensor
        if tensor.ndim == 2 and ".layers." in name and "mlp.gate.weight" not in name:
            rows, columns = (-(-size // BLOCK) for size in tensor.shape)
            scales = torch.rand(rows, columns) + 0.5
            factors = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: len(tensor), : tensor.shape[1]]
            narrow[name] = (tensor / factors).to(torch.float8_e4m3fn)
            narrow[f"{name}_scale_inv"], wide[name] = scales, narrow[name].float() * factors
    shutil.copytree(folder / "wide", folder / "fp8")
    save_file(wide, file, metadata={"format": "pt"})
    save_file(narrow, folder / "fp8" / file.name, metadata={"format": "pt"})
    config = json.loads((folder / "fp8" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "fp8" / "config.json").write_text(json.dumps(config))
    return narrow, wide


@pytest.mark.process
@pytest.mark.parametrize(
    ("backend", "kind", "sizes"),
    [
        ("fsdp", "qwen3", SIZES | {"intermediate_size": 56}),
        ("fsdp", "qwen3_moe", EXPERTS),
        ("megatron", "qwen3_moe", EXPERTS),
        ("torchtitan", "qwen3", SIZES),
    ],
)
def test_float8_blocks_are_dequantised_as_they_are_read(tmp_path, backend, kind, sizes):
    _, wide = quantise(tmp_path, kind, sizes)
    engine = create_engine(backend, EngineConfig(model_path=str(tmp_path / "fp8"), optimizer=None))
    engine.check(1)
    engine.initialize()
    found = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    engine.save_model(tmp_path / "saved")
    engine.close()
    torch.testing.assert_close(found, {name: wide[name] for name in found}, rtol=0, atol=0)
    assert found.keys() == wide.keys()
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()


def test_any_slice_of_float8_blocks_is_that_of_the_whole(tmp_path):
    narrow, wide = quantise(tmp_path, "qwen3", SIZES | {"intermediate_size": 56})
    shapes = {name: tuple(tensor.shape) for name, tensor in wide.items()}
    name = "model.layers.1.mlp.down_proj.weight"
    assert narrow[f"{name}_scale_inv"].shape == (2, 4)  # the last block of columns is a half
    with SliceReader(tmp_path / "fp8", shapes, head="lm", is_tied=False) as read:
        for part in ((slice(5, 23), slice(40, 56)), (slice(None), slice(17, 18)), (slice(30, None), slice(0, 56))):
            assert torch.equal(read(name, part), wide[name][part])


def test_an_adapter_on_float8_blocks_is_refused(tmp_path):
    quantise(tmp_path, "qwen3", SIZES)
    engine = create_engine("fsdp", EngineConfig(model_path=str(tmp_path / "fp8"), lora=LoraConfig()))
    for call in (lambda: engine.check(1), engine.initialize):
        with pytest.raises(ConfigError, match=r"lora is set and the folder's weights are quantised \(fp8\)"):
            call()


def test_composite_tensors_are_left_to_transformers():
    def interleaved(named):
        return {name: tensor.reshape(2, -1, 4).transpose(0, 1).reshape(-1, 4) for name, tensor in named.items()}

    assert find_pieces({"a.weight": torch.empty(6, 4)}, interleaved) is None


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "gemma2", "granite", "cohere", "deepseek_v3", "gpt_oss"])
def test_a_head_is_known_without_the_layers(tmp_path, kind):
    """As the whole model tells: scales and soft caps of logits are the architecture's, not the weights'."""
    extra = {"gemma2": {"final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}, "granite": {"logits_scaling": 8.0},
             "cohere": {"logit_scale": 0.25}, "gpt_oss": {"num_local_experts": 4},
             "deepseek_v3": {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
                             "num_experts_per_tok": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8,
                             "qk_nope_head_dim": 8, "v_head_dim": 8}}  # fmt: skip
    write(tmp_path, kind, (EXPERTS if kind == "qwen3_moe" else SIZES | {"pad_token_id": 0}) | extra.get(kind, {}))
    whole = hf_folder.load_model(tmp_path, init="pretrained", dtype=torch.float32, seed=0)
    small = without_layers(hf_folder.empty_model(tmp_path, dtype=torch.float32, num_tokens=64))
    found = find_linear_head(small)
    assert found is not None
    assert found == find_linear_head(whole)
