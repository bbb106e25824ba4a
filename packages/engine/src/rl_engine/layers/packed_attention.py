"""Causal attention over packed rows, each row blind to the others, as a Hugging Face attention function.

Rows of like length that lie side by side are attended together in a block of (rows, width); only inside that block is
anything padded, and only on the right, where causality hides it. On CUDA in half precision torch's variable-length
flash kernel takes the packed rows as they are. Where rows share their first tokens, the queries of those are
computed once, and what goes on from them looks at a copy of their keys and values.

Legend: `T` tokens, `B` rows of a block, `L` its width, `H` query heads, `K` key heads, `D` head size.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl_engine.batch.packed import spread_rows, take_rows, to_device
from rl_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_engine.batch.packed import PackedRows, PrefixSharing, Repeats
    from rl_engine.types import ModelOutput

ATTENTION_NAME = "rl_engine_packed"
LAYOUT_KWARG = "rl_engine_rows"  # travels from the model's call down to the attention function
_EXPLICIT_WIDTH = 96  # at or below it, materialised scores beat SDPA's blocked kernel on a CPU
_SLACK = 1.34  # longest over shortest row of one block
_MANY_KEYS = 2.0  # times the queries' size; larger copies of shared keys are made again in the backward pass, not kept
_SMALL_BLOCK = 256  # tokens; a block below it grows whatever the lengths
Masks = dict[tuple[Any, ...], Tensor]
"""Causal masks (H / K * queries, keys), by queries, keys and window of a block, H / K and dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Neighbouring runs of like length among packed tokens: the queries of a block, or its keys."""

    num_tokens: int
    """Tokens of all runs together."""
    width: int
    """L, the longest run."""
    pad_index: Tensor | None
    """(B * L,) int64, the token (from the first) in each slot, the run's first in the padding; None without padding."""
    unpad_index: Tensor | None
    """(num_tokens,) int64, the slot of each token; None without padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlock:
    """Neighbouring rows of like length, all of which go on from equally many tokens."""

    num_rows: int
    """B."""
    queries: Span
    """Span of the rows' own tokens."""
    keys: Span
    """Span of the keys: the shared tokens' and the rows' own; equals `queries` without shared tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Layout of the rows of one packed micro-batch; made once, used by every layer."""

    blocks: tuple[RowBlock, ...]
    """Blocks in token order."""
    cu_seqlens: Tensor
    """(rows + 1,) int32 row offsets into T."""
    max_length: int
    """Longest row."""
    cu_keys: Tensor
    """(rows + 1,) int32 row offsets into the keys."""
    max_keys: int
    """Most keys of a row."""
    keys: Repeats | None = None
    """Token index of each key, where rows share tokens; None: a row's keys are its tokens."""
    sequence_group: SequenceGroup | None = None
    """The ranks among which the tokens are cut; None: all are here."""
    masks: Masks = field(default_factory=Masks)
    """Masks of the blocks whose scores are written out; the first layer that needs one makes it."""


