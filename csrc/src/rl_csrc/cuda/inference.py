"""Paged attention and the draw of tokens, for inference on GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_csrc.cuda.launch import DTYPES, native, new_floats, on_its_device, row_stride_of, stream_of

if TYPE_CHECKING:
    from torch import Tensor


@on_its_device
def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    positions: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor | None:
    """Attention `[T, H, D]`; None, and nothing done, where the sizes are not the kernel's. Three launches at most.

    What is launched depends on shapes alone, so that a graph holds for any positions within its block table.
    """
    size, page_size, columns = query.shape[2], key_cache.shape[1], block_tables.shape[1]
    if size != value_cache.shape[3] or query.dtype not in DTYPES or size * query.element_size() % 16:
        return None
    splits = max(native.paged_splits(min(columns * page_size, window or columns * page_size)), 1)
    room = (query.shape[0], query.shape[1], splits)
    partial = new_floats(query, *room, size) if splits > 1 else None
    stats = new_floats(query, *room, 2) if splits > 1 else None
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    sizes = (*query.shape[:2], key.shape[1], size, page_size, block_tables.stride(0), splits, window or 0)
    # A view of some columns is read where it lies: rows of the table are `stride` apart.
    table = block_tables if block_tables.is_contiguous() else block_tables.as_strided((block_tables.shape[0],), (1,))
    is_done = native.paged_attention(
        *(query.contiguous(), key.contiguous(), value.contiguous(), key_cache, value_cache, table, rows, positions),
        *(None if sinks is None else sinks.float().contiguous(), partial, stats, out),
        sizes,
        scaling,
        softcap or 0.0,
        page_size.bit_length() - 1 if page_size & (page_size - 1) == 0 else -1,
        DTYPES[query.dtype],
        stream_of(query),
    )
    return out if is_done else None


@on_its_device
def draw(
    logits: Tensor, temperature: Tensor, streams: Tensor, positions: Tensor, is_greedy: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Token ids `[B]` and log-probs `[B]`; None, and nothing done, for a vocabulary that is too large. One launch."""
    if logits.dtype not in DTYPES or (logits.shape[1] > 1 and logits.stride(1) != 1):
        return None
    ids, logprobs = streams.new_empty(logits.shape[0]), new_floats(logits, logits.shape[0])
    is_done = native.draw(
        *(logits, row_stride_of(logits), logits.shape[1], logits.shape[0], DTYPES[logits.dtype]),
        *(temperature, streams, positions, is_greedy, ids, logprobs, stream_of(logits)),
    )
    return (ids, logprobs) if is_done else None
