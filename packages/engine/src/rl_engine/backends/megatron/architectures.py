"""Architectures that are mapped to megatron-core: supported fields of a Hugging Face config, and refused ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rl_engine.errors import ConfigError
from rl_engine.layers.moe import Experts
from rl_engine.model.hf import ROPE_TYPES, check_mapped
from rl_engine.types import Head

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_engine.types import ParallelConfig

_QUICK_GELU = 1.702  # of the sigmoid's argument, in megatron-core's quick_gelu
_SWIGLU_LIMIT = 7.0  # both are attributes of GPT-OSS's config in newer transformers, and were in its code before


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family of models differs from Llama's; a text is the key of its config that says so."""

    qkv_bias: bool | str = False
    """Query, key and value projections have a bias."""
    qk_norm: bool | str = False
    """RMSNorm of each query and key head."""
    num_experts: str | None = None
    """Key with the number of experts; None: all layers are dense."""
    expert_size: str = "moe_intermediate_size"
    """Key with the inner size of an expert."""
    norm_top_k: bool | str = "norm_topk_prob"
    """The chosen experts' probabilities are scaled to sum to 1."""
    has_shared_experts: bool = False
    """Every token goes to shared experts too, and the first layers are dense."""
    is_sigmoid: bool = False
    """Experts are chosen by sigmoids, not by softmax."""
    is_latent: bool = False
    """Latent attention (MLA)."""
    has_sinks: bool = False
    """Attention sinks, biases of products and experts, and a clamped activation, as GPT-OSS has them."""
    has_mtp: bool = False
    """Layers for multi-token prediction are mapped."""
    takes_yarn: bool = False
    """YaRN's rotary tables are mapped."""
    has_partial_rotary: bool = False
    """A part of each head is rotated."""
    unmapped: Callable[[Any], dict[str, bool]] = lambda config: {}
    """Variants of the family that are not mapped, and whether a config is one."""


def _dense_among_experts(config: Any) -> dict[str, bool]:
    return {"dense layers among expert layers": bool(config.mlp_only_layers or config.decoder_sparse_step != 1)}


def _plain_top_k(config: Any) -> dict[str, bool]:
    groups = config.n_group > 1 and config.num_experts_per_tok != 2 * config.topk_group
    return {
        "norm_topk_prob=false": not config.norm_topk_prob,
        "num_experts_per_tok other than twice topk_group": groups,  # megatron-core weighs a group by so many
    }


def other_latent(config: Any) -> dict[str, bool]:
    """Variants of latent attention that are not mapped, and whether a config has them."""
    rope, heads = config.rope_parameters, config.num_attention_heads
    has_one_scale = bool(rope.get("mscale")) and rope["mscale"] == rope.get("mscale_all_dim")
    return {
        "rope_interleave=false": not getattr(config, "rope_interleave", True),
        "mscale other than mscale_all_dim": rope["rope_type"] == "yarn" and not has_one_scale,
        "num_key_value_heads other than num_attention_heads": config.num_key_value_heads != heads,
    }


def _other_gelu(config: Any) -> dict[str, bool]:
    return {"swiglu_alpha other than 1.702": getattr(config, "swiglu_alpha", _QUICK_GELU) != _QUICK_GELU}


