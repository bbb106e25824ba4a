"""Attention over the engine's own cache, under transformers' attention interface.

The model is always run on packed tokens, shape [1, T]: no padding enters a linear layer. Which token belongs to which
sequence is known to the batch object that the engine passes through the model as the keyword `rl_batch`; the
registered function hands over to it. Letters: T packed tokens, B sequences, H query heads, K key/value heads, D head
size, L positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rl_rollout.backends.embedded.cache import KVCache, LayerShape
from rl_rollout.errors import ModelFolderError

ATTENTION_NAME = "rl_rollout_slots"
"""Name under which transformers finds `attention_forward`."""

_UNSUPPORTED = ("position_bias", "head_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSettings:
    """What a layer asks of attention."""

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
    """What every attention layer of a served model calls. See transformers' AttentionInterface."""
    if rl_batch is None:
        raise ModelFolderError(f"{type(module).__name__} does not pass keyword arguments on to its attention function")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
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
    """Writes down what each layer keeps, and attends to nothing. Run once when a model is loaded."""

    shapes: dict[int, LayerShape] = field(default_factory=dict[int, LayerShape])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings) -> Tensor:
        """Record the shapes; return zeros of the right shape."""
        self.shapes[layer] = LayerShape(num_heads=key.shape[1], key_dim=key.shape[-1], value_dim=value.shape[-1])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])


class DecodeBatch:
    """One new token for each of the first B rows of the cache.

    Args:
        cache: Keys and values; the new token's are written to it.
        positions: int64, position of each row's token.
        length: One more than the largest position.
    """

    def __init__(self, cache: KVCache, positions: Tensor, length: int) -> None:
        self.cache = cache
        self.positions = positions
        self.length = length
        self.rows = torch.arange(positions.shape[0], device=positions.device)
        self.column = torch.arange(length, device=positions.device)
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings) -> Tensor:
        """Write the new keys and values, then attend over each row's own positions."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.rows, :, self.positions] = key[0].transpose(0, 1)
        values[self.rows, :, self.positions] = value[0].transpose(0, 1)
        num_rows, num_kv_heads = self.rows.shape[0], keys.shape[1]
        # The queries that share a key head take the place of query positions: [B, K, H / K, D].
        grouped = query[0].transpose(0, 1).reshape(num_rows, num_kv_heads, -1, query.shape[-1])
        out = _attend(
            grouped,
            keys[:num_rows, :, : self.length],
            values[:num_rows, :, : self.length],
            self._mask(settings.window, query.dtype),
            settings,
            sinks=None if settings.sinks is None else settings.sinks.view(1, num_kv_heads, -1, 1),
        )
        return out.reshape(1, num_rows, query.shape[1], values.shape[-1])

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[B, 1, 1, L] added to the scores: 0 or minus infinity."""
        if window not in self._masks:
            position = self.positions[:, None]
            is_hidden = self.column > position
            if window is not None:
                is_hidden |= self.column <= position - window
            mask = torch.zeros(is_hidden.shape, dtype=dtype, device=position.device)
            self._masks[window] = mask.masked_fill_(is_hidden, float("-inf"))[:, None, None]
        return self._masks[window]


class PrefillBatch:
    """The first `lengths` tokens of some rows, computed from nothing.

    Args:
        cache: Keys and values are written to it.
        rows: int64, rows of the cache.
        lengths: int64, tokens of each.
        length: Largest of `lengths`.
    """

    def __init__(self, cache: KVCache, rows: Tensor, lengths: Tensor, length: int) -> None:
        self.cache = cache
        self.rows = rows
        self.length = length
        self.column = torch.arange(length, device=rows.device)
        self.is_token = self.column < lengths[:, None]
        flat = self.is_token.flatten()
        # Where each padded place finds its packed token (padding finds token 0), and where each packed token lies.
        self._from_packed = (flat.cumsum(0) - 1).clamp_(min=0)
        self._to_packed = flat.nonzero()[:, 0]
        self._masks: dict[int | None, Tensor] = {}

    @property
    def positions(self) -> Tensor:
        """[T] int64, position of each packed token in its sequence."""
        return self.column.expand_as(self.is_token)[self.is_token]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings) -> Tensor:
        """Write keys and values, then attend causally within each sequence."""
        query, key, value = (self._pad(part) for part in (query, key, value))
        # Padding is written too: it is finite, beyond the sequence's end, and overwritten as the sequence grows.
        self.cache.keys[layer][self.rows, :, : self.length] = key
        self.cache.values[layer][self.rows, :, : self.length] = value
        num_groups = query.shape[1] // key.shape[1]
        if num_groups > 1:
            key = key.repeat_interleave(num_groups, dim=1)
            value = value.repeat_interleave(num_groups, dim=1)
        sinks = None if settings.sinks is None else settings.sinks.view(1, -1, 1, 1)
        out = _attend(query, key, value, self._mask(settings.window, query.dtype), settings, sinks)
        return out.transpose(1, 2).flatten(0, 1)[self._to_packed][None]

    def _pad(self, packed: Tensor) -> Tensor:
        """[1, H, T, D] to [B, H, L, D]."""
        num_rows = self.rows.shape[0]
        padded = packed[0].transpose(0, 1)[self._from_packed]
        return padded.view(num_rows, self.length, *padded.shape[1:]).transpose(1, 2)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[L, L] added to the scores: 0 or minus infinity."""
        if window not in self._masks:
            distance = self.column[:, None] - self.column
            is_hidden = distance < 0
            if window is not None:
                is_hidden |= distance >= window
            mask = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
            self._masks[window] = mask.masked_fill_(is_hidden, float("-inf"))
        return self._masks[window]


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
