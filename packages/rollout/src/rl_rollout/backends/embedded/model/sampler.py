"""Sampler: penalties and truncation of each row, and seeds of requests without one. The draw is `rl_csrc.sampling`.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rl_rollout.types import SamplingParams

_GOLDEN = 0x9E3779B97F4A7C15
_ODD = 0xBF58476D1CE4E5B9


def stream_seed(server_seed: int, index: int) -> int:
    """Seed of the server's `index`-th request without one, a signed 64-bit integer. `streams_of` hashes it."""
    return (server_seed * _GOLDEN + index * _ODD + 2**63) % 2**64 - 2**63


def truncate(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Logits [B, V] with minus infinity outside top-k, and then outside the nucleus of the tokens that are left.

    `top_k` 0 and `top_p` 1 keep all. The nucleus is the smallest set of most likely tokens whose probability reaches
    `top_p` (1904.09751).
    """
    size = scaled.shape[-1]
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(size, device=scaled.device)
    in_top_k = (rank < top_k[:, None]) | (top_k[:, None] == 0)
    ordered = ordered.masked_fill(~in_top_k, float("-inf"))
    probs = ordered.softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    in_nucleus = (mass_before < top_p[:, None]) | (top_p[:, None] >= 1) | (rank == 0)
    ordered = ordered.masked_fill(~in_nucleus, float("-inf"))
    return torch.empty_like(scaled).scatter_(-1, order, ordered)


def shaped(logits: Tensor, prompt: Tensor, completion: Tensor, params: SamplingParams) -> Tensor:
    """Logits [V] of one row after penalties and `min_p`.

    Args:
        logits: [V] float32.
        prompt: [P] int64.
        completion: [C] int64.
        params: Its sampling parameters.
    """
    seen = torch.cat([prompt, completion]).unique()
    kept = logits[seen]
    factor = params.repetition_penalty
    logits = logits.index_copy(0, seen, torch.where(kept > 0, kept / factor, kept * factor))
    distinct, counts = completion.unique(return_counts=True)
    less = params.presence_penalty + params.frequency_penalty * counts
    logits = logits.index_add(0, distinct, -less.to(logits.dtype))
    if params.min_p and params.temperature:
        least = logits.max() + params.temperature * math.log(params.min_p)
        logits = logits.masked_fill(logits < least, float("-inf"))
    return logits


def cut(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, is_greedy: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Apply top-k and top-p to the rows that ask for them; returns logits [B, V] and the temperatures [B] to draw at.

    Truncated rows are divided by their temperature already, and have 1 as the temperature that is left. Other rows, and
    greedy ones, keep their bits: a truncated neighbour changes nothing.

    Args:
        logits: [B, V] float32.
        temperature: [B] float32, above 0.
        top_k: [B] int64.
        top_p: [B] float32.
        is_greedy: [B] bool; None when no row is.
    """
    is_cut = (top_k > 0) | (top_p < 1)
    if is_greedy is not None:
        is_cut &= ~is_greedy
    truncated = truncate(logits / temperature[:, None], top_k, top_p)
    return torch.where(is_cut[:, None], truncated, logits), temperature.masked_fill(is_cut, 1.0)
