"""Log-probs of logits and of vocabulary shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_csrc.cuda.launch import DTYPES, native, new_floats, on_its_device, row_stride_of, stream_of
from rl_csrc.types import NUM_STATS

if TYPE_CHECKING:
    from torch import Tensor


def logits_arguments(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    vocab_start: int = 0,
) -> Any:
    """The native struct `rl_logits`."""
    per_row = isinstance(temperature, torch.Tensor)
    return native.Logits(
        data=logits,
        row_stride=logits.stride(0) if logits.shape[0] > 1 else logits.shape[1],
        vocab=logits.shape[1],
        rows=labels.shape[0],
        dtype=DTYPES[logits.dtype],
        labels=labels,
        row_index=row_index,
        temperature=temperature if per_row else None,
        scalar_temperature=1.0 if per_row else float(temperature),
        softcap=softcap or 0.0,
        ignore_index=ignore_index,
        vocab_start=vocab_start,
    )


@on_its_device
def logprobs_forward(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    entropy: bool,
    sum_pi_squared: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Log-probs, entropy, sum of squared probabilities and log-sum-exp, `[T]` each, in one read of the logits."""
    num = labels.shape[0]
    scored, lse = new_floats(logits, num), new_floats(logits, num)
    entropies = new_floats(logits, num) if entropy else None
    squares = new_floats(logits, num) if sum_pi_squared else None
    arguments = logits_arguments(logits, labels, temperature, softcap, ignore_index, row_index)
    native.logprobs(arguments, scored, entropies, squares, lse, stream_of(logits))
    return scored, entropies, squares, lse


@on_its_device
def logprobs_backward(
    logits: Tensor,
    labels: Tensor,
    logprobs: Tensor,
    lse: Tensor,
    grad_logprobs: Tensor | None,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    vocab_start: int,
    out: Tensor,
) -> None:
    """Write the gradient of the logits to `out`: the logits themselves, or, of float32 logits, a tensor of any type."""
    arguments = logits_arguments(logits, labels, temperature, softcap, ignore_index, row_index, vocab_start)
    if row_index is not None:
        zero_unscored(out, row_index)
    native.logprobs_backward(
        arguments,
        logprobs,
        lse,
        entropy,
        grad_logprobs,
        grad_entropy,
        out,
        row_stride_of(out),
        DTYPES[out.dtype],
        stream_of(logits),
    )


def zero_unscored(out: Tensor, row_index: Tensor) -> None:
    """Zero the rows that no label scores."""
    is_scored = torch.zeros(out.shape[0], dtype=torch.bool, device=out.device)
    is_scored[row_index] = True
    native.zero_rows(out, DTYPES[out.dtype], row_stride_of(out), *out.shape, is_scored, stream_of(out))


@on_its_device
def logprob_stats(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int | None,
    row_index: Tensor | None,
    vocab_start: int,
) -> Tensor:
    """Statistics of a vocabulary shard, `[T, 5]`."""
    stats = new_floats(logits, labels.shape[0], NUM_STATS)
    arguments = logits_arguments(logits, labels, temperature, softcap, ignore_index, row_index, vocab_start)
    native.logprob_stats(arguments, stats, stream_of(logits))
    return stats


@on_its_device
def stats_merge(stats: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, entropy, sum of squared probabilities and log-sum-exp of `[W, T, 5]`, merged in rank order."""
    stats = stats.contiguous()
    scored, entropies, squares, lse = (new_floats(stats, stats.shape[1]) for _ in range(4))
    native.stats_merge(
        stats,
        *stats.shape[:2],
        scored,
        entropies,
        squares,
        lse,
        stream_of(stats),
    )
    return scored, entropies, squares, lse
