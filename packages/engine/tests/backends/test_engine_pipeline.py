"""The megatron backend's plans: layers by stage, which tensors make a parameter, and layouts that it refuses.

The only file of core that imports megatron-core, in its fixture, so that one worker of a parallel run pays for it.
"""

from importlib import import_module
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from rl_engine import ConfigError, ModelFolderError, ParallelConfig
from rl_engine.types import Head

SIZES = {
    "vocab_size": 79, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2}
V3 = LATENT | ROUTED | {"head_dim": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
V3 |= {"tie_word_embeddings": False}
OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "sliding_window": 8}


@pytest.fixture(scope="module")
def ours():
    return SimpleNamespace(
        **{
            name: import_module(f"rl_engine.backends.megatron.{name}")
            for name in ("architectures", "layout", "weights")
        }
    )


def read(ours, kind, *, head=Head.LM, trains_mtp=False, **changes):
    config = AutoConfig.for_model(kind, **(SIZES | changes))
    return ours.architectures.read_architecture(config, head, trains_mtp=trains_mtp)


def planned(ours, arch, *, pp=1, vpp=1, ep=1, **options):
    return {entry.parameter: entry for entry in ours.weights.plan_weights(arch, pp=pp, vpp=vpp, ep=ep, **options)}


def test_first_and_last_stages_have_fewer_layers_if_uneven(ours):
    split_layers = ours.architectures.split_layers
    assert split_layers(94, 8, 1) == [11, 12, 12, 12, 12, 12, 12, 11]  # Qwen3-235B
    assert split_layers(61, 16, 1) == [2, *[4] * 14, 3]  # DeepSeek-V3
    assert split_layers(3, 2, 1) == [1, 2]
    assert split_layers(8, 2, 2) == [2, 2, 2, 2]
    assert min(split_layers(2, 3, 1)) == 0  # too few: refused


def test_queries_keys_and_values_are_one_parameter(ours):
    arch = read(ours, "qwen2", num_key_value_heads=2, tie_word_embeddings=True)
    assert (arch.has_qkv_bias, arch.has_qk_norm, arch.is_tied) == (True, False, True)
    plan = planned(ours, arch, pp=2)
    qkv = plan["0.decoder.layers.1.self_attention.linear_qkv.bias"]  # named twice: local to each stage
    assert list(qkv.tensors.values()) == [(32,), (16,), (16,)]
    assert (qkv.stage, qkv.cut, qkv.form) == (1, "rows", "qkv")
    assert next(iter(qkv.tensors)) == "model.layers.3.self_attn.q_proj.bias"
    head = plan["0.output_layer.weight"]  # a copy of the embedding, which the first stage exports
    assert (list(head.tensors), head.stage, head.is_copy) == (["model.embed_tokens.weight"], 1, True)
    assert plan["0.embedding.word_embeddings.weight"].is_tied
    judge = planned(ours, read(ours, "qwen2", head=Head.VALUE))
    assert judge["0.score.weight"].tensors == {"score.weight": (1, 32)}
    assert "0.output_layer.weight" not in judge


def test_pieces_of_a_pipeline_take_turns(ours):
    plan = ours.weights.plan_weights(read(ours, "qwen3"), pp=2, vpp=2, ep=1)
    norms = {
        next(iter(entry.tensors)): (entry.parameter[0], entry.stage)
        for entry in plan
        if "input_layernorm" in entry.parameter
    }
    assert list(norms.values()) == [("0", 0), ("0", 1), ("1", 0), ("1", 1)]
    assert list(norms)[2] == "model.layers.2.input_layernorm.weight"


