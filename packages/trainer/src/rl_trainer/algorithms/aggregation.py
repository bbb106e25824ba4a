"""Sums over the rows of packed tokens, and aggregation of token losses; nothing waits for a device.

Legend: `T` tokens (packed), `B` rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from rl_engine.types import BatchCounts
    from rl_trainer.config.schema import AggregationName

LOG_MAX = 20.0
"""Log ratios are cut here before exp; any bound is far below."""


def row_of(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """(T,) int64 number of the row that each of `num_tokens` tokens belongs to, by (B + 1,) row offsets."""
    rows = torch.arange(cu_seqlens.numel() - 1, device=cu_seqlens.device)
    return rows.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)


def row_sums(values: Tensor, rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """(B,) sums of (T,) `values` over the rows in `row_of`."""
    return values.new_zeros(cu_seqlens.numel() - 1).index_add(0, rows, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """Aggregation of (T,) token losses to one number, as in `rl_csrc.policy_loss`."""

    name: AggregationName = "token-mean"
    """Counts are of the global batch, so that shares of micro-batches and ranks add up."""
    norm_constant: int = 1
    """Tokens of the longest completion, which seq-mean-token-sum-norm divides by."""

    def share(
        self, per_token: Tensor, mask: Tensor, cu_seqlens: Tensor, counts: BatchCounts, row_counts: Tensor | None = None
    ) -> Tensor:
        """`[]` this micro-batch's share.

        Args:
            per_token: (T,) losses.
            mask: (T,) bool, the tokens whose losses count.
            cu_seqlens: (B + 1,) int64 row offsets into T.
            counts: Tokens and sequences of the global batch.
            row_counts: (B,) tokens that a row's mean is over; None: those in `mask`.
        """
        masked = torch.where(mask, per_token, 0.0)
        if self.name == "seq-mean-token-mean":
            rows = row_of(cu_seqlens, mask.numel())
            row_counts = row_sums(mask.float(), rows, cu_seqlens) if row_counts is None else row_counts
            masked = masked / row_counts.clamp(min=1.0)[rows]
        total = masked.sum()
        if self.name == "token-sum":
            return total
        if self.name == "token-mean":
            return total / max(counts.tokens, 1.0)
        return total / (max(counts.sequences, 1.0) * (self.norm_constant if self.name.endswith("norm") else 1))