def row_layout(
    lengths: Sequence[int],
    device: torch.device,
    sequence_group: SequenceGroup | None = None,
    shared: PrefixSharing | None = None,
) -> RowLayout:
    """Lay out rows of the given lengths, end to end, or with `shared` the segments of rows that share tokens."""
    before: Sequence[int] = (0,) * len(lengths)
    if shared is not None:
        lengths, before = shared.lengths, shared.before
    seen = [own + more for own, more in zip(lengths, before, strict=True)]
    blocks: list[RowBlock] = []
    for first, last in _cut(lengths, before):
        queries = _span(lengths[first:last], device)
        keys = _span(seen[first:last], device) if before[first] else queries
        blocks.append(RowBlock(num_rows=last - first, queries=queries, keys=keys))
    cu_seqlens = _offsets(lengths, device)
    return RowLayout(
        blocks=tuple(blocks),
        cu_seqlens=cu_seqlens,
        max_length=max(lengths),
        cu_keys=cu_seqlens if shared is None else _offsets(seen, device),
        max_keys=max(seen),
        keys=None if shared is None else shared.keys,
        sequence_group=sequence_group,
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
        scaling: Factor of the scores; default D ** -0.5.
        dropout: Dropout of the probabilities.
        sliding_window: Tokens each query sees, itself included.
        softcap: `c * tanh(score / c)`.
        s_aux: (H,) attention sinks.
        position_bias: Refused.
        **kwargs: Hold the `RowLayout` under `LAYOUT_KWARG`.

    Returns:
        (1, T, H, D), contiguous, as some models view it anew; and None for the probabilities.
    """
    layout = kwargs.get(LAYOUT_KWARG)
    if not isinstance(layout, RowLayout) or position_bias is not None or attention_mask is not None:
        what = "adds a position bias or mask" if isinstance(layout, RowLayout) else "does not hand keyword arguments on"
        raise ConfigError(f"{type(module).__name__} {what}, so its rows cannot be packed.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    sequence_group = layout.sequence_group
    if sequence_group is None:
        options = Options(scale, dropout, sliding_window, softcap, s_aux, layout.masks)
        size = 0 if layout.keys is None else len(layout.keys.index) * k[0].numel()
        if size > _MANY_KEYS * q.numel() and torch.is_grad_enabled():
            again: Any = {"use_reentrant": False, "preserve_rng_state": False}
            return checkpoint(attend, q, k, v, layout, options, **again)[None].contiguous(), None
        return attend(q, k, v, layout, options)[None].contiguous(), None
    sinks = None if s_aux is None else sequence_group.own_heads(s_aux)
    q, k, v = (sequence_group.to_heads(part) for part in (q, k, v))
    out = attend(q, k, v, layout, Options(scale, dropout, sliding_window, softcap, sinks, layout.masks))
    return sequence_group.to_tokens(out)[None].contiguous(), None


def attend(q: Tensor, k: Tensor, v: Tensor, layout: RowLayout, options: Options) -> Tensor:
    """Attention of packed rows: (T, heads, D) in, (T, H, D) out."""
    if layout.keys is not None:
        k, v = take_rows(k, layout.keys), take_rows(v, layout.keys)
    if _fits_varlen(q, v, options):
        return varlen(q, k, v, layout, options)
    queries = q.split([block.queries.num_tokens for block in layout.blocks])
    sizes = [block.keys.num_tokens for block in layout.blocks]
    blocks = zip(queries, k.split(sizes), v.split(sizes), layout.blocks, strict=True)
    parts = [_attend_block(*given, options) for given in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one attention call."""

    scale: float
    dropout: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    masks: Masks = field(default_factory=Masks)
    """The layout's."""


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)


