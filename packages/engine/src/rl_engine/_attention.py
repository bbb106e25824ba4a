"""Causal attention over packed rows, each row blind to the others, as a Hugging Face attention function.

Rows of like length that lie side by side are attended together in a block of (rows, width); only inside that block is
anything padded, and only on the right, where causality hides it. On CUDA in half precision torch's variable-length
flash kernel takes the packed rows as they are.

Legend: `T` tokens, `B` rows of a block, `L` its width, `H` query heads, `K` key heads, `D` head size.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_engine._gather import spread_rows, take_rows, to_device
from rl_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_engine._ulysses import SequenceGroup

ATTENTION_NAME = "rl_engine_packed"
LAYOUT_KWARG = "rl_engine_rows"  # travels from the model's call down to the attention function
_EXPLICIT_WIDTH = 96  # at or below it, materialised scores beat SDPA's blocked kernel on a CPU
_SLACK = 1.34  # longest over shortest row of one block
_SMALL_BLOCK = 256  # tokens; a block below it grows whatever the lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlock:
    """Neighbouring rows of like length."""

    start: int
    """First token."""
    stop: int
    """Token after the last."""
    num_rows: int
    """B."""
    width: int
    """L, the longest row."""
    pad_index: Tensor | None
    """(B * L,) int64, the token (from `start`) in each slot, the row's first in the padding; None without padding."""
    unpad_index: Tensor | None
    """(stop - start,) int64, the slot of each token; None without padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Where the rows of one packed micro-batch lie; made once, used by every layer."""

    blocks: tuple[RowBlock, ...]
    """In token order."""
    cu_seqlens: Tensor
    """(rows + 1,) int32 row offsets into T."""
    max_length: int
    """Longest row."""
    sharers: SequenceGroup | None = None
    """The ranks among which the tokens are cut; None: all are here."""


