"""The `torchtitan` backend: torchtitan's decoders and their own sharding, fed packed rows like the other backends.

The decoder is made from a Hugging Face config; every rank reads its shards of the folder. Projections are not fused and
rotary embeddings keep halves apart, so that every parameter is a tensor of the folder under another name, whatever it
is sharded over. Steps, weights and checkpoints are those of `ModuleEngine`.

Legend: `T` tokens fed, `C` completion tokens, `D` head size, `H` hidden.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rl_engine.backends.fsdp import check_replicas, hand_out, load_on_rank_0, open_slices, sum_gradients
from rl_engine.batch.micro_batches import cost_model
from rl_engine.batch.packed import take_rows
from rl_engine.checkpoint import hf_folder
from rl_engine.checkpoint.hf_folder import DTYPES, SCORE
from rl_engine.checkpoint.slices import find_pieces, open_folder, read_shards, shapes_of
from rl_engine.errors import ConfigError
from rl_engine.layers.logprobs import LinearHead, score_states, score_values
from rl_engine.layers.moe import check_aux
from rl_engine.layers.packed_attention import LAYOUT_KWARG, RowLayout, packed_attention, row_layout
from rl_engine.model.hf import check_mapped
from rl_engine.model.module_engine import ModuleBackend, ModuleEngine
from rl_engine.model.scorer import Scorer
from rl_engine.model.settings import check_candidates, check_float8, refuse_fsdp_only, refuse_parts, shares_prefixes
from rl_engine.types import EngineConfig, Head, ParallelConfig, Precision

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchtitan compiles flex_attention at import, which loads what torch deprecates
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
    from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
    from torchtitan.protocols.module import Module

if TYPE_CHECKING:
    from torchtitan.models.common.decoder import Decoder

    from rl_engine.base import Engine
    from rl_engine.batch.micro_batches import CostModel
    from rl_engine.batch.packed import PackedRows
    from rl_engine.distributed.world import World
    from rl_engine.layers.logprobs import HeadLoss
    from rl_engine.types import ModelOutput

_HEAD = "lm_head.weight"
_FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "llama": (Llama3Model, Llama3TransformerBlock, Llama3StateDictAdapter),
    "qwen3": (Qwen3Model, Qwen3TransformerBlock, Qwen3StateDictAdapter),
}


class RowAttention(Module):
    """Causal attention within each packed row, in the place of torchtitan's kernels, which need CUDA or a compiler."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Configuration: nothing to set."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: RowLayout, scale: float | None, **_: Any
    ) -> Tensor:
        """(1, T, heads, D) in and out."""
        rows: dict[str, Any] = {LAYOUT_KWARG: attention_masks}
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return packed_attention(self, q, k, v, None, scaling=scale, **rows)[0]


class TableRope(CosSinRoPE):
    """Rotary embeddings of the frequencies that transformers makes from the folder's config."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """As torchtitan's."""

        inv_freq: tuple[float, ...] = ()
        """(D / 2,)."""

    def _precompute_cache(self) -> Tensor:
        config: Any = self.config
        angles = torch.outer(torch.arange(config.max_seq_len).float(), torch.tensor(config.inv_freq))
        return torch.cat([part for wave in (angles.cos(), angles.sin()) for part in (wave, wave)], dim=-1)


class ScoringHead(Linear):
    """The decoder's last layer, which gives scores: in the decoder's forward pass, so that FSDP knows when it is done.

    Called on its own it would leave the gathered weights of its group in the place of the sharded ones.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """As torchtitan's."""

        wanted: EngineConfig | None = None
        """Settings of a language-model head; None for a scalar one."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._wanted = config.wanted
        self.rows: PackedRows | None = None
        """Rows of the next forward pass."""
        self.head_loss: HeadLoss | None = None
        """Loss that the next forward pass makes."""

    def forward(self, states: Tensor) -> ModelOutput:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Scores of the rows' completion tokens from `[1, T, H]` states."""
        rows, head_loss = self.rows, self.head_loss
        self.rows = self.head_loss = None
        assert rows is not None
        states = take_rows(states[0], rows.scored)
        if self._wanted is None:
            return score_values(super().forward(states), rows)
        return score_states(states, self.weight, None, rows, LinearHead(), self._wanted, head_loss)


