"""Log-probs of logits and of vocabulary shards."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_csrc.cpu.memory import native, new_floats, with_adjacent_columns
from rl_csrc.types import NUM_STATS


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
    """Log-probs, entropy, sum of squares, and the log-sum-exp that backward wants; each `[T]`."""
    num = labels.shape[0]
    scored, lse = new_floats(num), new_floats(num)
    entropies = new_floats(num) if entropy else None
    squares = new_floats(num) if sum_pi_squared else None
    native.logprobs(
        with_adjacent_columns(logits),
        labels,
        temperature,
        softcap or 0.0,
        ignore_index,
        row_index,
        scored,
        entropies,
        squares,
        lse,
        torch.get_num_threads(),
    )
    return scored, entropies, squares, lse


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
    """Write the gradient of the logits to `out`, which may be the logits."""
    native.logprobs_backward(
        with_adjacent_columns(logits),
        labels,
        temperature,
        softcap or 0.0,
        ignore_index,
        row_index,
        vocab_start,
        logprobs,
        lse,
        entropy,
        grad_logprobs,
        grad_entropy,
        out,
        torch.get_num_threads(),
    )


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
    stats = new_floats(labels.shape[0], NUM_STATS)
    threads = torch.get_num_threads()
    options = (temperature, softcap or 0.0, ignore_index, row_index, vocab_start)
    native.logprob_stats(with_adjacent_columns(logits), labels, *options, stats, threads)
    return stats


def stats_merge(stats: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Merged log-probs, entropy, sum of squares and log-sum-exp; each `[T]`."""
    outs = tuple(new_floats(stats.shape[1]) for _ in range(4))
    native.stats_merge(stats.contiguous(), *outs, torch.get_num_threads())
    return outs  # pyright: ignore[reportReturnType]  # four by construction