def row_layout(lengths: Sequence[int], device: torch.device, sharers: SequenceGroup | None = None) -> RowLayout:
    """Lay out rows of the given lengths, end to end."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(lengths, dtype=torch.int64), 0, out=offsets[1:])
    starts = offsets.tolist()
    blocks = tuple(_block(lengths[first:last], starts[first], device) for first, last in _cut(lengths))
    return RowLayout(
        blocks=blocks,
        cu_seqlens=to_device(offsets.to(torch.int32), device),
        max_length=max(lengths),
        sharers=sharers,
    )


def register(*, is_compiled: bool = False) -> str:
    """Make `packed_attention` known to transformers and return its name. Idempotent.

    Args:
        is_compiled: For layers that are compiled; attention, whose blocks differ from batch to batch, is not.
    """
    from transformers import AttentionInterface

    name, attention = ATTENTION_NAME, packed_attention
    if is_compiled:
        name, attention = f"{name}_outside_graphs", torch.compiler.disable(packed_attention)
    AttentionInterface.register(name, attention)
    return name


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within each row; where tokens are cut over ranks, T is this rank's share of them.

    Args:
        module: The attention layer; not looked at.
        query: (1, H, T, D).
        key: (1, K, T, D); H is a multiple of K.
        value: (1, K, T, D).
        attention_mask: Must be None; the layout says everything.
        scaling: Of the scores; default D ** -0.5.
        dropout: Of the probabilities.
        sliding_window: Tokens each query sees, itself included.
        softcap: `c * tanh(score / c)`.
        s_aux: (H,) attention sinks.
        position_bias: Refused.
        **kwargs: Hold the `RowLayout` under `LAYOUT_KWARG`.

    Returns:
        (1, T, H, D), and None for the probabilities.
    """
    layout = kwargs.get(LAYOUT_KWARG)
    if not isinstance(layout, RowLayout) or position_bias is not None or attention_mask is not None:
        what = "adds a position bias or mask" if isinstance(layout, RowLayout) else "does not hand keyword arguments on"
        raise ConfigError(f"{type(module).__name__} {what}, so its rows cannot be packed.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    sharers = layout.sharers
    if sharers is None:
        return _attend(q, k, v, layout, _Options(scale, dropout, sliding_window, softcap, s_aux))[None], None
    sinks = None if s_aux is None else sharers.own_heads(s_aux)
    q, k, v = (sharers.to_heads(part) for part in (q, k, v))
    out = _attend(q, k, v, layout, _Options(scale, dropout, sliding_window, softcap, sinks))
    return sharers.to_tokens(out)[None], None


def _attend(q: Tensor, k: Tensor, v: Tensor, layout: RowLayout, options: _Options) -> Tensor:
    """(T, heads, D) in, (T, H, D) out."""
    if _fits_varlen(q, v, options):
        return _varlen(q, k, v, layout, options)
    parts = [_attend_block(q, k, v, block, options) for block in layout.blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, slots=True)
class _Options:
    scale: float
    dropout: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


def _cut(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of neighbouring rows that share a block."""
    ranges: list[tuple[int, int]] = []
    first, low, high, tokens = 0, lengths[0], lengths[0], 0
    for row, length in enumerate(lengths):
        new_low, new_high = min(low, length), max(high, length)
        if new_high > _SLACK * new_low and tokens >= _SMALL_BLOCK:
            ranges.append((first, row))
            first, tokens, new_low, new_high = row, 0, length, length
        low, high, tokens = new_low, new_high, tokens + length
    return [*ranges, (first, len(lengths))]


def _block(lengths: Sequence[int], start: int, device: torch.device) -> RowBlock:
    width, total = max(lengths), sum(lengths)
    pad_index = unpad_index = None
    if total != width * len(lengths):
        sizes = torch.tensor(lengths, dtype=torch.int64)
        starts = sizes.cumsum(0) - sizes
        column = torch.arange(width)
        inside = column < sizes[:, None]
        pad_index = to_device((starts[:, None] + torch.where(inside, column, 0)).flatten(), device)
        unpad_index = to_device(inside.flatten().nonzero()[:, 0], device)
    return RowBlock(
        start=start,
        stop=start + total,
        num_rows=len(lengths),
        width=width,
        pad_index=pad_index,
        unpad_index=unpad_index,
    )


def _attend_block(q: Tensor, k: Tensor, v: Tensor, block: RowBlock, options: _Options) -> Tensor:
    """(T, heads, D) in, (tokens of the block, H, D) out."""
    q, k, v = (_to_block(part[block.start : block.stop], block) for part in (q, k, v))
    plain = options.softcap is None and options.sinks is None
    windowed = options.window is not None and options.window < block.width
    if plain and not windowed and (block.width > _EXPLICIT_WIDTH or q.is_cuda):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=options.dropout, scale=options.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    else:
        out = _explicit(q, k, v, options)
    out = out.transpose(1, 2).flatten(0, 1)
    return out if block.unpad_index is None else take_rows(out, block.unpad_index)


def _to_block(part: Tensor, block: RowBlock) -> Tensor:
    """(tokens, heads, D) to (B, heads, L, D)."""
    if block.pad_index is not None and block.unpad_index is not None:
        part = spread_rows(part, block.pad_index, block.unpad_index)
    return part.unflatten(0, (block.num_rows, block.width)).transpose(1, 2)


def _explicit(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> Tensor:
    """(B, H, L, D) attention with its scores written out; heads of one key head are stacked as rows of one product."""
    num_rows, heads, width, size = q.shape
    groups = heads // k.shape[1]
    q = q.reshape(-1, groups * width, size)
    k, v = k.reshape(-1, width, size), v.reshape(-1, width, v.shape[-1])
    hidden = _hidden(width, options.window, q).repeat(groups, 1)
    if options.softcap is None:
        scores = torch.baddbmm(hidden, q, k.transpose(1, 2), alpha=options.scale)
    else:
        scores = torch.tanh(torch.bmm(q, k.transpose(1, 2)) * (options.scale / options.softcap)) * options.softcap
        scores = scores + hidden
    weights = _softmax(scores, options.sinks, num_rows, groups)
    if options.dropout:
        weights = torch.nn.functional.dropout(weights, options.dropout)
    return torch.bmm(weights, v).view(num_rows, heads, width, v.shape[-1])


def _hidden(width: int, window: int | None, like: Tensor) -> Tensor:
    """(L, L), 0 where a query sees a key and -inf elsewhere."""
    column = torch.arange(width, device=like.device)
    distance = column[:, None] - column
    unseen = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(width, width, dtype=like.dtype, device=like.device).masked_fill_(unseen, float("-inf"))


def _softmax(scores: Tensor, sinks: Tensor | None, num_rows: int, groups: int) -> Tensor:
    """Over keys; a sink takes its share of the probability and gives no value."""
    wide = torch.float32 if scores.dtype in (torch.bfloat16, torch.float16) else scores.dtype
    if sinks is None:
        return scores.softmax(-1, dtype=wide).to(scores.dtype)
    width = scores.shape[-1]
    column = sinks.view(-1, groups, 1).expand(-1, groups, width).reshape(-1, groups * width, 1).repeat(num_rows, 1, 1)
    return torch.cat([scores, column.to(scores.dtype)], -1).softmax(-1, dtype=wide)[..., :-1].to(scores.dtype)


def _fits_varlen(q: Tensor, v: Tensor, options: _Options) -> bool:
    half = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    plain = options.softcap is None and options.sinks is None and not options.dropout
    return half and plain and q.shape[-1] <= 256 and q.shape[-1] == v.shape[-1]


def _varlen(q: Tensor, k: Tensor, v: Tensor, layout: RowLayout, options: _Options) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    groups = q.shape[1] // k.shape[1]
    shared: dict[str, Any] = {}
    if groups > 1:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            shared = {"enable_gqa": True}
        else:  # an older torch wants a key head for every query head
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    rows, longest = layout.cu_seqlens, layout.max_length
    window = (-1 if options.window is None else options.window - 1, 0)
    out = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        rows,
        rows,
        longest,
        longest,
        scale=options.scale,
        window_size=window,
        **shared,
    )
    assert isinstance(out, Tensor)
    return out
