"""Pipeline stage over megatron-core's layers: packed rows in, log-probs of completion tokens out.

Legend: `T` tokens fed, `C` completion tokens, `V` vocabulary, `H` hidden, `D` head size, `tp` tensor-parallel ranks.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig, multi_latent_attention
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rl_csrc import linear_logprobs, parallel_logprobs
from rl_engine.backends.megatron.adapters import adapter_entries, add_adapters
from rl_engine.backends.megatron.architectures import split_layers
from rl_engine.backends.megatron.layout import megatron_calls
from rl_engine.backends.megatron.megatron_attention import (
    FusedRowAttention,
    LatentAttention,
    LatentNorm,
    RingGroup,
    RmsNorm,
    RowAttention,
    RowParams,
)
from rl_engine.backends.megatron.weights import WeightMap, padded_vocab, plan_weights, shapes_of
from rl_engine.batch.micro_batches import cost_model
from rl_engine.batch.packed import take_rows
from rl_engine.checkpoint.hf_folder import DTYPES
from rl_engine.errors import BackendError, ConfigError
from rl_engine.layers.logprobs import LinearHead, head_loss_obstacle, score_states, score_values
from rl_engine.layers.moe import routing_of
from rl_engine.layers.packed_attention import SequenceGroup, row_layout
from rl_engine.model.activations import PARTS, check_parts, offloaded_parts, treat_parts
from rl_engine.model.device_memory import has_gpu
from rl_engine.model.scorer import Scorer
from rl_engine.types import Fp8, Precision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_engine.backends.megatron.architectures import Architecture, Router
    from rl_engine.backends.megatron.layout import Axis, Layout
    from rl_engine.batch.micro_batches import CostModel
    from rl_engine.batch.packed import PackedRows
    from rl_engine.layers.logprobs import HeadLoss
    from rl_engine.layers.moe import ExpertLoad, Experts, Routing
    from rl_engine.types import EngineConfig, ModelOutput, ParallelConfig


_MTP_FIELDS = MultiTokenPredictionLayerSubmodules.__dataclass_fields__
_MTP_LAYER = "transformer_layer" if "transformer_layer" in _MTP_FIELDS else "mtp_model_layer"
"""Name of its decoder layer, which 0.19 changed; ours is the first."""
_FLOAT8_TOKENS = 128
"""Tokens that a rank's products in float8 have a multiple of: the largest of the recipes' blocks."""


def uses_transformer_engine(config: EngineConfig) -> bool:
    """Whether layers are Transformer Engine's: on a GPU in bfloat16, where it is installed (float32 is TF32 there)."""
    is_fast = config.precision == Precision.BFLOAT16 and has_gpu() and transformer_engine.HAVE_TE
    return config.transformer_engine and (is_fast or config.fp8 != Fp8.OFF)


def uses_ring(config: EngineConfig, arch: Architecture) -> bool:
    """Whether context parallelism is ring attention: Transformer Engine's takes neither windows nor sinks.

    Experts keep Ulysses too: what their routers count wants padding behind the last token.
    """
    is_plain = not arch.num_experts and not any(arch.windows)
    return config.parallel.cp > 1 and is_plain and uses_transformer_engine(config)


RECOMPUTED = {"attention": "core_attn", "norm": "layernorm"}
"""Modules that megatron-core recomputes, by the name of the part of a layer; others have one name."""


def check_layer_parts(config: EngineConfig, arch: Architecture) -> None:
    """Refuse parts of layers that the model has not, or that megatron-core does not recompute under these settings.

    Raises:
        ConfigError: names the part, with megatron-core's reason where it is that.
    """
    absent = {"moe": not arch.num_experts, "mlp": arch.num_experts and not arch.num_dense}
    absent |= {"shared_experts": not arch.shared_size, "mla_up_proj": arch.latent is None}
    check_parts("recompute", [name for name in config.recompute if absent.get(name)], ())
    away = offloaded_parts(config)
    check_parts("activation_offload", away, [name for name in PARTS if not absent.get(name)])
    if "moe" in config.recompute and (config.router_aux_loss_coef or config.parallel.pp > 1):
        raise ConfigError(
            f"recompute names moe, router_aux_loss_coef is {config.router_aux_loss_coef} and parallel.pp is "
            f"{config.parallel.pp}; megatron-core routes again without the loss and the micro-batch of the first time. "
            "Set activation_checkpointing=true."
        )
    if {"norm", "layernorm"} & {*config.recompute} and not transformer_engine.HAVE_TE:
        raise ConfigError(
            "recompute names norm, for which megatron-core calls Transformer Engine, which is not installed. Leave it "
            "out, or use fsdp."
        )
    try:
        if config.recompute:
            transformer_config(arch, config, torch.float32)
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"recompute is {list(config.recompute)}, which megatron-core refuses: {error}") from error