def test_experts_latents_and_mtp_of_deepseek_v3(ours):
    arch = read(ours, "deepseek_v3", trains_mtp=True, routed_scaling_factor=2.5, **V3)
    assert (arch.num_dense, arch.shared_size, arch.experts.num_layers, arch.experts.is_sigmoid) == (1, 48, 3, True)
    assert (arch.router.scale, arch.latent.query_rank, arch.latent.scaling) == (2.5, 12, (1.0, 0.0))
    plan = planned(ours, arch, ep=2)
    dense, sparse = "0.decoder.layers.0.mlp", "0.decoder.layers.1.mlp"
    assert plan[f"{dense}.linear_fc1.weight"].tensors["model.layers.0.mlp.up_proj.weight"] == (48, 32)
    assert f"{dense}.router.weight" not in plan
    assert plan[f"{sparse}.router.expert_bias"].is_buffer
    owners = {
        next(iter(entry.tensors)): entry.expert_rank
        for entry in ours.weights.plan_weights(arch, pp=1, vpp=1, ep=2)
        if entry.parameter.startswith(f"{sparse}.experts") and "fc2" in entry.parameter
    }
    assert owners == {f"model.layers.1.mlp.experts.{i}.down_proj.weight": i // 2 for i in range(4)}
    up = plan["0.decoder.layers.1.self_attention.linear_q_up_proj.weight"]
    assert up.tensors == {"model.layers.1.self_attn.q_b_proj.weight": (4 * (8 + 4), 12)}
    ahead = plan["0.ahead.eh_proj.weight"]
    assert (ahead.tensors, ahead.is_mtp) == ({"model.layers.4.eh_proj.weight": (32, 64)}, True)
    together = planned(ours, arch, is_grouped=True)
    assert f"{sparse}.experts.linear_fc1.weight3" in together


def test_experts_of_gpt_oss_are_parts_of_one_tensor(ours):
    arch = read(ours, "gpt_oss", **OSS)
    assert arch.windows == (8, None, 8, None)
    assert arch.swiglu_limit == 7.0
    plan = planned(ours, arch)
    third = plan["0.decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight"]
    assert (third.index, third.form) == (2, "interleaved")
    assert third.tensors == {"model.layers.0.mlp.experts.gate_up_proj": (4, 32, 96)}
    assert plan["0.decoder.layers.0.self_attention.core_attention.sinks"].cut == "rows"
    assert plan["0.decoder.layers.0.mlp.router.bias"].tensors == {"model.layers.0.mlp.router.bias": (4,)}


@pytest.mark.parametrize(
    ("kind", "changes", "error", "said"),
    [
        ("gpt2", {}, ModelFolderError, "gpt2"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, ModelFolderError, "dense layers among expert layers"),
        ("deepseek_v3", V3 | {"norm_topk_prob": False}, ModelFolderError, "norm_topk_prob=false"),
        ("deepseek_v3", V3 | {"num_key_value_heads": 2}, ModelFolderError, "num_key_value_heads other than"),
        ("llama", {"trains_mtp": True}, ConfigError, "mtp is train and the model is llama; mapped are deepseek_v3"),
    ],
    ids=["family", "sparse step", "top k", "heads", "mtp"],
)
def test_models_without_a_mapping_are_refused(ours, kind, changes, error, said):
    with pytest.raises(error, match=said):
        read(ours, kind, **changes)


@pytest.mark.parametrize(
    ("kind", "model", "parallel", "said"),
    [
        ("llama", {"num_attention_heads": 2}, {"tp": 4}, "parallel.tp = 4 does not divide the model's 2 query heads"),
        ("llama", {}, {"tp": 2, "cp": 4}, r"parallel.tp \* cp = 8 does not divide the model's 4 query heads"),
        ("llama", {}, {"pp": 3, "vpp": 2}, r"parallel.pp \* vpp = 6 does not divide the model's 4 layers"),
        ("llama", {}, {"pp": 5}, "parallel.pp is 5 and the model has 4 layers"),
        ("llama", {}, {"ep": 2}, "the llama model has no experts"),
        ("gpt_oss", OSS, {"ep": 3}, "parallel.ep = 3 does not divide the model's 4 experts"),
        ("gpt_oss", OSS, {"tp": 2}, "Experts with parallel.tp above 1 need parallel.sequence_parallel=true"),
    ],
    ids=["heads", "ring", "pieces", "stages", "dense", "experts", "sequence"],
)
def test_layouts_that_do_not_divide_the_model(ours, kind, model, parallel, said):
    with pytest.raises(ConfigError, match=said):
        ours.architectures.check_divides(read(ours, kind, **model), ParallelConfig(**parallel))


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"sp": 2}, "parallel.sp is 2; it belongs to the fsdp backend. Here use cp"),
        ({"vpp": 2}, "parallel.vpp is 2 and parallel.pp is 1; pieces need a pipeline"),
        ({"sequence_parallel": True}, "parallel.sequence_parallel needs parallel.tp above 1"),
    ],
    ids=["sp", "vpp", "sequence"],
)
def test_layouts_that_make_no_sense(ours, parallel, said):
    with pytest.raises(ConfigError, match=said):
        ours.layout.check_parallel(ParallelConfig(**parallel))


def test_ranks_that_a_layout_does_not_divide(ours):
    ours.layout.check_world(ParallelConfig(tp=2, pp=2, ep=2), 8)
    with pytest.raises(ConfigError, match=r"parallel.tp \* pp \* cp = 2 \* 2 \* 1 = 4 does not divide 6 ranks"):
        ours.layout.check_world(ParallelConfig(tp=2, pp=2), 6)
    with pytest.raises(ConfigError, match="parallel.ep = 4 does not divide the 2 ranks of a pipeline stage"):
        ours.layout.check_world(ParallelConfig(pp=2, ep=4), 4)