class TorchtitanScorer(Scorer):
    """Scores packed rows with torchtitan's decoder."""

    model: Decoder

    def __init__(self, source: Any, wanted: EngineConfig | None) -> None:
        """Build the decoder without memory for its weights.

        Args:
            source: A transformers config that `check_mapped` took.
            wanted: Outputs of a language-model head; None for a scalar one.
        """
        decoder, block, adapter = _FAMILIES[source.model_type]
        config = _decoder_config(decoder, block, source, wanted)
        with torch.device("meta"):
            super().__init__(config.build())
        self.model.tok_embeddings.padding_idx = source.pad_token_id  # not trained there, as in transformers
        self._source = source
        self._names = _folder_names(adapter(config, None).from_hf_map, is_scalar=wanted is None)

    @property
    def config(self) -> Any:
        """See `Scorer`."""
        return self._source

    def forward(self, rows: PackedRows, head_loss: HeadLoss | None = None) -> ModelOutput:
        """See `Scorer`."""
        layout: Any = row_layout(rows.lengths, rows.token_ids.device, shared=rows.shared)
        self.model.lm_head.rows, self.model.lm_head.head_loss = rows, head_loss
        return self.model(rows.token_ids[None], positions=rows.position_ids[None], attention_masks=layout)

    def tie(self) -> None:
        """Let embedding and head be one weight again, after the move off the meta device parted them."""
        if self.model.enable_weight_tying:
            self.model.tok_embeddings.weight = self.model.lm_head.weight

    def layers(self) -> list[torch.nn.Module]:
        """See `Scorer`."""
        return list(self.model.layers.children())

    def cost(self) -> CostModel:
        """See `Scorer`."""
        named = self.model.layers.named_parameters()
        return cost_model(self._source, {name: tuple(weight.shape) for name, weight in named})

    def named_weights(self) -> dict[str, Tensor]:
        """See `Scorer`; under the names of the Hugging Face folder."""
        named: dict[str, Tensor] = {}
        for name, weight in self.model.named_parameters():
            plain = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
            named[self._folder_name(plain)] = weight
        return named

    def _folder_name(self, name: str) -> str:
        owner, _, rest = name.partition(".")
        index, _, tail = rest.partition(".")
        if owner == "layers":
            return self._names[f"layers.{{}}.{tail}"].format(index)
        return self._names[name]


def _decoder_config(decoder: Any, block: Any, source: Any, wanted: EngineConfig | None) -> Any:
    hidden, vocab = source.hidden_size, source.vocab_size
    head_dim = getattr(source, "head_dim", None) or hidden // source.num_attention_heads
    inv_freq = LlamaRotaryEmbedding(source).inv_freq
    assert isinstance(inv_freq, Tensor)

    def norm(size: int) -> Any:
        return RMSNorm.Config(normalized_shape=size, eps=source.rms_norm_eps)

    layer = {
        "attention_norm": norm(hidden),
        "ffn_norm": norm(hidden),
        "attention": make_gqa_config(
            dim=hidden,
            n_heads=source.num_attention_heads,
            n_kv_heads=source.num_key_value_heads,
            head_dim=head_dim,
            wqkv_param_init={},
            wo_param_init={},
            inner_attention=RowAttention.Config(),
            qk_norm=norm(head_dim) if source.model_type == "qwen3" else None,
            rope=TableRope.Config(
                dim=head_dim, max_seq_len=source.max_position_embeddings, inv_freq=tuple(inv_freq.tolist())
            ),
        ),
        "feed_forward": make_ffn_config(
            dim=hidden, hidden_dim=source.intermediate_size, w1_param_init={}, w2w3_param_init={}
        ),
    }
    return decoder.Config(
        dim=hidden,
        vocab_size=vocab,
        norm=norm(hidden),
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=hidden),
        lm_head=ScoringHead.Config(in_features=hidden, out_features=1 if wanted is None else vocab, wanted=wanted),
        enable_weight_tying=wanted is not None and bool(source.tie_word_embeddings),
        layers=[block.Config(**layer) for _ in range(source.num_hidden_layers)],
    )


