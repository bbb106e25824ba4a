"""Paged attention (PagedAttention, 2309.06180) over a cache of keys and values: decoding and chunked prefill.

Legend: `T` new tokens of any sequences, `H` query heads, `K` key/value heads (H is a multiple), `D` and `E` sizes of a
key and of a value, `N` pages of `S` positions, `R` rows of the block table, `M` pages of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_csrc.errors import ArgumentError
from rl_csrc.native import cpu, has_cuda

_kernel: Any = getattr(cpu, "paged_attention", None)
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def has_kernel(query: Tensor) -> bool:
    """Whether `attention` has a kernel for such queries (on GPUs one for decoding); else it runs in plain torch."""
    if query.dtype not in _KERNEL_DTYPES:
        return False
    return has_cuda() if query.is_cuda else query.is_cpu and _kernel is not None


def attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write `key` and `value` into their pages, then attend causally; returns `[T, H, E]`. No gradient.

    A token sees the positions of its row up to its own, those of this call included. Nothing else in the cache is read:
    it may be uninitialised. The result of a token does not depend on which others are in the call.

    Args:
        query: `[T, H, D]`, float32, bfloat16 or float16; computed in float32.
        key: `[T, K, D]`; None, like `value`, if keys and values of these tokens are in their pages already.
        value: `[T, K, E]`.
        key_cache: `[N, S, K, D]`, contiguous; written to.
        value_cache: `[N, S, K, E]`, contiguous; written to.
        block_tables: `[R, M]` int64, the pages of each row in the order of positions.
        rows: `[T]` int64, row of each token.
        positions: `[T]` int64, position of each token in its row.
        scaling: Multiplies query-key products.
        window: A token sees itself and the `window - 1` positions before it; None sees all.
        softcap: Scores are squashed to (-softcap, softcap) by tanh.
        sinks: `[H]` scores of a virtual key whose value is zero.

    Raises:
        ArgumentError: a shape or dtype is wrong, or (on CPU) a token has no page for a position.
    """
    if window is not None and window < 1:
        raise ArgumentError(f"window is {window}; wanted at least 1, or None for no window.")
    if query.is_cuda and has_kernel(query):
        from rl_csrc import cuda

        out = cuda.paged_attention(
            *(query, key, value, key_cache, value_cache, block_tables, rows, positions),
            *(scaling, window, softcap, sinks),
        )
        if out is not None:
            return out
    if query.is_cuda or key is None or not has_kernel(query):
        arguments = (query, key, value, key_cache, value_cache, block_tables, rows, positions)
        return reference(*arguments, scaling=scaling, window=window, softcap=softcap, sinks=sinks)
    out = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[-1])
    _kernel(
        *(query, key, value, key_cache, value_cache, block_tables, rows, positions),
        *(scaling, window or 0, softcap or 0.0, None if sinks is None else sinks.float().contiguous()),
        *(out, torch.get_num_threads()),
    )
    return out


def reference(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Paged attention in plain torch on any device, without synchronization: gathers and masks each token's pages."""
    size = key_cache.shape[1]
    tables = block_tables[rows]
    if key is not None and value is not None:
        page = tables.gather(1, (positions // size)[:, None])[:, 0]
        key_cache[page, positions % size] = key
        value_cache[page, positions % size] = value
    num, num_kv_heads, dtype = query.shape[0], key_cache.shape[2], query.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    column = torch.arange(tables.shape[1] * size, device=query.device)
    is_seen = column <= positions[:, None]
    if window is not None:
        is_seen &= column > positions[:, None] - window
    keys = key_cache[tables].flatten(1, 2).to(wide)
    # A weight of 0 does not hide a NaN in a page that was never written.
    values = value_cache[tables].flatten(1, 2).to(wide).masked_fill(~is_seen[..., None, None], 0)
    grouped = query.to(wide).view(num, num_kv_heads, -1, query.shape[2])
    scores = torch.einsum("tkgd,tlkd->tkgl", grouped, keys) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~is_seen[:, None, None], float("-inf"))
    if sinks is not None:
        sink = sinks.to(wide).view(1, num_kv_heads, -1, 1).expand(num, -1, -1, -1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., : column.shape[0]]
    return torch.einsum("tkgl,tlke->tkge", weights, values).flatten(1, 2).to(dtype)
