"""Attention over packed rows and RMSNorm, in the places that megatron-core's layer specifications have for them.

Legend: `T` tokens fed, `H` hidden, `D` head size.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn

from rl_engine.batch.packed import take_rows, to_device
from rl_engine.layers.packed_attention import LAYOUT_KWARG, RowLayout, SequenceGroup, packed_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from rl_engine.batch.packed import PackedRows
    from rl_engine.types import ModelOutput


@dataclass
class RowParams(PackedSeqParams):
    """Packed-sequence parameters that megatron-core passes to attention, with our row layout."""

    rows: RowLayout | None = None
    """Layout of the rows."""
    rotary: Tensor | None = None
    """(T, 1, 1, D) angles of the tokens."""


class RmsNorm(nn.RMSNorm):
    """Zhang and Sennrich, 1910.07467, with the mark by which gradients are summed under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _mark(self.weight, config)


class LatentNorm(RmsNorm):
    """RMSNorm of a latent, whose epsilon transformers has fixed."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **_: Any) -> None:
        super().__init__(config, hidden_size, eps=1e-6)


class RowAttention(nn.Module):
    """Causal attention within each packed row; a query of layer i (from 1) sees `windows[i - 1]` tokens.

    With sinks each head has a score that is no token's (GPT-OSS, 2508.10925).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *_: Any,
        windows: Sequence[int | None],
        has_sinks: bool = False,
        softmax_scale: float | None = None,
        **__: Any,
    ) -> None:
        super().__init__()
        self._scale, self._window = softmax_scale, windows[layer_number - 1]
        self.sinks: nn.Parameter | None = None
        if has_sinks:
            own_heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.sinks = nn.Parameter(torch.empty(own_heads, dtype=config.params_dtype))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, packed_seq_params: RowParams, **_: Any
    ) -> Tensor:
        """(T, heads, D) or (T, 1, heads, D) in, (T, 1, heads * D) out."""
        q, k, v = (part.flatten(0, -3).transpose(0, 1)[None] for part in (query, key, value))
        rows: dict[str, Any] = {LAYOUT_KWARG: packed_seq_params.rows, "s_aux": self.sinks}
        out, _nothing = packed_attention(self, q, k, v, mask, scaling=self._scale, sliding_window=self._window, **rows)
        return out[0].flatten(1, 2)[:, None]