def _folder_names(adapter_map: dict[str, str | None], *, is_scalar: bool) -> dict[str, str]:
    """Torchtitan's names to those of the folder, by torchtitan's own table; a tied weight is the embedding."""
    names = {own: theirs for theirs, own in adapter_map.items() if own is not None}
    return names | {_HEAD: SCORE} if is_scalar else names


def create(config: EngineConfig) -> Engine:
    """The registry's entry."""
    return ModuleEngine(TorchtitanBackend(config))


class TorchtitanBackend(ModuleBackend):
    """See `ModuleBackend`: sharded data parallelism, with `parallel.dp_replicate` copies."""

    def check(self, world_size: int) -> str | None:
        """See `ModuleBackend`."""
        config = self.config
        check_aux(config.router_aux_loss_coef, None)
        if replace(config.parallel, dp_replicate=1) != ParallelConfig():
            raise ConfigError(
                f"parallel is {config.parallel}; the torchtitan backend takes dp_replicate only. "
                "Use fsdp for sp, and megatron for the others."
            )
        check_replicas(config.parallel, world_size)
        if config.lora is not None:
            raise ConfigError("The torchtitan backend has no LoRA adapters; leave lora out, or use the fsdp backend.")
        refuse_fsdp_only(config, "torchtitan")
        refuse_parts(config, "torchtitan")
        check_float8(config, "torchtitan", ())
        source = hf_folder.read_config(Path(config.model_path)).get_text_config()
        check_mapped(source, "torchtitan", tuple(_FAMILIES))
        check_candidates(config.num_candidates, source.vocab_size)

    @property
    def needs_group(self) -> bool:
        """See `ModuleBackend`."""
        return True

    def build(self, world: World) -> tuple[TorchtitanScorer, None]:
        """See `ModuleBackend`."""
        config = self.config
        source = hf_folder.read_config(Path(config.model_path)).get_text_config()
        scorer = TorchtitanScorer(source, config if config.head == Head.LM else None)
        pieces = find_pieces(scorer.named_weights(), dict)
        is_tied = config.head == Head.LM and bool(source.tie_word_embeddings)
        is_sliced = open_slices(config, pieces, is_tied=is_tied, world=world)
        loaded = None if is_sliced else load_on_rank_0(config, world)
        scorer.to(hf_folder.parameter_dtype(config))
        _parallelize(scorer, config, world)
        scorer.to_empty(device=world.device)
        scorer.tie()
        for module in scorer.modules():
            if isinstance(module, Module):
                module._init_self_buffers(buffer_device=world.device)  # pyright: ignore[reportPrivateUsage]
        if loaded is None:
            assert pieces is not None
            with open_folder(config, shapes_of(pieces), is_tied=is_tied) as read:
                read_shards(scorer.named_weights(), pieces, read)
        else:
            hand_out(scorer.named_weights(), dict(loaded.named_parameters()) if world.rank == 0 else {}, world)
        scorer.requires_grad_(config.optimizer is not None)
        scorer.shares_prefixes = shares_prefixes(config, None)
        return scorer.train(config.optimizer is not None), None


def _parallelize(scorer: TorchtitanScorer, config: EngineConfig, world: World) -> None:
    """Shard and recompute as torchtitan's parallelize functions of dense models do, in any number format."""
    replicas = config.parallel.dp_replicate
    sizes, names = ((world.size,), ("fsdp",))
    if replicas > 1:
        sizes, names = (replicas, world.size // replicas), ("dp_replicate", "fsdp")
    if config.activation_checkpointing:
        FullAC.Config().build(dump_folder="").apply(scorer.model)
    apply_fsdp_to_decoder(
        scorer.model,
        init_device_mesh(world.device.type, sizes, mesh_dim_names=names),
        param_dtype=DTYPES[config.precision],
        reduce_dtype=torch.float64 if config.precision == Precision.FLOAT64 else torch.float32,
        pp_enabled=False,
    )
    sum_gradients(scorer)