_DEEPSEEK: dict[str, Any] = {
    "num_experts": "n_routed_experts",
    "has_shared_experts": True,
    "is_latent": True,
    "takes_yarn": True,
}
FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, num_experts="num_experts", unmapped=_dense_among_experts),
    "glm4_moe": Family(
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        num_experts="n_routed_experts",
        has_shared_experts=True,
        is_sigmoid=True,
        has_mtp=True,
        has_partial_rotary=True,
        unmapped=_plain_top_k,
    ),
    "deepseek_v2": Family(norm_top_k=False, unmapped=other_latent, **_DEEPSEEK),
    "deepseek_v3": Family(
        is_sigmoid=True,
        has_mtp=True,
        unmapped=lambda config: _plain_top_k(config) | other_latent(config),
        **_DEEPSEEK,
    ),
    "gpt_oss": Family(
        qkv_bias="attention_bias",
        num_experts="num_local_experts",
        expert_size="intermediate_size",
        norm_top_k=True,
        has_sinks=True,
        takes_yarn=True,
        unmapped=_other_gelu,
    ),
}
"""Families that are mapped, by `model_type`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How a mixture chooses the experts of a token."""

    is_sigmoid: bool = False
    """By sigmoids and a bias per expert that counts in the choice alone (DeepSeek-V3, 2412.19437); else by softmax."""
    scale: float = 1.0
    """Factor of the chosen experts' weights, after they are normalised where they are."""
    num_groups: int = 1
    """Groups of experts; 1: the choice is free."""
    top_groups: int = 1
    """Groups from which a token's experts are chosen: those with the best expert, or by sigmoids the best two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Sizes of multi-head latent attention (DeepSeek-V2, 2405.04434)."""

    query_rank: int | None
    """Size of a token's latent query; None: queries are projected at once."""
    kv_rank: int
    """Size of the latent that keys and values are made of."""
    key_dim: int
    """Size of the part of a query or key head that is not rotated."""
    rope_dim: int
    """Size of the rotated part, of which all key heads share one."""
    value_dim: int
    """Size of a value head."""
    scaling: tuple[float, float]
    """YaRN's factor and `mscale_all_dim`, by which scores are scaled; (1, 0) without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder-only transformer with grouped-query attention, gated SiLU MLPs (or experts), RMSNorm and rotary."""

    model_type: str
    """Model type, as in config.json."""
    num_layers: int
    """Decoder layers."""
    hidden_size: int
    """H."""
    num_heads: int
    """Query heads."""
    num_groups: int
    """Key and value heads."""
    head_dim: int
    """Size of a head."""
    ffn_size: int
    """Inner size of a dense MLP."""
    vocab_size: int
    """V."""
    pad_id: int | None
    """The token whose embedding is not trained, as in transformers; it still is as a row of a tied head."""
    context: int
    """Longest row."""
    norm_eps: float
    """Epsilon of RMSNorm."""
    is_tied: bool
    """The language-model head is the embedding."""
    has_scalar_head: bool
    """The head gives one number, as a sequence classifier with one label."""
    has_qkv_bias: bool
    """Query, key and value projections have a bias."""
    has_qk_norm: bool
    """RMSNorm of each query and key head."""
    num_experts: int
    """0: dense."""
    num_dense: int
    """First layers that have a dense MLP in the place of experts."""
    top_k: int
    """Experts per token."""
    expert_size: int
    """Inner size of an expert."""
    norm_top_k: bool
    """The chosen experts' probabilities are scaled to sum to 1."""
    shared_size: int
    """Inner size of the experts that every token goes to, taken together; 0: none."""
    router: Router
    """How experts are chosen."""
    latent: LatentSizes | None
    """Of latent attention; None: heads have keys and values of their own."""
    rope_scale: float
    """Factor of rotated queries and keys (YaRN's attention factor)."""
    swiglu_limit: float | None
    """GPT-OSS (2508.10925): attention has sinks, other products and experts have biases, and experts clamp what their
    activation takes to this; None: none of it."""
    windows: tuple[int | None, ...]
    """By layer, the tokens that a query sees, itself included; None: all before it."""
    has_mtp: bool = False
    """A layer for multi-token prediction behind the last is trained."""
    has_partial_rotary: bool = False
    """A part of each head is rotated."""
    rename: Callable[[Any], Any] | None = None
    """Gives a parameter's `Entry` the names of its tensors, where they are not those of `weights` (see `bridge`)."""

    @property
    def experts(self) -> Experts | None:
        """Sizes of the mixture; None for a dense model, and for softmax routers by groups, which are not replayed."""
        is_sigmoid = self.router.is_sigmoid
        if not self.num_experts or not (is_sigmoid or self.router == Router()):
            return None
        return Experts(
            num_layers=self.num_layers - self.num_dense,
            num_experts=self.num_experts,
            top_k=self.top_k,
            is_sigmoid=is_sigmoid,
        )


def read_architecture(config: Any, head: Head, *, trains_mtp: bool = False) -> Architecture:
    """Read the needed fields of a model folder's transformers config.

    Raises:
        ConfigError: an architecture whose layers for multi-token prediction are not mapped is to train them.
        ModelFolderError: an architecture, or a variant of one, that has no mapping.
    """
    kind = config.model_type
    family = FAMILIES.get(kind, Family())
    if trains_mtp and not family.has_mtp:
        mapped = ", ".join(sorted(name for name, each in FAMILIES.items() if each.has_mtp))
        raise ConfigError(f"mtp is train and the model is {kind}; mapped are {mapped}. Use mtp=freeze.")
    check_mapped(
        config,
        "megatron",
        tuple(FAMILIES),
        layers={"full_attention", "sliding_attention"},
        ropes=(*ROPE_TYPES, "yarn") if family.takes_yarn else ROPE_TYPES,
        more=family.unmapped(config),
    )
    has_experts = family.num_experts is not None
    expert_size = getattr(config, family.expert_size) if has_experts else 0
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
        has_qkv_bias=_is_so(config, family.qkv_bias),
        has_qk_norm=_is_so(config, family.qk_norm),
        num_experts=getattr(config, family.num_experts) if family.num_experts is not None else 0,
        num_dense=config.first_k_dense_replace if family.has_shared_experts else 0,
        top_k=config.num_experts_per_tok if has_experts else 0,
        expert_size=expert_size,
        shared_size=config.n_shared_experts * expert_size if family.has_shared_experts else 0,
        router=_router(config, family),
        latent=latent_sizes(config) if family.is_latent else None,
        norm_top_k=_is_so(config, family.norm_top_k),
        rope_scale=LlamaRotaryEmbedding(config).attention_scaling,
        swiglu_limit=getattr(config, "swiglu_limit", _SWIGLU_LIMIT) if family.has_sinks else None,
        windows=_windows(config),
        has_mtp=trains_mtp,
        has_partial_rotary=family.has_partial_rotary,
    )


