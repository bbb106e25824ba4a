"""Token sampling from logits with stateless random numbers: a row's tokens do not depend on its batch.

Sampling inverts the cumulative distribution at one uniform number per row: a hash of the row's random stream and of the
position to be filled. A request gives the same tokens in any batch, and when it is continued elsewhere.
Legend: `B` rows, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_csrc.native import cpu, has_cuda

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64

_kernel: Any = getattr(cpu, "draw", None)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): int64 to int64, every output bit depends on every input bit."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def streams_of(seeds: Tensor) -> Tensor:
    """Random streams [B] int64 for `draw`, from seeds [B]."""
    return mix(seeds + _GOLDEN)


def uniform(streams: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers [B] float64 in [0, 1), a function of (seed, position); 52 bits, so that u * total < total."""
    bits = mix(streams + positions * _GOLDEN)
    return _shift_right(bits, 12).double() * 2.0**-52


def draw(
    logits: Tensor, *, temperature: Tensor, streams: Tensor, positions: Tensor, is_greedy: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sample token ids [B] int64; return them with their log-probs [B] float32 at that temperature.

    Args:
        logits: [B, V]; a logit of minus infinity is never sampled. Float32 on a CPU runs natively, without a copy.
        temperature: [B] float32, above 0.
        streams: [B] int64, `streams_of` the rows' seeds.
        positions: [B] int64, the position that each token will have in its sequence.
        is_greedy: [B] bool, rows with greedy sampling; None: none.

    A row whose logits are not finite gets some id and a log-prob that is not finite either.

    Raises:
        ArgumentError: a shape or dtype is wrong.
    """
    if logits.is_cuda and has_cuda():
        from rl_csrc import cuda

        drawn = cuda.draw(logits, temperature, streams, positions, is_greedy)
        if drawn is not None:
            return drawn
    if _kernel is None or not logits.is_cpu or logits.dtype != torch.float32:
        return reference(logits, temperature=temperature, streams=streams, positions=positions, is_greedy=is_greedy)
    ids, logprobs = streams.new_empty(logits.shape[0]), logits.new_empty(logits.shape[0])
    _kernel(logits, temperature, streams, positions, is_greedy, ids, logprobs, torch.get_num_threads())
    return ids, logprobs


def reference(
    logits: Tensor, *, temperature: Tensor, streams: Tensor, positions: Tensor, is_greedy: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`draw` in plain torch, on any device."""
    logprobs = (logits.float() / temperature[:, None]).log_softmax(dim=-1)
    mass = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    threshold = (uniform(streams, positions) * mass[:, -1])[:, None]
    ids = torch.searchsorted(mass, threshold, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    if is_greedy is not None:
        ids = torch.where(is_greedy, logits.argmax(dim=-1), ids)
    return ids, logprobs.gather(-1, ids[:, None])[:, 0]


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64, whose own shift is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