def _cut(lengths: Sequence[int], before: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of neighbouring rows that share a block."""
    ranges: list[tuple[int, int]] = []
    first, low, high, tokens = 0, lengths[0], lengths[0], 0
    for row, length in enumerate(lengths):
        new_low, new_high = min(low, length), max(high, length)
        is_unlike = new_high > _SLACK * new_low and tokens >= _SMALL_BLOCK
        if is_unlike or before[row] != before[first]:
            ranges.append((first, row))
            first, tokens, new_low, new_high = row, 0, length, length
        low, high, tokens = new_low, new_high, tokens + length
    return [*ranges, (first, len(lengths))]


def _span(lengths: Sequence[int], device: torch.device) -> Span:
    width, total = max(lengths), sum(lengths)
    pad_index = unpad_index = None
    if total != width * len(lengths):
        sizes = torch.tensor(lengths, dtype=torch.int64)
        starts = sizes.cumsum(0) - sizes
        column = torch.arange(width)
        inside = column < sizes[:, None]
        pad_index = to_device((starts[:, None] + torch.where(inside, column, 0)).flatten(), device)
        unpad_index = to_device(inside.flatten().nonzero()[:, 0], device)
    return Span(num_tokens=total, width=width, pad_index=pad_index, unpad_index=unpad_index)


def _attend_block(q: Tensor, k: Tensor, v: Tensor, block: RowBlock, options: Options) -> Tensor:
    """(tokens of the block, heads, D) in, (its queries, H, D) out."""
    q = to_block(q, block.queries, block.num_rows)
    k, v = (to_block(part, block.keys, block.num_rows) for part in (k, v))
    width, num_keys = block.queries.width, block.keys.width
    plain = options.softcap is None and options.sinks is None
    windowed = options.window is not None and options.window < num_keys
    if plain and not windowed and (num_keys > _EXPLICIT_WIDTH or q.is_cuda):
        is_square = width == num_keys  # torch's own triangle begins at the first key
        out = torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if is_square else _hidden(width, num_keys, None, q),
            is_causal=is_square,
            dropout_p=options.dropout,
            scale=options.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    else:
        out = _explicit(q, k, v, options)
    out = out.transpose(1, 2).flatten(0, 1)
    return out if block.queries.unpad_index is None else take_rows(out, block.queries.unpad_index)


def to_block(part: Tensor, span: Span, num_rows: int) -> Tensor:
    """(tokens, heads, D) to (B, heads, L, D)."""
    if span.pad_index is not None and span.unpad_index is not None:
        part = spread_rows(part, span.pad_index, span.unpad_index)
    return part.unflatten(0, (num_rows, span.width)).transpose(1, 2)


def _explicit(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    """Attention of (B, H, L, D) queries, scores written out; heads of one key head are stacked as rows of a product."""
    num_rows, heads, width, size = q.shape
    groups, num_keys = heads // k.shape[1], k.shape[2]
    q = q.reshape(-1, groups * width, size)
    k, v = k.reshape(-1, num_keys, size), v.reshape(-1, num_keys, v.shape[-1])
    kind = width, num_keys, options.window, groups, q.dtype
    hidden = options.masks.get(kind)
    if hidden is None:
        hidden = options.masks[kind] = _hidden(width, num_keys, options.window, q).repeat(groups, 1)
    if options.softcap is None:
        scores = torch.baddbmm(hidden, q, k.transpose(1, 2), alpha=options.scale)
    else:
        scores = torch.tanh(torch.bmm(q, k.transpose(1, 2)) * (options.scale / options.softcap)) * options.softcap
        scores = scores + hidden
    weights = _softmax(scores, options.sinks, num_rows, groups)
    if options.dropout:
        weights = torch.nn.functional.dropout(weights, options.dropout)
    return torch.bmm(weights, v).view(num_rows, heads, width, v.shape[-1])


def _hidden(width: int, num_keys: int, window: int | None, like: Tensor) -> Tensor:
    """(queries, keys), 0 where a query sees a key and -inf elsewhere; the last query is at the last key."""
    place = torch.arange(num_keys - width, num_keys, device=like.device)
    distance = place[:, None] - torch.arange(num_keys, device=like.device)
    unseen = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(width, num_keys, dtype=like.dtype, device=like.device).masked_fill_(unseen, float("-inf"))


def _softmax(scores: Tensor, sinks: Tensor | None, num_rows: int, groups: int) -> Tensor:
    """Over keys; a sink takes its share of the probability and gives no value."""
    wide = torch.float32 if scores.dtype in (torch.bfloat16, torch.float16) else scores.dtype
    if sinks is None:
        return scores.softmax(-1, dtype=wide).to(scores.dtype)
    width = scores.shape[1] // groups
    column = sinks.view(-1, groups, 1).expand(-1, groups, width).reshape(-1, groups * width, 1).repeat(num_rows, 1, 1)
    return torch.cat([scores, column.to(scores.dtype)], -1).softmax(-1, dtype=wide)[..., :-1].to(scores.dtype)


def _fits_varlen(q: Tensor, v: Tensor, options: Options) -> bool:
    half = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    plain = options.softcap is None and options.sinks is None and not options.dropout
    return half and plain and q.shape[-1] <= 256 and q.shape[-1] == v.shape[-1]


def varlen(q: Tensor, k: Tensor, v: Tensor, layout: RowLayout, options: Options) -> Tensor:
    """Flash attention over packed rows: (T, heads, D) in, (T, H, D) out."""
    from torch.nn.attention.varlen import varlen_attn

    groups = q.shape[1] // k.shape[1]
    shared: dict[str, Any] = {}
    if groups > 1:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            shared = {"enable_gqa": True}
        else:  # an older torch wants a key head for every query head
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    window = (-1 if options.window is None else options.window - 1, 0)
    out = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        layout.cu_seqlens,
        layout.cu_keys,
        layout.max_length,
        layout.max_keys,
        scale=options.scale,
        window_size=window,
        **shared,
    )
    assert isinstance(out, Tensor)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGroup:
    """The ranks that share the tokens of one micro-batch."""

    group: Any
    """torch.distributed process group."""
    rank: int
    """Rank in the group, from 0: the slice of tokens that it holds."""
    size: int
    """n."""

    def to_heads(self, part: Tensor) -> Tensor:
        """`[t, H, D]` of this rank's tokens to `[T, H / n, D]` of its heads."""
        traded = _AllToAll.apply(part.unflatten(1, (self.size, -1)).transpose(0, 1), self.group)
        return traded.flatten(0, 1)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]

    def to_tokens(self, part: Tensor) -> Tensor:
        """The reverse of `to_heads`."""
        traded = _AllToAll.apply(part.unflatten(0, (self.size, -1)), self.group)
        return traded.transpose(0, 1).flatten(1, 2)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]

    def own_heads(self, values: Tensor) -> Tensor:
        """Slice of this rank of `[H]` numbers, one per head."""
        return values.chunk(self.size)[self.rank]

    def token_range(self, rows: PackedRows) -> tuple[int, int]:
        """The first and one past the last of this rank's tokens."""
        share = sum(rows.lengths) // self.size
        return self.rank * share, (self.rank + 1) * share

    def share(self, rows: PackedRows) -> PackedRows:
        """`rows` with the completion tokens that this rank's tokens predict; `score_index` counts from its own."""
        mine, (start, _) = self._own_scores(rows), self.token_range(rows)
        return replace(
            rows,
            score_index=rows.score_index[mine] - start,
            labels=rows.labels[mine],
            candidates=None if rows.candidates is None else rows.candidates[mine],
        )

    def gather_scores(self, local: ModelOutput, rows: PackedRows) -> ModelOutput:
        """Scores of this rank's completion tokens to those of all; every rank takes its own gradient back."""
        ends = self._score_ends(rows)
        counts = [stop - start for start, stop in zip([0, *ends], ends, strict=False)]
        found = {field.name: getattr(local, field.name) for field in fields(local) if field.name != "cu_seqlens"}
        gathered = {
            name: _GatherScores.apply(column, counts, self.rank, self.group)
            for name, column in found.items()
            if isinstance(column, Tensor)
        }
        return replace(local, **gathered)

    def _own_scores(self, rows: PackedRows) -> slice | Tensor:
        """Which completion tokens this rank's tokens predict."""
        ends = [0, *self._score_ends(rows)]
        return slice(ends[self.rank], ends[self.rank + 1])

    def _score_ends(self, rows: PackedRows) -> list[int]:
        """Number of completion tokens predicted up to the end of each rank's slice, by a row's last tokens."""
        share = sum(rows.lengths) // self.size
        ends: list[int] = []
        for rank in range(self.size):
            stop, start, found = (rank + 1) * share, 0, 0
            for inputs, scored in zip(rows.lengths, rows.completions, strict=True):
                start += inputs
                found += min(max(0, stop - (start - scored)), scored)
            ends.append(found)
        return ends


def check_heads(sp: int, heads: int, key_heads: int) -> None:
    """Refuse a model whose heads cannot be dealt to `sp` ranks.

    Raises:
        ConfigError: says how many heads of which kind there are.
    """
    for count, what in ((heads, "query heads"), (key_heads, "key and value heads")):
        if count % sp:
            raise ConfigError(
                f"parallel.sp = {sp} does not divide the model's {count} {what}, which Ulysses deals to the ranks. "
                f"Use a divisor of {key_heads}."
            )


class _AllToAll(torch.autograd.Function):
    """`[n, ...]`: slice r goes to rank r, and what comes back in slice r is from it. Its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _trade(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _trade(grads[0], ctx.group), None


def _trade(parts: Tensor, group: Any) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _GatherScores(torch.autograd.Function):
    """Every rank computes the same loss from all scores, so the gradient of its own scores is complete."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, counts: list[int], rank: int, group: Any) -> Tensor:
        ctx.start, ctx.stop = sum(counts[:rank]), sum(counts[: rank + 1])
        missing = max(counts) - counts[rank]
        padded = torch.cat([local.detach(), local.new_zeros(missing, *local.shape[1:])])
        found = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(found, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(found, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0][ctx.start : ctx.stop], None, None, None