def transformer_config(arch: Architecture, wanted: EngineConfig, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's config: without dropout; with Transformer Engine's kernels where they are used."""
    more: dict[str, Any] = {}
    parallel, fp8, is_fused = wanted.parallel, wanted.fp8, uses_transformer_engine(wanted)
    if wanted.recompute:
        names = [RECOMPUTED.get(part, part) for part in wanted.recompute]
        more = {"recompute_granularity": "selective", "recompute_modules": names}
    if is_fused:
        more |= {"apply_rope_fusion": arch.latent is None}
    if fp8 != Fp8.OFF:  # of whole tensors, gradients need the format with the wider exponent
        more |= {"fp8": "hybrid" if fp8 == Fp8.TENSORWISE else "e4m3", "fp8_recipe": str(fp8)}
    more |= _expert_settings(arch, parallel, dtype, is_fused)
    has_modules = "cuda_graph_modules" in TransformerConfig.__dataclass_fields__  # from 0.19 on
    more["cuda_graph_modules" if has_modules else "cuda_graph_scope"] = []  # the default warns
    if arch.rope_scale != 1:
        more["softmax_scale"] = arch.rope_scale**2 * arch.head_dim**-0.5
    if arch.swiglu_limit is not None:
        more |= {"glu_linear_offset": 1.0, "activation_func_clamp_value": arch.swiglu_limit}
    if (latent := arch.latent) is not None:
        more |= {
            "q_lora_rank": latent.query_rank,
            "kv_lora_rank": latent.kv_rank,
            "qk_head_dim": latent.key_dim,
            "qk_pos_emb_head_dim": latent.rope_dim,
            "v_head_dim": latent.value_dim,
            "rope_type": "rope",  # ours takes its place; the next two scale scores, as YaRN does
            "rotary_scaling_factor": latent.scaling[0],
            "mscale_all_dim": latent.scaling[1],
        }
    if parallel.vpp > 1:  # two ranks send each other activations and gradients, which one batch would mix up
        more |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if arch.num_layers % parallel.pp:
        sizes = split_layers(arch.num_layers, parallel.pp, parallel.vpp)
        more |= {"num_layers_in_first_pipeline_stage": sizes[0], "num_layers_in_last_pipeline_stage": sizes[-1]}
    kind = TransformerConfig if latent is None else MLATransformerConfig
    return kind(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_groups,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        qk_layernorm=arch.has_qk_norm or arch.latent is not None,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu if arch.swiglu_limit is None else quick_gelu,
        add_bias_linear=arch.swiglu_limit is not None,
        add_qkv_bias=arch.has_qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,  # losses are shares of the whole batch's: nothing is averaged
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **more,
    )


def _expert_settings(
    arch: Architecture, parallel: ParallelConfig, dtype: torch.dtype, is_fused: bool
) -> dict[str, Any]:
    """Settings of a mixture of experts and its router; none of a dense model."""
    more: dict[str, Any] = {}
    if arch.num_experts:
        more |= {
            "num_moe_experts": arch.num_experts,
            "moe_grouped_gemm": is_fused,
            "moe_router_topk": arch.top_k,
            "moe_ffn_hidden_size": arch.expert_size,
            "moe_router_pre_softmax": not arch.norm_top_k and not arch.router.is_sigmoid,
            "moe_router_topk_scaling_factor": arch.router.scale if arch.router.scale != 1 else None,
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": parallel.ep,
            "expert_tensor_parallel_size": 1,
            "moe_shared_expert_intermediate_size": arch.shared_size or None,
        }
    if arch.router.is_sigmoid:
        more |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_dtype": None if dtype == torch.float64 else "fp32",
        }
        if arch.router.num_groups > 1:
            more |= {"moe_router_num_groups": arch.router.num_groups, "moe_router_group_topk": arch.router.top_groups}
    return more


def block_spec(
    arch: Architecture, layers: range, *, is_fused: bool = False, is_ring: bool = False
) -> TransformerBlockSubmodules:
    """The specification of some of the model's layers, and of the norm behind the last."""
    norm: Any = RmsNorm
    kinds = [bool(arch.num_experts) and layer >= arch.num_dense for layer in layers]
    specs = [layer_spec(arch, is_sparse=is_sparse, is_fused=is_fused, is_ring=is_ring) for is_sparse in kinds]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def layer_spec(arch: Architecture, *, is_sparse: bool, is_fused: bool = False, is_ring: bool = False) -> Any:
    """megatron-core's own modules, with the norm and attention above; an MLP or experts.

    With `is_fused` linear layers, experts and attention are Transformer Engine's; with `is_ring` over ranks in a ring.
    """
    spec = get_gpt_layer_local_spec(
        num_experts=arch.num_experts if is_sparse else None,
        qk_layernorm=arch.has_qk_norm,
        multi_latent_attention=arch.latent is not None,
        normalization="RMSNorm",
    )
    layer: Any = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RmsNorm
    attention = layer.self_attention.submodules
    rows = {"windows": (*arch.windows, None), "has_sinks": arch.swiglu_limit is not None}
    attention.core_attention = partial(RowAttention, **rows)
    if arch.latent is not None:
        layer.self_attention.module = LatentAttention
        attention.core_attention = ModuleSpec(module=RowAttention, params=rows)
        attention.q_layernorm = attention.kv_layernorm = LatentNorm
    if arch.has_qk_norm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    if is_fused:
        _fuse(layer, arch, is_sparse=is_sparse, is_ring=is_ring)
    return spec


def _fuse(layer: Any, arch: Architecture, *, is_sparse: bool, is_ring: bool) -> None:
    """Put Transformer Engine's modules into a layer's specification.

    Norms stay apart from the linear layers behind them: torch's kernel is as fast, and adapters are given its result.
    """
    column, row = transformer_engine.TEColumnParallelLinear, transformer_engine.TERowParallelLinear
    attention, inner = layer.self_attention.submodules, _submodules(layer.mlp)
    attention.linear_proj = row
    if arch.latent is None:
        attention.linear_qkv = column
    else:
        attention.linear_q_proj = attention.linear_q_up_proj = attention.linear_kv_up_proj = column
    if arch.swiglu_limit is None:  # its sinks would be a parameter of another shape
        params = {"windows": (*arch.windows, None), "is_ring": is_ring}
        attention.core_attention = ModuleSpec(module=FusedRowAttention, params=params)
    if not is_sparse:
        inner.linear_fc1, inner.linear_fc2 = column, row
        return
    grouped = MLPSubmodules(
        linear_fc1=transformer_engine.TEColumnParallelGroupedLinear,
        linear_fc2=transformer_engine.TERowParallelGroupedLinear,
    )
    build: Any = partial if isinstance(layer.mlp, partial) else ModuleSpec
    inner.experts = build(TEGroupedMLP, submodules=grouped)
    if arch.shared_size:
        shared = _submodules(inner.shared_experts)
        shared.linear_fc1, shared.linear_fc2 = column, row


def _submodules(spec: Any) -> Any:
    """Modules inside a specification, which is a partial call from megatron-core 0.19 on."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def check_transformer_engine(fp8: Fp8) -> None:
    """Refuse a machine without it where products are in float8.

    Raises:
        BackendError: it cannot be imported.
    """
    if fp8 != Fp8.OFF and not transformer_engine.HAVE_TE:
        raise BackendError(
            f"fp8 is {fp8} and megatron needs Transformer Engine for it, which cannot be imported; on a machine with "
            "CUDA try: pip install --no-build-isolation 'transformer-engine[pytorch]'"
        )


def mtp_spec(arch: Architecture, *, is_fused: bool) -> MultiTokenPredictionLayerSubmodules:
    """The layer for multi-token prediction, whose decoder layer is like the last one."""
    norm: Any = RmsNorm
    layer = layer_spec(arch, is_sparse=bool(arch.num_experts), is_fused=is_fused)
    parts: dict[str, Any] = {_MTP_LAYER: layer}
    return MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=ColumnParallelLinear, **parts
    )


def _without_transformer_engine() -> None:
    """megatron-core 0.16.1 takes some of Transformer Engine for installed where it is not; delete with 0.17."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = transformer_engine.HAVE_TE


class RouterChoice:
    """Takes the place of megatron-core's own replay at one layer's router; set `routing` before its forward."""

    def __init__(self, layer: int, *, are_probabilities: bool) -> None:
        self.layer = layer
        """Among those of the whole model that have experts."""
        self._are_probabilities = are_probabilities
        self.routing: Routing | None = None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: Any
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices of the experts to take.

        `scores` are logits, probabilities where they come first, or sigmoids with their bias, whose values the router
        does not use.
        """
        wanted = None if self.routing is None else self.routing.choice(self.layer)
        if wanted is None:
            values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        else:
            values, chosen = scores.gather(1, wanted), wanted
        if self.routing is not None:
            self.routing.observe(self.layer, scores.log() if self._are_probabilities else scores, chosen)
        return values, chosen


class GroupChoice:
    """Takes the place of megatron-core's replay where experts are of the groups with the best expert (2405.04434).

    megatron-core's own groups are those with the best sum of several.
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    def get_replay_topk(self, scores: Tensor, topk: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Scores and indices of the experts to take; `scores` are (T, E) probabilities."""
        grouped = scores.unflatten(1, (self._router.num_groups, -1))
        kept = grouped.amax(-1).topk(self._router.top_groups, -1).indices
        is_kept = torch.zeros_like(grouped[:, :, 0]).scatter_(1, kept, 1.0)
        found = (grouped * is_kept[:, :, None]).flatten(1).topk(topk, -1)
        return found.values, found.indices


class _Attach(torch.autograd.Function):
    """`hidden` as it is, whose backward pass also differentiates `share`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(share)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (share,) = ctx.saved_tensors
        return grads[0], torch.ones_like(share)


def attach(hidden: Tensor, share: Tensor) -> Tensor:
    """Let a loss of this stage alone be differentiated together with what the next stages make of `hidden`."""
    return _Attach.apply(hidden, share)  # pyright: ignore[reportReturnType]


class StageModel(GPTModel):
    """One piece of a pipeline stage: its layers, the embedding in the first of all, the head in the last."""

    def __init__(
        self,
        config: TransformerConfig,
        arch: Architecture,
        layout: Layout,
        chunk: int,
        *,
        is_fused: bool,
        is_ring: bool,
    ) -> None:
        _without_transformer_engine()
        piece = chunk * layout.pp.size + layout.pp.rank
        sizes = split_layers(arch.num_layers, layout.pp.size, layout.vpp)
        first = sum(sizes[:piece])
        spec: Any = block_spec(arch, range(first, first + sizes[piece]), is_fused=is_fused, is_ring=is_ring)
        super().__init__(
            config,
            spec,
            vocab_size=padded_vocab(arch.vocab_size, layout.tp.size),
            max_sequence_length=arch.context,
            pre_process=layout.pp.rank == 0 and chunk == 0,
            post_process=layout.is_last_stage and chunk == layout.vpp - 1,
            share_embeddings_and_output_weights=arch.is_tied,
            position_embedding_type="none",
            vp_stage=chunk if layout.vpp > 1 else None,
        )
        if arch.has_mtp and self.post_process:
            mtp_config = copy(config)
            mtp_config.mtp_num_layers = 1
            # megatron-core's schedules take an attribute `mtp` for a block of several
            self.ahead = MultiTokenPredictionLayer(
                mtp_config, mtp_spec(arch, is_fused=is_fused), vp_stage=self.vp_stage, pg_collection=self.pg_collection
            )
            layer = getattr(self.ahead, _MTP_LAYER)
            delattr(self.ahead, _MTP_LAYER)
            self.ahead.transformer_layer = layer
        layers: Any = () if arch.experts is None else self.decoder.layers
        for number, layer in enumerate(layers, start=first - arch.num_dense):
            if number >= 0:  # behind the dense layers
                layer.mlp.router.router_replay = RouterChoice(number, are_probabilities=not arch.norm_top_k)
        if arch.router.num_groups > 1 and not arch.router.is_sigmoid:
            routers: list[Any] = [module for module in self.decoder.modules() if isinstance(module, TopKRouter)]
            for router in routers:
                router.router_replay = GroupChoice(arch.router)
        experts: list[Any] = [module for module in self.decoder.modules() if isinstance(module, MLP)]
        for expert in experts if arch.swiglu_limit is not None else ():
            # An expert is on one rank whole: summed over it, its result would be a view, to which no bias is added.
            expert.linear_fc2.explicit_expert_comm = True
        if arch.has_scalar_head and self.post_process:
            del self.output_layer
            self.score = nn.Linear(arch.hidden_size, 1, bias=False, dtype=config.params_dtype)

    def setup_embeddings_and_output_layer(self) -> None:
        """Nothing: both stages of a tied embedding read the same tensor, and the optimizer sums its gradients."""


class Stage(Scorer):
    """One pipeline stage as a function of packed rows, which every method but `padded` takes padded."""

    model: nn.ModuleList
    """Virtual stages of this rank, `StageModel`s."""
    inv_freq: Tensor
    """(D / 2,) float32, the rotary table that transformers makes of the folder's config."""

    def __init__(
        self, wanted: EngineConfig, source: Any, arch: Architecture, layout: Layout, adapted: Sequence[str] = ()
    ) -> None:
        """Build it with memory for its weights, on the CPU.

        Args:
            wanted: The engine's.
            source: The folder's transformers config.
            arch: What was read of it.
            layout: Where this rank stands.
            adapted: Names of the layers that have a LoRA adapter.
        """
        is_fused, is_ring = uses_transformer_engine(wanted), uses_ring(wanted, arch)
        dtype = DTYPES[wanted.precision]
        self.settings = transformer_config(arch, wanted, dtype)
        with megatron_calls():
            make = partial(StageModel, self.settings, arch, layout, is_fused=is_fused, is_ring=is_ring)
            chunks = [make(chunk) for chunk in range(layout.vpp)]
        super().__init__(nn.ModuleList(chunks))
        entries = plan_weights(arch, pp=layout.pp.size, vpp=layout.vpp, ep=layout.ep.size, is_grouped=is_fused)
        rank = 0 if wanted.lora is None else wanted.lora.rank
        self.weights = WeightMap(arch, layout, entries, adapter_entries(entries, adapted, rank))
        self.arch, self.layout, self.adapted = arch, layout, frozenset(adapted)
        self._source, self._wanted = source, wanted
        if adapted:
            add_adapters(self.model, self.weights, arch, wanted)
        treat_parts([layer for chunk in chunks for layer in chunk.decoder.layers], wanted, recomputes=False)
        rotary = Glm4MoeRotaryEmbedding if arch.has_partial_rotary else LlamaRotaryEmbedding
        self.register_buffer("inv_freq", rotary(source).inv_freq, persistent=False)
        self._sequence_group: SequenceGroup | None = None
        if layout.cp.size > 1:
            kind = RingGroup if is_ring else SequenceGroup
            self._sequence_group = kind(group=layout.cp.group, rank=layout.cp.rank, size=layout.cp.size)
        self._shares = layout.cp.size * (layout.tp.size if self.settings.sequence_parallel else 1)

    @property
    def config(self) -> Any:
        """See `Scorer`."""
        return self._source

    @property
    def chunks(self) -> nn.ModuleList:
        """Virtual stages of this rank, `StageModel`s."""
        return self.model

    @property
    def experts(self) -> Experts | None:
        """See `Scorer`."""
        return self.arch.experts

    def cost(self) -> CostModel:
        """See `Scorer`."""
        return cost_model(
            self._source,
            shapes_of([entry for entry in self.weights.entries if ".decoder.layers." in entry.parameter]),
        )

    def named_weights(self) -> dict[str, Tensor]:
        """Parameters of this rank, and the biases of its routers, by megatron-core's names."""
        named: dict[str, Tensor] = dict(self.model.named_parameters())
        return named | {name: buffer for name, buffer in self.model.named_buffers() if name in self.weights.own}

    def padded(self, rows: PackedRows) -> PackedRows:
        """Rows padded to a number of tokens that the ranks that share them divide."""
        multiple = self._shares * (_FLOAT8_TOKENS if self.settings.fp8 else 1)
        group = self._sequence_group
        return group.deal(rows, multiple) if isinstance(group, RingGroup) else rows.padded(multiple)

    def num_tokens(self, rows: PackedRows) -> int:
        """Tokens that this rank's activations hold: its share under context and sequence parallelism."""
        return sum(rows.lengths) // self._shares

    def route(self, rows: PackedRows, load: ExpertLoad | None, *, is_counting: bool = False) -> Routing | None:
        """See `Scorer`."""
        if self.arch.experts is None:
            return None
        share, place = self.num_tokens(rows), self.layout.cp.rank
        if self.settings.sequence_parallel:
            place = place * self.layout.tp.size + self.layout.tp.rank
        return routing_of(rows, load, is_counting=is_counting, start=place * share, stop=(place + 1) * share)

    def hidden(self, chunk: int, rows: PackedRows, received: Tensor | None, routing: Routing | None = None) -> Tensor:
        """`[T, 1, H]` after one piece's layers (this rank's share of `T`, see `num_tokens`).

        Args:
            chunk: The piece.
            rows: The micro-batch.
            received: The result of the piece before; None in the first of all.
            routing: From `route`.
        """
        start, stop = (0, sum(rows.lengths)) if self._sequence_group is None else self._sequence_group.token_range(rows)
        model: Any = self.model[chunk]
        hidden = self._embed(model, rows.token_ids[start:stop]) if received is None else received
        arguments = self._attention_arguments(rows, start, stop)
        for layer in model.decoder.layers:
            hidden = self._recomputed(layer, hidden, routing, arguments)
        norm = model.decoder.final_layernorm
        return hidden if norm is None else norm(hidden)

    def _attention_arguments(self, rows: PackedRows, start: int, stop: int) -> dict[str, Any]:
        """Arguments of a layer's attention for the tokens from `start` to `stop`."""
        freqs = rows.position_ids[start:stop, None].to(torch.float32) * self.inv_freq
        rotary = torch.cat([freqs, freqs], dim=-1)[:, None, None]
        params = RowParams(rows=row_layout(rows.lengths, rows.token_ids.device, self._sequence_group), rotary=rotary)
        return {
            "attention_mask": None,
            "rotary_pos_emb": rotary if self.arch.latent is None else None,
            "packed_seq_params": params,
        }

    def _recomputed(self, layer: Any, hidden: Tensor, routing: Routing | None, arguments: dict[str, Any]) -> Tensor:
        """One layer, computed again in the backward pass where that is wanted."""
        if self._wanted.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(self._layer, layer, hidden, routing, arguments, use_reentrant=False)
        return self._layer(layer, hidden, routing, arguments)

    def _layer(self, layer: Any, hidden: Tensor, routing: Routing | None, arguments: dict[str, Any]) -> Tensor:
        """One layer; recomputed ones are given the routing of their own micro-batch again."""
        if routing is not None and (router := getattr(layer.mlp, "router", None)) is not None:
            router.router_replay.routing = routing
        with get_fp8_context(self.settings):
            return layer(hidden, **arguments)[0]

    def drop_routing(self) -> None:
        """Drop what layers with experts keep of the last micro-batch: its graph.

        The graph leads to hooks of Megatron's gradient buffers, and those to the model, past the garbage collector's
        sight: an engine that was closed would never be freed.
        """
        for module in (module for chunk in self.model for module in chunk.modules()):
            if (dispatcher := getattr(module, "token_dispatcher", None)) is not None:
                router: Any = module.router
                if router.router_replay is not None:  # a layer for multi-token prediction replays nothing
                    router.router_replay.routing = None
                for owner in (dispatcher, getattr(dispatcher, "_comm_manager", dispatcher)):
                    graphs = [
                        name for name, value in vars(owner).items() if getattr(value, "grad_fn", None) is not None
                    ]
                    for name in graphs:
                        setattr(owner, name, None)

    def embedding_of_the_last(self) -> Tensor | None:
        """(V / tp, H) embedding for `mtp_loss`, which the first stage sends the last; None between. Collective."""
        first: Any = self.model[0]
        if self.layout.pp.size == 1:
            return first.embedding.word_embeddings.weight.detach()
        if self.layout.embedding.size == 1:
            return None
        if self.layout.pp.rank == 0:
            weight = first.embedding.word_embeddings.weight.detach()
        else:
            weight = self.inv_freq.new_empty(
                self._vocab_rows(), self.arch.hidden_size, dtype=self.settings.params_dtype
            )
        return self.layout.embedding.broadcast(weight, 0)

    def mtp_loss(self, hidden: Tensor, rows: PackedRows, mask: Tensor | None, embedding: Tensor) -> Tensor:
        """This micro-batch's share of the loss of completion tokens predicted two tokens ahead (2412.19437, 2.2).

        Gradients are of the layer alone: it is given `hidden`, embedding and head detached. A row's first completion
        token is left out where its prompt has one token.

        Args:
            hidden: From the last piece of all.
            rows: The micro-batch.
            mask: (C,) which completion tokens count; None: all.
            embedding: From `embedding_of_the_last`.
        """
        last: Any = self.model[-1]
        mixed = last.ahead._concat_embeddings(hidden.detach(), self._look_up(embedding, rows.token_ids.roll(-1)))
        arguments = self._attention_arguments(rows, 0, sum(rows.lengths))
        states = last.ahead.final_layernorm(self._recomputed(last.ahead.transformer_layer, mixed, None, arguments))
        if self.settings.sequence_parallel:
            states = gather_from_sequence_parallel_region(states)
        is_counted = rows.position_ids[rows.score_index] > 0  # a token before the last one that is before it
        if mask is not None:
            is_counted = is_counted & mask.bool()
        states, weight = states[:, 0][(rows.score_index - 1).clamp(min=0)], self._head_weight().detach()
        if self.layout.tp.size == 1:
            found = linear_logprobs(states, weight, rows.labels, ignore_index=None)
        else:
            start, gather = self.layout.tp.rank * self._vocab_rows(), self.layout.tp.all_gather
            where: dict[str, Any] = {"vocab_start": start, "gather": gather, "ignore_index": None}
            found = parallel_logprobs(states @ weight.T, rows.labels, **where, inplace=True)
        return -(found.logprobs * is_counted).sum() / (rows.counts.tokens or 1.0)

    def _look_up(self, embedding: Tensor, token_ids: Tensor) -> Tensor:
        """`[T, 1, H]` without gradient, this rank's tokens of it under sequence parallelism."""
        local = token_ids - self.layout.tp.rank * len(embedding)
        is_mine = (local >= 0) & (local < len(embedding))
        found = embedding[local.clamp(0, len(embedding) - 1)].masked_fill(~is_mine[:, None], 0.0)
        whole = self.layout.tp.all_reduce(found)[:, None]
        return whole.chunk(self.layout.tp.size)[self.layout.tp.rank] if self.settings.sequence_parallel else whole

    def score(self, hidden: Tensor, rows: PackedRows, head_loss: HeadLoss | None = None) -> ModelOutput:
        """Log-prob and entropy, or the scalar head's value, of each completion token from the last `hidden`.

        The head makes `head_loss` itself where it can.
        """
        score = self._values if self.arch.has_scalar_head else self._logprobs
        if self._sequence_group is None:
            return score(hidden, rows, head_loss)
        return self._sequence_group.gather_scores(score(hidden, self._sequence_group.share(rows)), rows)

    def _values(self, hidden: Tensor, rows: PackedRows, head_loss: HeadLoss | None = None) -> ModelOutput:
        """Values of completion tokens. Every tensor-parallel rank computes all of them, so that gradients are whole."""
        if self.settings.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        last: Any = self.model[-1]
        return score_values(last.score(take_rows(hidden[:, 0], rows.score_index)), rows)

    def _logprobs(self, hidden: Tensor, rows: PackedRows, head_loss: HeadLoss | None = None) -> ModelOutput:
        """Log-probs of completion tokens.

        With tensor parallelism a rank makes the logits of its part of the vocabulary; five numbers per token are
        exchanged.
        """
        if self.settings.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        states = take_rows(hidden[:, 0], rows.score_index)
        weight = self._head_weight()
        if self.layout.tp.size == 1:
            return score_states(states, weight, None, rows, LinearHead(), self._wanted, head_loss)
        if not self.settings.sequence_parallel:
            states = copy_to_tensor_model_parallel_region(states)
        start, gather = self.layout.tp.rank * self._vocab_rows(), self.layout.tp.all_gather
        if head_loss is not None and rows.candidates is None and head_loss_obstacle(self._wanted) is None:
            return head_loss.score(states, weight, rows, self._wanted, vocab_start=start, gather=gather)
        logits = states @ weight.T
        shard = VocabShard(logits, self.layout.tp, start, self._wanted)
        others = shard.with_labels(rows) if rows.candidates is not None or self._wanted.num_candidates else None
        found = parallel_logprobs(
            logits,
            rows.labels,
            vocab_start=shard.start,
            gather=gather,
            temperature=self._wanted.temperature,
            ignore_index=None,
            inplace=others is None,
        )
        output = rows.output(
            token_logprobs=found.logprobs,
            entropy=found.entropy if self._wanted.entropy else None,
            sum_pi_squared=found.sum_pi_squared if self._wanted.sum_pi_squared else None,
        )
        return output if others is None else shard.add_candidates(output, others)

    def _vocab_rows(self) -> int:
        return padded_vocab(self.arch.vocab_size, self.layout.tp.size) // self.layout.tp.size

    def _head_weight(self) -> Tensor:
        """Head weight of this rank, without the rows that pad the vocabulary."""
        model: Any = self.model[-1]
        weight = model.shared_embedding_or_output_weight() if self.arch.is_tied else model.output_layer.weight
        assert weight is not None
        count = min(self._vocab_rows(), self.arch.vocab_size - self.layout.tp.rank * self._vocab_rows())
        return weight[:count]

    def _embed(self, model: Any, token_ids: Tensor) -> Tensor:
        """`[T, 1, H]`, this rank's tokens of it under sequence parallelism."""
        embedded = model.embedding.word_embeddings(token_ids[None])
        if model.embedding.reduce_scatter_embeddings:
            token_ids = token_ids.chunk(self.layout.tp.size)[self.layout.tp.rank]
        else:
            embedded = embedded.transpose(0, 1)
        if self.arch.pad_id is None:
            return embedded
        return torch.where((token_ids == self.arch.pad_id)[:, None, None], embedded.detach(), embedded)


class VocabShard:
    """Logits of this rank, `[C, V / tp]`, and candidates among them."""

    def __init__(self, logits: Tensor, tp: Axis, start: int, wanted: EngineConfig) -> None:
        """Keep the logits, whose column 0 is token `start`."""
        self._logits, self._tp, self.start, self._wanted = logits, tp, start, wanted

    def with_labels(self, rows: PackedRows) -> Tensor:
        """(C, 1 + K) float32 logits of each label and of the candidates that the batch names, with gradient."""
        asked = [rows.labels[:, None]] + ([] if rows.candidates is None else [rows.candidates])
        column = torch.cat(asked, 1) - self.start
        count = self._logits.shape[1]
        mine = self._logits.gather(1, column.clamp(0, count - 1))
        mine = torch.where((column >= 0) & (column < count), mine, 0).to(self._wide())
        whole = reduce_from_tensor_model_parallel_region(mine)
        assert isinstance(whole, Tensor)
        return whole / self._wanted.temperature

    def add_candidates(self, output: ModelOutput, logits: Tensor) -> ModelOutput:
        """`output` with what `with_labels` gave, as log-probs, and with the likeliest tokens where they are wanted."""
        lse = logits[:, :1] - output.logprobs[:, None]
        if logits.shape[1] > 1:
            output = replace(output, token_candidate_logprobs=logits[:, 1:] - lse)
        if not self._wanted.num_candidates:
            return output
        with torch.no_grad():
            values, token_ids = self._likeliest(self._wanted.num_candidates)
        return replace(output, top_token_ids=token_ids, top_logprobs=values - lse.detach())

    def _likeliest(self, count: int) -> tuple[Tensor, Tensor]:
        """(C, K) logits and token ids, over all ranks."""
        here = min(count, self._logits.shape[1])
        found = self._logits.detach().to(self._wide()).topk(here, -1)
        values = found.values.new_full((len(found.values), count), float("-inf"))
        token_ids = torch.zeros_like(values, dtype=torch.int64)
        values[:, :here], token_ids[:, :here] = found.values / self._wanted.temperature, found.indices + self.start
        values, token_ids = (self._tp.all_gather(part).transpose(0, 1).flatten(1) for part in (values, token_ids))
        best = values.topk(count, -1)
        return best.values, token_ids.gather(1, best.indices)

    def _wide(self) -> torch.dtype:
        return torch.promote_types(self._logits.dtype, torch.float32)
