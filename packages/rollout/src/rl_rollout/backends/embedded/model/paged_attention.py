"""Paged attention over the KV cache, under transformers' attention interface.

The model always runs on packed tokens, shape [1, T]: no padding enters a linear layer. The engine passes a batch object
through the model as the keyword `rl_batch`; it knows which token belongs to which sequence, and the registered
attention function calls it. Shapes: T packed tokens, B sequences, H query heads, K key/value heads, D head size, L
positions, R rows and M columns of the block table.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rl_csrc import paged
from rl_rollout.backends.embedded.kv_cache import KVCache, LayerShape
from rl_rollout.errors import ModelFolderError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ATTENTION_NAME = "rl_rollout_paged"
"""Name under which transformers finds `attention_forward`."""

_HARMLESS = {"position_ids", "cache_position"}
"""Tensor arguments that models pass to their attention function and that paged attention can ignore."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSettings:
    """Attention settings of one layer."""

    scaling: float
    """Multiplies query-key products."""
    window: int | None = None
    """Sliding window: a token sees itself and the window - 1 tokens before it; None: all."""
    softcap: float | None = None
    """Scores are squashed to (-softcap, softcap) by tanh (Gemma 2)."""
    sinks: Tensor | None = None
    """Attention sinks [H]: scores of a virtual key whose value is zero (gpt-oss)."""