def _is_so(config: Any, value: bool | str) -> bool:
    """Value of a trait, or of the key of the config that has it."""
    return bool(getattr(config, value, False)) if isinstance(value, str) else value


def _router(config: Any, family: Family) -> Router:
    """How the routers of a config choose."""
    if not family.has_shared_experts:
        return Router()
    has_groups = getattr(config, "topk_method", "by groups") != "greedy"
    return Router(
        is_sigmoid=family.is_sigmoid,
        scale=config.routed_scaling_factor,
        num_groups=(config.n_group or 1) if has_groups else 1,
        top_groups=(config.topk_group or 1) if has_groups else 1,
    )


def latent_sizes(config: Any) -> LatentSizes:
    """Sizes of the latent attention of a config."""
    rope, is_scaled = config.rope_parameters, config.rope_parameters["rope_type"] == "yarn"
    return LatentSizes(
        query_rank=config.q_lora_rank,
        kv_rank=config.kv_lora_rank,
        key_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        scaling=(rope["factor"], rope.get("mscale_all_dim") or 0.0) if is_scaled else (1.0, 0.0),
    )


def _windows(config: Any) -> tuple[int | None, ...]:
    """By layer, the tokens that a query sees, itself included; None: all before it."""
    window = getattr(config, "sliding_window", None)
    default = "full_attention" if window is None else "sliding_attention"  # Mistral names no layers
    kinds = getattr(config, "layer_types", None) or [default] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def split_layers(num_layers: int, pp: int, vpp: int) -> list[int]:
    """Layers of each piece of a pipeline, in order: equally many, or fewer in the first and the last.

    Those have the embedding and the head as well. As megatron-core splits them: all between are alike.
    """
    if num_layers % pp == 0 or pp == 1:
        return [num_layers // (pp * vpp)] * (pp * vpp)
    between = -(-num_layers // pp)
    rest = num_layers - (pp - 2) * between
    return [rest // 2, *[between] * (pp - 2), rest - rest // 2]


def check_divides(arch: Architecture, parallel: ParallelConfig, *, is_ring: bool = False) -> None:
    """Refuse sizes that the layout does not divide; context parallelism as a ring divides no heads.

    Raises:
        ConfigError: says which.
    """
    dealt = parallel.tp * (1 if is_ring else parallel.cp)
    wanted = [
        ("tp", parallel.tp, "query heads", arch.num_heads),
        ("tp", parallel.tp, "key and value heads", arch.num_groups),
        ("tp * cp", dealt, "query heads", arch.num_heads),
        ("tp * cp", dealt, "key and value heads", arch.num_groups),
        ("tp", parallel.tp, "MLP columns", arch.ffn_size),
        ("tp", parallel.tp, "columns of shared experts", arch.shared_size),
        ("pp * vpp", parallel.pp * parallel.vpp, "layers", arch.num_layers),
    ]
    if arch.num_experts:
        wanted.append(("ep", parallel.ep, "experts", arch.num_experts))
    for name, size, what, number in wanted:
        is_split = what == "layers" and parallel.vpp == 1  # unevenly, if need be
        if number % size and not is_split:
            raise ConfigError(f"parallel.{name} = {size} does not divide the model's {number} {what}.")
    if parallel.vpp == 1 and min(split_layers(arch.num_layers, parallel.pp, 1)) < 1:
        raise ConfigError(
            f"parallel.pp is {parallel.pp} and the model has {arch.num_layers} layers, too few for so many stages."
        )
    if arch.num_experts and parallel.tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            "Experts with parallel.tp above 1 need parallel.sequence_parallel=true: tokens are dealt to them."
        )
    if arch.latent is not None and parallel.tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            "Latent attention with parallel.tp above 1 needs parallel.sequence_parallel=true: every rank makes the "
            "latents of its own tokens."
        )
    if arch.has_mtp and parallel.cp > 1:
        raise ConfigError(
            f"mtp is train and parallel.cp is {parallel.cp}, whose ranks have the token after next elsewhere. Use cp=1."
        )
    if parallel.ep > 1 and not arch.num_experts:
        raise ConfigError(f"parallel.ep is {parallel.ep} and the {arch.model_type} model has no experts. Set it to 1.")
