"""From a Hugging Face config to megatron-core's, for the architectures that are mapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer import TransformerConfig

from rl_engine.backends.megatron.weights import Architecture
from rl_engine.errors import ConfigError, ModelFolderError
from rl_engine.types import Head

if TYPE_CHECKING:
    from rl_engine.types import ParallelConfig

_ROPE_TYPES = ("default", "linear", "llama3")
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


def read_architecture(config: Any, head: Head) -> Architecture:
    """Take what is needed from a model folder's transformers config.

    Raises:
        ModelFolderError: an architecture, or a variant of one, that has no mapping.
    """
    kind = config.model_type
    if kind not in _MODEL_TYPES:
        raise ModelFolderError(
            f"Model type {kind!r} has no mapping to megatron-core here; mapped are {', '.join(_MODEL_TYPES)}. "
            "Use the fsdp backend, which takes any causal LM."
        )
    _refuse_variants(config, kind)
    heads = config.num_attention_heads
    return Architecture(
        model_type=kind,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_groups=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        ffn_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        pad_id=config.pad_token_id,
        context=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        is_tied=bool(config.tie_word_embeddings) and head == Head.LM,
        has_scalar_head=head != Head.LM,
        has_qkv_bias=kind == "qwen2",
        has_qk_norm=kind in ("qwen3", "qwen3_moe"),
        num_experts=config.num_experts if kind == "qwen3_moe" else 0,
        top_k=config.num_experts_per_tok if kind == "qwen3_moe" else 0,
        expert_size=config.moe_intermediate_size if kind == "qwen3_moe" else 0,
        norm_top_k=bool(getattr(config, "norm_topk_prob", False)),
        windows=_windows(config),
    )


def _windows(config: Any) -> tuple[int | None, ...]:
    """By layer, the tokens that a query sees, itself included; None: all before it."""
    window = getattr(config, "sliding_window", None)
    default = "full_attention" if window is None else "sliding_attention"  # Mistral names no layers
    kinds = getattr(config, "layer_types", None) or [default] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _refuse_variants(config: Any, kind: str) -> None:
    """What the mapping would get silently wrong."""
    layers = set(getattr(config, "layer_types", None) or ())
    rope = config.rope_parameters["rope_type"]
    dense_layers = kind == "qwen3_moe" and (config.mlp_only_layers or config.decoder_sparse_step != 1)
    found = {
        f"hidden_act={config.hidden_act}": config.hidden_act != "silu",
        f"layer types {sorted(layers)}": not layers <= {"full_attention", "sliding_attention"},
        f"rope type {rope!r}": rope not in _ROPE_TYPES,
        "attention_bias=true": kind != "qwen2" and bool(getattr(config, "attention_bias", False)),
        "mlp_bias=true": bool(getattr(config, "mlp_bias", False)),
        "attention dropout": bool(getattr(config, "attention_dropout", 0.0)),
        "dense layers among expert layers": bool(dense_layers),
    }
    for what, is_there in found.items():
        if is_there:
            raise ModelFolderError(
                f"The {kind} model has {what}, which the megatron backend does not map. Use the fsdp backend."
            )


def check_divides(arch: Architecture, parallel: ParallelConfig) -> None:
    """Refuse sizes that the layout does not divide.

    Raises:
        ConfigError: says which.
    """
    wanted = [
        ("tp", parallel.tp, "query heads", arch.num_heads),
        ("tp", parallel.tp, "key and value heads", arch.num_groups),
        ("tp * cp", parallel.tp * parallel.cp, "query heads", arch.num_heads),
        ("tp * cp", parallel.tp * parallel.cp, "key and value heads", arch.num_groups),
        ("tp", parallel.tp, "MLP columns", arch.ffn_size),
        ("pp", parallel.pp, "layers", arch.num_layers),
        ("pp * vpp", parallel.pp * parallel.vpp, "layers", arch.num_layers),
    ]
    if arch.num_experts:
        wanted.append(("ep", parallel.ep, "experts", arch.num_experts))
    for name, size, what, count in wanted:
        if count % size:
            raise ConfigError(f"parallel.{name} = {size} does not divide the model's {count} {what}.")
    if arch.num_experts and parallel.tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            "Experts with parallel.tp above 1 need parallel.sequence_parallel=true: tokens are dealt to them."
        )
    if parallel.ep > 1 and not arch.num_experts:
        raise ConfigError(f"parallel.ep is {parallel.ep} and the {arch.model_type} model has no experts. Set it to 1.")


def transformer_config(arch: Architecture, parallel: ParallelConfig, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's config: its own modules, no fused kernels that need CUDA extensions, no dropout."""
    experts: dict[str, Any] = {}
    if arch.num_experts:
        experts = {
            "num_moe_experts": arch.num_experts,
            "moe_router_topk": arch.top_k,
            "moe_ffn_hidden_size": arch.expert_size,
            "moe_router_pre_softmax": not arch.norm_top_k,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": parallel.ep,
            "expert_tensor_parallel_size": 1,
        }
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_groups,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        qk_layernorm=arch.has_qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.has_qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        cuda_graph_scope=[],  # the default warns
        **experts,
    )
