"""The next token of every row of a batch, drawn so that rows do not depend on one another.

Shapes: B rows, V vocabulary. The draw inverts the cumulative distribution at one uniform number per row, which is a
hash of the row's seed and the position that is filled: no generator state, so a request gives the same tokens whoever
its neighbours are, however often it was frozen, and wherever it is resumed.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64, whose own shift is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: int64 to int64, every output bit depending on every input bit."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def stream_seed(server_seed: int, index: int) -> int:
    """Seed of the `index`-th request that brings none: 64 bits, signed. `uniform` does the mixing."""
    return (server_seed * _GOLDEN + index * _MIX_1 + 2**63) % 2**64 - 2**63


def streams_of(seeds: Tensor) -> Tensor:
    """[B] int64, what `uniform` makes its numbers of."""
    return mix(seeds + _GOLDEN)


def uniform(streams: Tensor, positions: Tensor) -> Tensor:
    """[B] float64 in [0, 1), a function of (seed, position) alone. 52 random bits, so that u * total < total always."""
    bits = mix(streams + positions * _GOLDEN)
    return _shift_right(bits, 12).double() * 2.0**-52


def truncate(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Logits with everything outside top-k, then outside the nucleus of what is left, at minus infinity. [B, V].

    `top_k` 0 and `top_p` 1 keep all. The nucleus is the shortest run of most likely tokens whose mass reaches `top_p`
    (1904.09751).
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


def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    streams: Tensor,
    positions: Tensor,
    is_greedy: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids [B] int64, their log-probs [B] float32, and the log-probs [B, V] that they were drawn from.

    Args:
        logits: float32.
        temperature: float32, above 0.
        streams: int64, of `streams_of` the rows' seeds.
        positions: int64, the position in the sequence that each token will take.
        is_greedy: Rows that take the most likely token whatever is cut off; None when no row does.
        top_k: int64, or None when no row truncates.
        top_p: float32, given with `top_k`.

    A row whose logits are not finite gets some id and a log-prob that is not finite either.
    """
    scaled = logits / temperature[:, None]
    if top_k is not None and top_p is not None:
        is_cut = (top_k > 0) | (top_p < 1)
        if is_greedy is not None:
            is_cut &= ~is_greedy
        scaled = torch.where(is_cut[:, None], truncate(scaled, top_k, top_p), scaled)
    logprobs = scaled.log_softmax(dim=-1)
    mass = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    threshold = (uniform(streams, positions) * mass[:, -1])[:, None]
    ids = torch.searchsorted(mass, threshold, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    if is_greedy is not None:
        ids = torch.where(is_greedy, logits.argmax(dim=-1), ids)
    return ids, logprobs.gather(-1, ids[:, None])[:, 0], logprobs