class Batch(Protocol):
    """Batch of packed tokens, which computes the attention of each layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings) -> Tensor:
        """Attention output [1, T, H, D] of query [1, H, T, D], key and value [1, K, T, D]."""
        ...


def register_attention() -> None:
    """Register `attention_forward` with transformers. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attention_forward)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    rl_batch: Batch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function of every layer of a served model; see transformers' AttentionInterface.

    Raises:
        ModelFolderError: the model does not pass `rl_batch` on, or passes a tensor that is not supported.
    """
    if rl_batch is None:
        raise ModelFolderError(f"{type(module).__name__} does not pass keyword arguments on to its attention function")
    for name, given in {"attention_mask": attention_mask, **kwargs}.items():
        if isinstance(given, Tensor) and name not in _HARMLESS:
            raise ModelFolderError(f"{type(module).__name__} asks for {name}, which the embedded backend does not have")
    settings = AttentionSettings(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return rl_batch.attend(module.layer_idx, query, key, value, settings), None  # pyright: ignore[reportArgumentType]


@dataclass(slots=True)
class ProbeBatch:
    """Batch that records each layer's cache shape and attention settings; run once when a model is loaded."""

    shapes: dict[int, LayerShape] = field(default_factory=dict[int, LayerShape])
    settings: dict[int, AttentionSettings] = field(default_factory=dict[int, AttentionSettings])
    states: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict[int, "tuple[Tensor, Tensor]"])
    """Convolution and recurrent state of one row in each gated delta net."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings) -> Tensor:
        """Record the layer; returns zeros of the right shape.

        Raises:
            ModelFolderError: the layer attends twice per pass; its second keys would overwrite the first ones.
        """
        if layer in self.settings:
            raise ModelFolderError(f"layer {layer} asks for attention twice, which the embedded backend does not serve")
        self.settings[layer] = settings
        self.shapes[layer] = LayerShape(num_heads=key.shape[1], key_dim=key.shape[-1], value_dim=value.shape[-1])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])


class PagedBatch:
    """Batch of new tokens over the paged cache: decode tokens first (one per row), then chunks of prompts.

    Args:
        cache: KV cache; the new tokens' keys and values are written to it.
        block_tables: [R, M] int64.
        rows: [T] int64, row of each token.
        positions: [T] int64, position of each token.
        num_single: Number of decode tokens, which are of different rows.
        num_blocks: Columns of the block table that decode tokens read.
        chunks: (row, position of the first token, number of tokens) of each chunk, in order.
        states: [R, ...] convolution and recurrent states of all rows, by gated delta net; updated in place.
    """

    def __init__(
        self,
        cache: KVCache,
        block_tables: Tensor,
        rows: Tensor,
        positions: Tensor,
        *,
        num_single: int,
        num_blocks: int,
        chunks: Sequence[tuple[int, int, int]] = (),
        states: Mapping[int, Sequence[Tensor]] | None = None,
    ) -> None:
        self.cache, self.states = cache, states or {}
        self.block_tables = block_tables
        self.rows = rows
        self.positions = positions
        self.num_single = num_single
        self.num_blocks = num_blocks
        self.chunks = chunks
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        self._gathered: _GatheredKeys | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings) -> Tensor:
        """Write keys and values to the cache, then attend causally within each row. See `Batch.attend`."""
        query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if paged.has_kernel(query) and not (query.is_cuda and self.chunks):
            places = (keys, values, self.block_tables, self.rows, self.positions)
            return paged.attention(query, key, value, *places, **_options(settings))[None]
        block = self.block_tables[self.rows, self.positions // self.cache.block_size]
        keys[block, self.positions % self.cache.block_size] = key
        values[block, self.positions % self.cache.block_size] = value
        return self.attend_to_cache(layer, query, settings)[None]

    def attend_to_cache(self, layer: int, query: Tensor, settings: AttentionSettings) -> Tensor:
        """Attention output [T, H, D] of queries [T, H, D] whose keys and values are in the cache already."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        single, parts = self.num_single, list[Tensor]()
        if single and paged.has_kernel(query):  # on a GPU it is made for decoding
            places = (keys, values, self.block_tables, self.rows[:single], self.positions[:single])
            parts.append(paged.attention(query[:single], None, None, *places, **_options(settings)))
        elif single:
            parts.append(self._attend_singly(query[:single], keys, values, settings))
        if self.chunks and _fits_varlen(query, values, settings):
            parts.append(self._attend_together(query[single:], keys, values, settings))
        elif self.chunks:
            parts += self._attend_by_chunk(query[single:], keys, values, settings)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_singly(self, query: Tensor, keys: Tensor, values: Tensor, settings: AttentionSettings) -> Tensor:
        """Decode tokens without a kernel: torch's attention over gathered blocks."""
        count, num_kv = len(query), keys.shape[2]
        tables = self.block_tables[self.rows[:count], : self.num_blocks]
        # Queries that share a key head take the axis of query positions: [B, K, H / K, D].
        grouped = query.unflatten(1, (num_kv, -1))
        sinks = None if settings.sinks is None else settings.sinks.view(1, num_kv, -1, 1)
        length = tables.shape[1] * self.cache.block_size
        mask = self._mask(0, self.positions[:count], length, settings.window, query.dtype)
        its_keys, its_values = (part[tables].flatten(1, 2).transpose(1, 2) for part in (keys, values))
        return _attend(grouped, its_keys, its_values, mask[:, None, None], settings, sinks).flatten(1, 2)

    def _attend_by_chunk(
        self, query: Tensor, keys: Tensor, values: Tensor, settings: AttentionSettings
    ) -> list[Tensor]:
        """Chunks without a kernel: torch's attention, one chunk after the other."""
        size, at, parts = self.cache.block_size, 0, list[Tensor]()
        sinks = None if settings.sinks is None else settings.sinks.view(-1, 1, 1)
        num_groups = query.shape[1] // keys.shape[2]
        for index, (row, start, count) in enumerate(self.chunks, start=1):
            table, its = self.block_tables[row, : -(-(start + count) // size)], slice(at, at + count)
            its_keys, its_values = (
                part[table].flatten(0, 1).transpose(0, 1).repeat_interleave(num_groups, dim=0)
                for part in (keys, values)
            )
            positions = self.positions[self.num_single :][its]
            mask = self._mask(index, positions, its_keys.shape[1], settings.window, query.dtype)
            out = _attend(query[its].transpose(0, 1), its_keys, its_values, mask, settings, sinks)
            parts.append(out.transpose(0, 1))
            at += count
        return parts

    def _attend_together(self, query: Tensor, keys: Tensor, values: Tensor, settings: AttentionSettings) -> Tensor:
        """All chunks in one call of torch's flash attention for variable lengths, over gathered keys and values."""
        if self._gathered is None:  # the same in every layer
            self._gathered = _GatheredKeys.of(self.chunks, self.block_tables, self.cache.block_size)
        found = self._gathered
        its_keys, its_values = (part.flatten(0, 1).index_select(0, found.slots) for part in (keys, values))
        options: dict[str, Any] = {"scale": settings.scaling}
        if query.shape[1] != keys.shape[2]:
            if _takes_groups():
                options["enable_gqa"] = True
            else:  # torch 2.11 wants a key head for every query head
                num_groups = query.shape[1] // keys.shape[2]
                its_keys, its_values = (x.repeat_interleave(num_groups, dim=1) for x in (its_keys, its_values))
        window = (-1 if settings.window is None else settings.window - 1, 0)
        return varlen_attn(
            *(query.contiguous(), its_keys, its_values, found.query_starts, found.key_starts),
            *(found.most_queries, found.most_keys),
            window_size=window,
            **options,
        )

    def _mask(self, part: int, positions: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [B, L] of tokens at `positions`: 0 or minus infinity. Computed once for all layers."""
        if (part, window) not in self._masks:
            column, position = torch.arange(length, device=positions.device), positions[:, None]
            is_hidden = column > position
            if window is not None:
                is_hidden |= column <= position - window
            mask = torch.zeros(is_hidden.shape, dtype=dtype, device=positions.device)
            self._masks[part, window] = mask.masked_fill_(is_hidden, float("-inf"))
        return self._masks[part, window]


@dataclass(frozen=True, slots=True, kw_only=True)
class _GatheredKeys:
    """Cache slots of the keys of all chunks, and the chunks' boundaries among queries and gathered keys."""

    slots: Tensor
    """[sum of keys] int64: block times block size, plus the offset in the block."""
    query_starts: Tensor
    """[chunks + 1] int32"""
    key_starts: Tensor
    """[chunks + 1] int32"""
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, chunks: Sequence[tuple[int, int, int]], tables: Tensor, size: int) -> _GatheredKeys:
        counts, lengths = [count for *_, count in chunks], [start + count for _, start, count in chunks]
        rows = np.repeat([row for row, *_ in chunks], lengths)
        positions = np.concatenate([np.arange(length) for length in lengths])
        # One transfer to the device each.
        rows, columns, offsets = torch.from_numpy(np.stack([rows, positions // size, positions % size])).to(
            tables.device
        )
        starts = torch.tensor([[0, *accumulate(counts)], [0, *accumulate(lengths)]], dtype=torch.int32)
        query_starts, key_starts = starts.to(tables.device)
        return cls(
            slots=tables[rows, columns] * size + offsets,
            query_starts=query_starts,
            key_starts=key_starts,
            most_queries=max(counts),
            most_keys=max(lengths),
        )


def varlen_attn(*arguments: Any, **options: Any) -> Tensor:
    """Torch's flash attention for variable lengths; imported at the first call, which takes seconds."""
    from torch.nn.attention import varlen

    return varlen.varlen_attn(*arguments, **options)  # pyright: ignore[reportReturnType] - no lse is asked for


@cache
def _varlen_options() -> frozenset[str]:
    """Names of the parameters of this torch's `varlen_attn`; none where torch has no such function."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen.varlen_attn).parameters)


def _takes_groups() -> bool:
    return "enable_gqa" in _varlen_options()


def _fits_varlen(query: Tensor, values: Tensor, settings: AttentionSettings) -> bool:
    """Whether torch's flash attention computes this: on a GPU, in half precision, without softcap and sinks."""
    is_half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    is_plain = settings.softcap is None and settings.sinks is None
    has_options = is_half and is_plain and {"scale", "window_size"} <= _varlen_options()
    return has_options and query.shape[-1] == values.shape[-1] <= 256


def _options(settings: AttentionSettings) -> dict[str, Any]:
    return {
        "scaling": settings.scaling,
        "window": settings.window,
        "softcap": settings.softcap,
        "sinks": settings.sinks,
    }


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, settings: AttentionSettings, sinks: Tensor | None
) -> Tensor:
    """Softmax attention over the last two dimensions, with an additive mask."""
    if settings.softcap is None and sinks is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=settings.scaling)
    scores = query @ key.transpose(-1, -2) * settings.scaling
    if settings.softcap is not None:
        scores = torch.tanh(scores / settings.softcap) * settings.softcap
    scores = scores + mask
    if sinks is None:
        return scores.softmax(dim=-1) @ value
    with_sink = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    return with_sink.softmax(dim=-1)[..., :-1] @ value
