"""From a Hugging Face config to megatron-core's, for the architectures with a built-in mapping."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer import TransformerConfig

from rl_engine.backends.megatron.weights import Architecture, Form, plan_weights, shapes_of
from rl_engine.checkpoint import hf_folder
from rl_engine.errors import ConfigError, ModelFolderError
from rl_engine.types import Head, MatmulPrecision, Precision

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rl_engine.backends.megatron.weights import Entry, Registry
    from rl_engine.types import EngineConfig, ParallelConfig

_ROPE_TYPES = ("default", "linear", "llama3")
_MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")


def read_architecture(folder: Path, config: Any, head: Head) -> Architecture:
    """Take what is needed from a model folder's transformers config.

    Raises:
        ModelFolderError: an architecture, or a variant of one, that has no mapping.
    """
    kind, registry = config.model_type, None
    if kind not in _MODEL_TYPES:
        registry = find_registry(folder, kind)
        check_bridged(config, head)
    _refuse_variants(config, kind)
    heads = config.num_attention_heads
    arch = Architecture(
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
        registry=registry,
    )
    return arch if registry is None else with_tensors(arch, folder)


def _refuse_variants(config: Any, kind: str) -> None:
    """What the mapping would get silently wrong."""
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    rope = config.rope_parameters["rope_type"]
    dense_layers = kind == "qwen3_moe" and (config.mlp_only_layers or config.decoder_sparse_step != 1)
    found = {
        f"hidden_act={config.hidden_act}": config.hidden_act != "silu",
        f"layer types {sorted(layers)}": layers != {"full_attention"},
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


_PROBE = 32  # tokens
# the mappings of its `param_mapping` that cut and join tensors and change no number in them
_JOINS = {
    Form.PLAIN: (("AutoMapping", "ColumnParallelMapping", "RowParallelMapping", "ReplicatedMapping"), None),
    Form.QKV: (("QKVMapping",), ("q", "k", "v")),
    Form.STACKED: (("GatedMLPMapping",), ("gate", "up")),
}
_NEEDED = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act",
)  # fmt: skip


def find_registry(folder: Path, kind: str) -> Registry:
    """Its mapping for the architecture of a model folder.

    Raises:
        ModelFolderError: there is none, or Megatron-Bridge cannot be imported.
    """
    try:
        from megatron.bridge.models.conversion.model_bridge import (  # pyright: ignore[reportMissingImports]
            get_model_bridge,  # pyright: ignore[reportUnknownVariableType]
        )
    except ImportError as error:
        raise ModelFolderError(
            f"Model type {kind!r} has no built-in mapping to megatron-core, and Megatron-Bridge, which has more, "
            f"cannot be imported ({error}). Use the fsdp backend, which takes any causal LM."
        ) from error
    model = hf_folder.empty_model(folder)
    try:
        return get_model_bridge(type(model)).mapping_registry()
    except NotImplementedError as error:
        raise ModelFolderError(
            f"Model type {kind!r} has neither a built-in mapping to megatron-core nor one of Megatron-Bridge. "
            "Use the fsdp backend, which takes any causal LM."
        ) from error


def check_bridged(config: Any, head: Head) -> None:
    """Refuse what a bridged architecture cannot have, before its config is read.

    Raises:
        ModelFolderError: says what.
    """
    kind = config.model_type
    if head != Head.LM:
        raise refusal(kind, f"head={head} is for the built-in mappings")
    missing = [name for name in _NEEDED if getattr(config, name, None) is None]
    if missing:
        raise refusal(kind, f"its config has no {', '.join(missing)}")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        raise refusal(kind, f"it has a sliding window of {window} tokens")


def with_tensors(arch: Architecture, folder: Path) -> Architecture:
    """`arch` with what the tensors of transformers' model tell: biases and norms of heads.

    Raises:
        ModelFolderError: a tensor is not mapped, or is not what the layers want.
    """
    found = {name: tuple(tensor.shape) for name, tensor in hf_folder.empty_model(folder).named_parameters()}
    registry = arch.registry
    assert registry is not None

    def has(parameter: str) -> bool:
        mapping = registry.megatron_to_hf_lookup(f"decoder.layers.0.self_attention.{parameter}")
        return mapping is not None and _names(mapping)[0] in found

    arch = replace(arch, has_qkv_bias=has("linear_qkv.bias"), has_qk_norm=has("q_layernorm.weight"))
    wanted = shapes_of(plan(arch, pp=1, vpp=1, ep=1))
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise refusal(
                arch.model_type, f"tensor {name} is {_shown(found, name)} there and {_shown(wanted, name)} here"
            )
    return arch


def plan(arch: Architecture, *, pp: int, vpp: int, ep: int) -> list[Entry]:
    """`plan_weights` under the names of the architecture's own tensors.

    Raises:
        ModelFolderError: a parameter has no mapping, or one that does more than join tensors.
    """
    entries, registry = plan_weights(arch, pp=pp, vpp=vpp, ep=ep), arch.registry
    if registry is None:
        return entries
    return [_renamed(entry, registry, arch.model_type) for entry in entries]


def _renamed(entry: Entry, registry: Registry, kind: str) -> Entry:
    first = next(iter(entry.tensors))
    layer = re.match(r"model\.layers\.(\d+)\.", first)
    _, _, name = entry.parameter.partition(".")
    if layer is not None:  # of the whole model, where the parameter counts those of its piece
        name = re.sub(r"^decoder\.layers\.\d+", f"decoder.layers.{layer[1]}", name)
    if entry.is_copy:
        name = "embedding.word_embeddings.weight"
    mapping, (classes, roles) = registry.megatron_to_hf_lookup(name), _JOINS[entry.form]
    if mapping is None:
        raise refusal(kind, f"Megatron-Bridge says nothing of {name}")
    given = mapping.hf_param
    is_plain = isinstance(given, str) if roles is None else not isinstance(given, str) and set(given) == set(roles)
    if type(mapping).__name__ not in classes or getattr(mapping, "permute_dims", None) or not is_plain:
        raise refusal(kind, f"{type(mapping).__name__} of {name} does more than join tensors")
    return replace(entry, tensors=dict(zip(_names(mapping, roles), entry.tensors.values(), strict=True)))


def _names(mapping: Any, roles: tuple[str, ...] | None = None) -> list[str]:
    given: str | Mapping[str, str] = mapping.hf_param
    return [given] if isinstance(given, str) else [given[role] for role in roles or sorted(given)]


def probe_row(arch: Architecture) -> list[int]:
    """Token ids that are not all alike."""
    return [(7 * place + 3) % arch.vocab_size for place in range(min(_PROBE, arch.context))]


def difference(config: EngineConfig, row: list[int], scored: torch.Tensor) -> str | None:
    """What is wrong with `scored`, the log-probs of a row's tokens but the first; None where nothing is."""
    try:
        model = hf_folder.load_model(config.model_path, init=config.init, dtype=torch.float32, seed=config.seed).eval()
    except ModelFolderError as error:  # for every rank to hear of
        return str(error)
    with torch.no_grad():
        logits = model(torch.tensor([row])).logits[0, :-1].double() / config.temperature
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0]
    is_narrow = config.precision == Precision.BFLOAT16 or config.matmul_precision != MatmulPrecision.HIGHEST
    worst = float((scored.double().cpu() - wanted).abs().max())
    if worst <= (0.2 if is_narrow else 1e-3):
        return None
    return (
        f"log-probs of a probe row differ by {worst:.3g} from those of transformers' {type(model).__name__}: "
        "its layers compute something else than ours"
    )


def refusal(kind: str, what: str) -> ModelFolderError:
    """Of an architecture that has a mapping."""
    return ModelFolderError(
        f"Model type {kind!r} is mapped by Megatron-Bridge, but not trained by the megatron backend: {what}. "
        "Use the fsdp backend, which takes any causal LM."
    )


def _shown(shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
    return "absent" if name not in shapes else f"of shape {list(shapes[name])}"
