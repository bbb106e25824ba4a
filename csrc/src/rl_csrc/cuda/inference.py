"""Inference kernels for GPUs: paged attention, norm, rotary embedding and gating of a layer, token sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_csrc.cuda.launch import DTYPES, native, new_floats, on_its_device, row_stride_of, stream_of

if TYPE_CHECKING:
    from torch import Tensor


@on_its_device
def paged_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
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
    """Paged attention `[T, H, D]`; None, with nothing done, for sizes that the kernel does not support.

    At most three launches. They depend on shapes alone, so a CUDA graph is valid for any positions in its block table.
    """
    size, page_size, columns = query.shape[2], key_cache.shape[1], block_tables.shape[1]
    if size != value_cache.shape[3] or query.dtype not in DTYPES or size * query.element_size() % 16:
        return None
    splits = max(native.paged_splits(min(columns * page_size, window or columns * page_size)), 1)
    room = (query.shape[0], query.shape[1], splits)
    partial = new_floats(query, *room, size) if splits > 1 else None
    stats = new_floats(query, *room, 2) if splits > 1 else None
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    sizes = (*query.shape[:2], key_cache.shape[2], size, page_size, block_tables.stride(0), splits, window or 0)
    new = (None, None) if key is None or value is None else (key.contiguous(), value.contiguous())
    is_done = native.paged_attention(
        *(query.contiguous(), *new, key_cache, value_cache, _in_place(block_tables), rows, positions),
        *(None if sinks is None else sinks.float().contiguous(), partial, stats, out),
        sizes,
        scaling,
        softcap or 0.0,
        page_size.bit_length() - 1 if page_size & (page_size - 1) == 0 else -1,
        DTYPES[query.dtype],
        stream_of(query),
    )
    return out if is_done else None


def _in_place(block_tables: Tensor) -> Tensor:
    """Block table as the kernels take it: a view of some columns is read in place, with its row stride."""
    return block_tables if block_tables.is_contiguous() else block_tables.as_strided((block_tables.shape[0],), (1,))


@on_its_device
def add_norm(residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of `residual + x`; the sum is written to `residual`. One launch."""
    out = torch.empty_like(residual)
    native.add_norm(x, residual, weight, out, *residual.shape, eps, DTYPES[residual.dtype], stream_of(residual))
    return out


@on_its_device
def rotate_to_pages(
    qkv: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    positions: Tensor,
    eps: float,
) -> Tensor:
    """Rotated queries `[T, H, D]`; keys and values are written to their pages. One launch."""
    num, num_kv, size, page_size = qkv.shape[0], key_cache.shape[2], qkv.shape[2], key_cache.shape[1]
    query = qkv.new_empty(num, qkv.shape[1] - 2 * num_kv, size)
    native.rotate(
        *(qkv, query_norm, key_norm, cos, sin, query, key_cache, value_cache, _in_place(block_tables), rows),
        *(positions, (num, query.shape[1], num_kv, size, page_size, block_tables.stride(0)), eps),
        *(DTYPES[qkv.dtype], stream_of(qkv)),
    )
    return query


@on_its_device
def gated(gate_up: Tensor) -> Tensor | None:
    """silu(gate) * up `[T, size]`; None, with nothing done, unless rows are multiples of 16 bytes. One launch."""
    num, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num, size)
    is_done = native.gate(gate_up, out, num, size, DTYPES[gate_up.dtype], stream_of(gate_up))
    return out if is_done else None


@on_its_device
def draw(
    logits: Tensor, temperature: Tensor, streams: Tensor, positions: Tensor, is_greedy: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Sampled token ids `[B]` and log-probs `[B]`; None, with nothing done, if the vocabulary is too large."""
    if logits.dtype not in DTYPES or (logits.shape[1] > 1 and logits.stride(1) != 1):
        return None
    ids, logprobs = streams.new_empty(logits.shape[0]), new_floats(logits, logits.shape[0])
    is_done = native.draw(
        *(logits, row_stride_of(logits), logits.shape[1], logits.shape[0], DTYPES[logits.dtype]),
        *(temperature, streams, positions, is_greedy, ids, logprobs, stream_of(logits)),
    )
    return (ids, logprobs) if is_done else None
