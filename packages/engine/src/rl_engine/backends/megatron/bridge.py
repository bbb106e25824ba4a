# pyright: reportMissingImports=false
"""Families beyond those of `architectures`: their sizes and names of weights come from Megatron-Bridge.

Bridge describes a model in the settings of megatron-core and maps every parameter to Hugging Face tensors. Layers,
loading and export are this backend's, so that a family whose layers Bridge builds from classes of its own is rejected.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rl_engine.backends.megatron.architectures import FAMILIES, Architecture, Router, latent_sizes, other_latent
from rl_engine.backends.megatron.weights import Entry, Form, grouped
from rl_engine.errors import ModelFolderError
from rl_engine.model.hf import ROPE_TYPES, check_mapped
from rl_engine.types import Bridge, Head

if TYPE_CHECKING:
    from rl_engine.types import EngineConfig

_FORMS = {Form.PLAIN: "AutoMapping", Form.QKV: "QKVMapping", Form.STACKED: "GatedMLPMapping"}
"""Bridge's class of mapping by the layout of the tensors in a parameter; subclasses change numbers."""


def takes_bridge(config: EngineConfig, model_type: str) -> bool:
    """Whether Bridge describes the model: it is installed, and the family is none of `FAMILIES`."""
    return config.bridge == Bridge.AUTO and model_type not in FAMILIES and find_spec("megatron.bridge") is not None


def describe(config: Any, head: Head) -> Architecture:
    """Architecture of a model folder's transformers config, whose `rename` gives Bridge's names of the weights.

    Raises:
        ModelFolderError: Bridge does not know the model, or builds it of layers that this backend does not have.
    """
    provider, registry = read_bridge(config)
    is_latent, is_sigmoid = provider.multi_latent_attention, provider.moe_router_score_function == "sigmoid"
    spec = getattr(provider.transformer_layer_spec, "func", provider.transformer_layer_spec)
    num_experts, layers = provider.num_moe_experts or 0, provider.moe_layer_freq
    num_dense = layers.count(0) if num_experts and isinstance(layers, list) else 0
    top_k, wanted = provider.moe_router_topk, [0] * num_dense + [1] * (provider.num_layers - num_dense)
    kinds = ("GPTModelProvider", "MLAModelProvider")
    variants = {
        f"layers of its own ({type(provider).__name__}, {spec.__name__})": type(provider).__name__ not in kinds
        or (spec is not get_gpt_decoder_block_spec and spec.__name__ != "default_layer_spec"),
        f"normalization={provider.normalization}": provider.normalization != "RMSNorm",
        "norms around zero": provider.layernorm_zero_centered_gamma,
        "MLPs without a gate": not provider.gated_linear_unit,
        "biases of products": provider.add_bias_linear,
        "pairs of neighbours rotated": provider.rotary_interleaved and not is_latent,
        "sliding windows": provider.window_size is not None,
        "dense layers among expert layers": bool(num_experts) and layers not in (1, wanted),
        "a gate of shared experts": provider.moe_shared_expert_gate,
        "a router bias with softmax, or sigmoids without": bool(num_experts)
        and bool(provider.moe_router_enable_expert_bias) != is_sigmoid,
        "norm_topk_prob=false": is_sigmoid and not getattr(config, "norm_topk_prob", True),
        "num_experts_per_tok other than twice topk_group": (provider.moe_router_num_groups or 1) > 1
        and top_k != 2 * provider.moe_router_group_topk,
    }
    check_mapped(
        config,
        "megatron",
        (config.model_type,),
        ropes=(*ROPE_TYPES, "yarn") if is_latent else ROPE_TYPES,
        more=variants | (other_latent(config) if is_latent else {}),
    )
    return Architecture(
        model_type=config.model_type,
        num_layers=provider.num_layers,
        hidden_size=provider.hidden_size,
        num_heads=provider.num_attention_heads,
        num_groups=provider.num_query_groups or provider.num_attention_heads,
        head_dim=provider.kv_channels or provider.hidden_size // provider.num_attention_heads,
        ffn_size=provider.ffn_hidden_size,
        vocab_size=config.vocab_size,
        pad_id=config.pad_token_id,
        context=config.max_position_embeddings,
        norm_eps=provider.layernorm_epsilon,
        is_tied=bool(provider.share_embeddings_and_output_weights) and head == Head.LM,
        has_scalar_head=head != Head.LM,
        has_qkv_bias=provider.add_qkv_bias,
        has_qk_norm=provider.qk_layernorm and not is_latent,
        num_experts=num_experts,
        num_dense=num_dense,
        top_k=top_k if num_experts else 0,
        expert_size=provider.moe_ffn_hidden_size if num_experts else 0,
        norm_top_k=not provider.moe_router_pre_softmax,
        shared_size=provider.moe_shared_expert_intermediate_size or 0,
        router=Router(
            is_sigmoid=is_sigmoid,
            scale=provider.moe_router_topk_scaling_factor or 1.0,
            num_groups=provider.moe_router_num_groups or 1,
            top_groups=provider.moe_router_group_topk or 1,
        ),
        latent=latent_sizes(config) if is_latent else None,
        rope_scale=LlamaRotaryEmbedding(config).attention_scaling,
        swiglu_limit=None,
        windows=(None,) * provider.num_layers,
        has_partial_rotary=provider.rotary_percent != 1,
        rename=partial(renamed, registry),
    )


def read_bridge(config: Any) -> tuple[Any, Any]:
    """Bridge's provider, which has megatron-core's settings, and its registry of parameters.

    Raises:
        ModelFolderError: Bridge cannot be imported, or does not know the model.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns at import of each optional package that it goes without
            from megatron.bridge import AutoBridge

            bridge = AutoBridge.from_hf_config(config)
            registry = bridge._model_bridge.mapping_registry()  # pyright: ignore[reportPrivateUsage]
            return bridge.to_megatron_provider(load_weights=False), registry
    except (ImportError, ValueError, NotImplementedError, AttributeError, KeyError) as error:
        said = str(error).strip().partition("\n")[0]
        raise ModelFolderError(
            f"Model type {config.model_type!r} has no mapping to the megatron backend, and Megatron-Bridge does "
            f"not describe it ({type(error).__name__}: {said}). Use the fsdp backend."
        ) from error


def renamed(registry: Any, entry: Entry) -> Entry:
    """`entry` with the names that Bridge's registry has for its tensors.

    Raises:
        ModelFolderError: the registry does not have the parameter, or lays it out in another way.
    """
    if entry.is_head or entry.is_copy:
        return entry
    ours, name = next(iter(entry.tensors)), entry.parameter.partition(".")[2]
    for numbered, source in (("layers", r"\.layers\.(\d+)\."), ("local_experts", r"\.experts\.(\d+)\.")):
        if (number := re.search(source, ours)) is not None:  # of the whole model, where those of `name` are a rank's
            name = re.sub(rf"(?<={numbered}\.)\d+", number[1], name)
    mapping = registry.megatron_to_hf_lookup(grouped(name))
    found = {} if mapping is None else mapping.hf_param
    theirs = [found] if isinstance(found, str) else [*found.values()]
    if type(mapping).__name__ != _FORMS.get(entry.form) or len(theirs) != len(entry.tensors):
        raise ModelFolderError(
            f"Megatron-Bridge maps {name} by {type(mapping).__name__}; the megatron backend takes "
            f"{_FORMS.get(entry.form, 'its own map')} there. Use the fsdp backend."
        )
    return replace(entry, tensors=dict(zip(theirs, entry.tensors.values(), strict=True)))
