"""Paged attention over the KV cache, under transformers' attention interface.

The model is always run on packed tokens, shape [1, T]: no padding enters a linear layer. Which token belongs to which
sequence is known to the batch object that the engine passes through the model as the keyword `rl_batch`; the
registered function hands over to it. Letters: T packed tokens, B sequences, H query heads, K key/value heads, D head
size, L positions, R rows and M columns of the block table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rl_csrc import paged
from rl_rollout.backends.embedded.kv_cache import KVCache, LayerShape
from rl_rollout.errors import ModelFolderError

if TYPE_CHECKING:
    from collections.abc import Sequence

ATTENTION_NAME = "rl_rollout_paged"
"""Name under which transformers finds `attention_forward`."""

_HARMLESS = {"position_ids", "cache_position"}
"""Tensors that models pass on to attention and that it has no use for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSettings:
    """Attention settings of one layer."""

    scaling: float
    """Multiplies query-key products."""
    window: int | None = None
    """A token sees itself and the window - 1 before it; None sees all."""
    softcap: float | None = None
    """Scores are squashed to (-softcap, softcap) by tanh (Gemma 2)."""
    sinks: Tensor | None = None
    """[H] scores of a virtual key whose value is zero (gpt-oss)."""


class Batch(Protocol):
    """Which packed token belongs where."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings) -> Tensor:
        """Query [1, H, T, D], key and value [1, K, T, D] to [1, T, H, D]."""
        ...


def register_attention() -> None:
    """Make `attention_forward` known to transformers. Idempotent."""
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
    """Attention function of every layer of a served model. See transformers' AttentionInterface."""
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
    """Writes down what each layer keeps and asks for, and attends to nothing. Run once when a model is loaded."""

    shapes: dict[int, LayerShape] = field(default_factory=dict[int, LayerShape])
    settings: dict[int, AttentionSettings] = field(default_factory=dict[int, AttentionSettings])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings) -> Tensor:
        """Record; return zeros of the right shape.

        Raises:
            ModelFolderError: the layer has asked before; its keys would be written over those of the first time.
        """
        if layer in self.settings:
            raise ModelFolderError(f"layer {layer} asks for attention twice, which the embedded backend does not serve")
        self.settings[layer] = settings
        self.shapes[layer] = LayerShape(num_heads=key.shape[1], key_dim=key.shape[-1], value_dim=value.shape[-1])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])


class PagedBatch:
    """New tokens of any rows over the paged cache: first one token each of some rows, then chunks.

    Args:
        cache: Keys and values; the new tokens' are written to it.
        block_tables: [R, M] int64.
        rows: [T] int64, row of each token.
        positions: [T] int64, position of each token.
        num_single: The first so many tokens are of different rows.
        num_blocks: Columns of the block table that those may look at.
        chunks: Of the other tokens, in order: row, position of the first, count.
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
    ) -> None:
        self.cache = cache
        self.block_tables = block_tables
        self.rows = rows
        self.positions = positions
        self.num_single = num_single
        self.num_blocks = num_blocks
        self.chunks = chunks
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings) -> Tensor:
        """Write keys and values, then let each token look at its row up to itself."""
        query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if not paged.has_kernel(query) or (query.is_cuda and self.chunks):  # the GPU's kernel is made for decoding
            return self._attend_with_torch(query, key, value, keys, values, settings)[None]
        out = paged.attention(
            query,
            key,
            value,
            keys,
            values,
            self.block_tables,
            self.rows,
            self.positions,
            scaling=settings.scaling,
            window=settings.window,
            softcap=settings.softcap,
            sinks=settings.sinks,
        )
        return out[None]

    def _attend_with_torch(
        self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, settings: AttentionSettings
    ) -> Tensor:
        """The same without a kernel: gathered blocks under torch's attention, [T, H, D] to [T, H, D]."""
        size, single = self.cache.block_size, self.num_single
        block = self.block_tables[self.rows, self.positions // size]
        keys[block, self.positions % size] = key
        values[block, self.positions % size] = value
        parts: list[Tensor] = []
        if single:
            tables = self.block_tables[self.rows[:single], : self.num_blocks]
            # The queries that share a key head take the place of query positions: [B, K, H / K, D].
            grouped = query[:single].unflatten(1, (key.shape[1], -1))
            sinks = None if settings.sinks is None else settings.sinks.view(1, key.shape[1], -1, 1)
            mask = self._mask(0, self.positions[:single], tables.shape[1] * size, settings.window, query.dtype)
            its_keys, its_values = (part[tables].flatten(1, 2).transpose(1, 2) for part in (keys, values))
            out = _attend(grouped, its_keys, its_values, mask[:, None, None], settings, sinks)
            parts.append(out.flatten(1, 2))
        sinks = None if settings.sinks is None else settings.sinks.view(-1, 1, 1)
        at, num_groups = single, query.shape[1] // key.shape[1]
        for index, (row, start, count) in enumerate(self.chunks, start=1):
            table, its = self.block_tables[row, : -(-(start + count) // size)], slice(at, at + count)
            its_keys, its_values = (
                part[table].flatten(0, 1).transpose(0, 1).repeat_interleave(num_groups, dim=0)
                for part in (keys, values)
            )
            mask = self._mask(index, self.positions[its], its_keys.shape[1], settings.window, query.dtype)
            out = _attend(query[its].transpose(0, 1), its_keys, its_values, mask, settings, sinks)
            parts.append(out.transpose(0, 1))
            at += count
        return torch.cat(parts)

    def _mask(self, part: int, positions: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """[B, L] added to the scores of tokens at `positions`: 0 or minus infinity. The same in every layer."""
        if (part, window) not in self._masks:
            column, position = torch.arange(length, device=positions.device), positions[:, None]
            is_hidden = column > position
            if window is not None:
                is_hidden |= column <= position - window
            mask = torch.zeros(is_hidden.shape, dtype=dtype, device=positions.device)
            self._masks[part, window] = mask.masked_fill_(is_hidden, float("-inf"))
        return self._masks[part, window]


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