class FusedRowAttention(nn.Module):
    """`RowAttention` by Transformer Engine's kernels, without sinks; heads of keys may be wider than those of values.

    Where tokens are cut over ranks, heads are dealt to them (Ulysses), or keys and values go round (ring attention).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *args: Any,
        windows: Sequence[int | None],
        is_ring: bool,
        pg_collection: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        te_config, num_ranks = copy(config), pg_collection.cp.size()
        if is_ring:
            te_config.context_parallel_size = num_ranks
        else:
            te_config.num_attention_heads //= num_ranks
            te_config.num_query_groups //= num_ranks
        kwargs["pg_collection"] = pg_collection
        self._kernel: Any = transformer_engine.TEDotProductAttention(te_config, layer_number, *args, **kwargs)
        if (window := windows[layer_number - 1]) is not None:
            self._kernel.window_size = (window - 1, 0)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType,
        packed_seq_params: RowParams,
        **_: Any,
    ) -> Tensor:
        """See `RowAttention`."""
        rows = packed_seq_params.rows
        assert rows is not None
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=rows.cu_seqlens,
            cu_seqlens_kv=rows.cu_seqlens,
            cu_seqlens_q_padded=rows.cu_seqlens,
            cu_seqlens_kv_padded=rows.cu_seqlens,
            max_seqlen_q=rows.max_length,
            max_seqlen_kv=rows.max_length,
        )
        q, k, v = (part.flatten(0, -3) for part in (query, key, value))
        group = None if isinstance(rows.sequence_group, RingGroup) else rows.sequence_group
        if group is not None:
            q, k, v = (group.to_heads(part) for part in (q, k, v))
        out = self._kernel(q, k, v, mask, attn_mask_type, packed_seq_params=packed)
        if group is not None:
            out = group.to_tokens(out.unflatten(-1, (q.shape[1], -1)))
        return out.flatten(1)[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingGroup(SequenceGroup):
    """The ranks of ring attention (Liu et al., 2310.01889): each has two pieces of every row.

    Of 2 n pieces rank r has r and 2 n - 1 - r, so that causality leaves all of them equally many scores (2407.21783,
    section 3.3.2); that is the order in which Transformer Engine wants tokens.
    """

    def deal(self, rows: PackedRows, multiple: int) -> PackedRows:
        """Rows in that order, a rank's tokens side by side; padded at their ends, and to a multiple in all."""
        pieces = 2 * self.size
        padded = [-(-length // pieces) * pieces for length in rows.lengths]
        given = list(rows.lengths)
        if missing := -sum(padded) % math.lcm(multiple, pieces):
            padded, given = [*padded, missing], [*given, 0]
        lengths, kept = torch.tensor(padded), torch.tensor(given)
        row = torch.arange(len(lengths)).repeat_interleave(lengths)
        position = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
        piece = position // (lengths // pieces)[row]
        order = torch.minimum(piece, pieces - 1 - piece).argsort(stable=True)
        row, position = row[order], position[order]
        is_token = position < kept[row]
        source = torch.where(is_token, (kept.cumsum(0) - kept)[row] + position, 0)
        place = torch.empty(int(kept.sum()), dtype=torch.int64)
        place[source[is_token]] = is_token.nonzero()[:, 0]
        device = rows.token_ids.device
        source, is_token, place, position = (to_device(each, device) for each in (source, is_token, place, position))
        return replace(
            rows,
            token_ids=rows.token_ids[source].where(is_token, 0),
            position_ids=position,
            lengths=tuple(padded),
            completions=(*rows.completions, *[0] * (len(padded) - len(rows.lengths))),
            score_index=place[rows.score_index],
        )

    def gather_scores(self, local: ModelOutput, rows: PackedRows) -> ModelOutput:
        """See `SequenceGroup`."""
        found = SequenceGroup.gather_scores(self, local, rows)
        back = self._owners(rows).argsort(stable=True).argsort()
        columns = {field.name: getattr(found, field.name) for field in fields(found) if field.name != "cu_seqlens"}
        return replace(
            found, **{name: take_rows(column, back) for name, column in columns.items() if isinstance(column, Tensor)}
        )

    def _owners(self, rows: PackedRows) -> Tensor:
        """(C,) rank that has the token before each completion token."""
        return rows.score_index // (sum(rows.lengths) // self.size)

    def _own_scores(self, rows: PackedRows) -> Tensor:
        return (self._owners(rows) == self.rank).nonzero()[:, 0]

    def _score_ends(self, rows: PackedRows) -> list[int]:
        return torch.bincount(self._owners(rows), minlength=self.size).cumsum(0).tolist()


class LatentAttention(MLASelfAttention):
    """Multi-head latent attention (2405.04434) over packed rows.

    Down projections are whole on every rank, as with Transformer Engine: without it megatron-core cuts them, gathers
    the rotated part of keys, and loses the other ranks' share of its gradient.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.rotary_pos_emb: Any = _RowRotary()
        make = partial(_Whole, config)
        self.linear_kv_down_proj: Any = make(config.kv_lora_rank + config.qk_pos_emb_head_dim)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj: Any = make(config.q_lora_rank)


class _Whole(nn.Linear):
    """A linear layer that every tensor-parallel rank has whole, of its own tokens under sequence parallelism."""

    def __init__(self, config: TransformerConfig, size: int) -> None:
        super().__init__(config.hidden_size, size, bias=False, dtype=config.params_dtype)
        _mark(self.weight, config)

    def forward(self, input: Tensor) -> Any:  # noqa: A002 - torch's name
        return super().forward(input), None  # megatron-core's layers return their bias too


class _RowRotary(nn.Module):
    """Gives the angles that come with the rows, in the place of those of one row's positions."""

    def get_rotary_seq_len(self, *args: Any) -> Tensor:
        """What `forward` is called with: megatron-core asks for a number of positions, and only passes it on."""
        params: RowParams = args[-1]
        assert params.rotary is not None
        return params.rotary[:, 0]

    def forward(self, rotary: Tensor, *, packed_seq: bool) -> Tensor:
        return rotary


def _mark(weight: Any, config: TransformerConfig) -> None:
    """Let the gradient of a weight be summed over the ranks that have tokens of their own."""
    weight.sequence_parallel = config.sequence_parallel
