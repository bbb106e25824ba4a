"""Fused layer ops between a decoder's matrix products: norm, rotary embedding with cache write, and gating.

One launch each on a GPU, plain torch elsewhere. Values are rounded where the modules of transformers round them, so
that a served model and its trainer agree.
Legend: `T` tokens, `H` query heads, `K` key/value heads, `D` size of a head, `N` pages of `S` positions, `R` rows of
the block table, `M` pages of a row, `P` positions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from rl_csrc.native import has_cuda

MOST_HEAD_SIZE = 256
"""Largest head size that the CUDA kernel of `rotate_to_pages` supports."""


def add_norm(residual: Tensor, x: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add `x` to `residual` in place, and return its RMS norm times `weight` (1910.07467), `[T, size]`. No gradient.

    Args:
        residual: `[T, size]` contiguous; written to.
        x: `[T, size]` contiguous, of the same dtype; None adds nothing.
        weight: `[size]`.
        eps: Added to the mean square.
    """
    if residual.is_cuda and has_cuda():
        from rl_csrc import cuda

        return cuda.add_norm(residual, x, weight, eps)
    if x is not None:
        residual += x
    return _norm(residual, weight, eps)


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
    """Norm the heads of queries and keys, rotate both (RoPE, 2104.09864), write keys and values into their pages.

    Returns the queries `[T, H, D]`. No gradient.

    Args:
        qkv: `[T, H + 2 K, D]` contiguous: queries, keys and values of each token.
        query_norm: `[D]` weight of the RMS norm of each query head; None: no norm.
        key_norm: `[D]` of each key head.
        cos: `[P, D / 2]` contiguous, of the dtype of `qkv`.
        sin: `[P, D / 2]`.
        key_cache: `[N, S, K, D]`, contiguous; written to.
        value_cache: `[N, S, K, D]`, contiguous; written to.
        block_tables: `[R, M]` int64, the pages of each row in the order of positions.
        rows: `[T]` int64, row of each token.
        positions: `[T]` int64, position of each token in its row.
        eps: Added to the mean square of a norm.
    """
    if qkv.is_cuda and has_cuda() and qkv.shape[2] <= MOST_HEAD_SIZE:
        from rl_csrc import cuda

        arguments = (qkv, query_norm, key_norm, cos, sin, key_cache, value_cache, block_tables, rows, positions)
        return cuda.rotate_to_pages(*arguments, eps)
    size, num_kv = key_cache.shape[1], key_cache.shape[2]
    query, key, value = qkv.split([qkv.shape[1] - 2 * num_kv, num_kv, num_kv], dim=1)
    page = block_tables[rows, positions // size]
    key_cache[page, positions % size] = _rotated(key, key_norm, cos, sin, positions, eps)
    value_cache[page, positions % size] = value
    return _rotated(query, query_norm, cos, sin, positions, eps)


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, `[T, size]`, of `gate_up` `[T, 2 size]` contiguous. No gradient."""
    if gate_up.is_cuda and has_cuda():
        from rl_csrc import cuda

        out = cuda.gated(gate_up)
        if out is not None:
            return out
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotated(heads: Tensor, norm: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor, eps: float) -> Tensor:
    x, y = (heads if norm is None else _norm(heads, norm, eps)).chunk(2, dim=-1)
    cos, sin = cos[positions][:, None], sin[positions][:, None]
    return torch.cat([x * cos - y * sin, y * cos + x * sin], dim=-1)
