"""Loading in slices: every rank reads its shards of a folder, and none holds the whole model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_engine import EngineConfig, create_engine
from rl_engine.checkpoint import hf_folder
from rl_engine.checkpoint.slices import find_pieces, read_shards
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


@pytest.mark.parametrize("kind", ["tiny", "experts"])
def test_the_shards_are_those_of_the_whole_model(two, kind):
    scores, weights = alone(two["folder"] / kind)
    found = two[f"{kind} fsdp"]
    assert found["weights"].keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found["weights"].items())
    torch.testing.assert_close(torch.tensor(found["scores"]), scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["fsdp", "torchtitan"])
def test_no_rank_holds_the_whole_model(two, backend):
    """Half is this rank's; beside that stand one slice at a time, and of fsdp two layers of 16 where the head is found.

    Where rank 0 reads the folder whole, it holds more than all of it.
    """
    found = two[f"dense {backend}"]
    assert max(found["grown"]) < 0.9 * two["size"], [grown / two["size"] for grown in found["grown"]]


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


def test_tensors_that_are_more_than_pieces_are_left_to_transformers():
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
