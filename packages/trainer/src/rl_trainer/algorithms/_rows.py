"""Sums over the rows of packed tokens that wait for no device. Legend: `T` tokens (packed), `B` rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def row_of(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """(T,) int64 number of the row that each of `num_tokens` tokens belongs to, by (B + 1,) row offsets."""
    rows = torch.arange(cu_seqlens.numel() - 1, device=cu_seqlens.device)
    return rows.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)


def row_sums(values: Tensor, rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """(B,) sums of (T,) `values` over the rows that `row_of` tells."""
    return values.new_zeros(cu_seqlens.numel() - 1).index_add(0, rows, values)
