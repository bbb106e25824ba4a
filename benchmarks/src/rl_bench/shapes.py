"""Shapes of the Qwen3 models that benchmarks measure with random weights."""

from __future__ import annotations

from typing import Any

_QWEN3: dict[str, dict[str, int]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}


def qwen3(size: str, **changes: Any) -> dict[str, Any]:
    """Fields of transformers' configuration of a dense Qwen3, with some changed."""
    common = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
    rope = {"tie_word_embeddings": size != "8B", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    return common | rope | _QWEN3[size] | changes


def weight_shapes(config: dict[str, Any], num_experts: int = 0) -> dict[str, tuple[int, ...]]:
    """Shape of each weight by its name in a checkpoint; with experts, each has weights of its own."""
    width, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    experts = [f"mlp.experts.{expert}" for expert in range(num_experts)] or ["mlp"]
    layer |= {"mlp.gate": (num_experts, width)} if num_experts else {}
    for name in experts:
        ups = {f"{name}.gate_proj": (inner, width), f"{name}.up_proj": (inner, width)}
        layer |= ups | {f"{name}.down_proj": (width, inner)}
    numbers = range(config["num_hidden_layers"])
    layers = {f"model.layers.{i}.{name}.weight": shape for i in numbers for name, shape in layer.items()}
    vocabulary = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    if not config["tie_word_embeddings"]:
        vocabulary["lm_head.weight"] = (config["vocab_size"], width)
    return vocabulary | layers | {"model.norm.weight": (width,)}
