"""CPU kernels that are one native call each: log-probs of logits or vocabulary shards, policy losses, advantages."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_csrc.native import cpu as native
from rl_csrc.native import new_floats, with_adjacent_columns
from rl_csrc.types import GROUP_MODES, MASK_MODES, METRIC_NAMES, NUM_STATS, SCAN_KINDS

if TYPE_CHECKING:
    from rl_csrc.reference import LossSpec


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


@lru_cache(maxsize=64)
def _native_spec(spec: LossSpec) -> Any:
    """The struct `rl_loss_spec`: made once for each set of options."""
    return native.LossSpec(**spec.fields())


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    spec: LossSpec,
    denominator: float | Tensor,
    entropy: Tensor | None,
    ref_logprobs: Tensor | None,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Loss `[]`, metrics `[M]`, and the gradients of logprobs and entropy `[T]`."""
    num = logprobs.shape[0]
    loss, metrics, grad = new_floats(), new_floats(len(METRIC_NAMES)), new_floats(num)
    grad_entropy = None if entropy is None else new_floats(num)
    native.policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        loss_mask,
        cu_seqlens,
        ref_logprobs,
        weights,
        entropy,
        denominator if isinstance(denominator, torch.Tensor) and denominator.dim() == 1 else float(denominator),
        _native_spec(spec),
        loss,
        metrics,
        grad,
        grad_entropy,
        torch.get_num_threads(),
    )
    return loss, metrics, grad, grad_entropy


def scan_reverse(
    rewards: Tensor,
    values: Tensor | None,
    cu_seqlens: Tensor,
    loss_mask: Tensor | None,
    kind: str,
    gamma: float,
    lam: float | Tensor,
    bootstrap_values: Tensor | None,
    mask_mode: str,
    rho: Tensor | None,
    rho_clip: float,
    c_clip: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, `[T]`."""
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    native.scan_reverse(
        rewards,
        values,
        cu_seqlens,
        loss_mask,
        rho,
        lam,
        bootstrap_values,
        SCAN_KINDS.index(kind),  # pyright: ignore[reportArgumentType]
        MASK_MODES.index(mask_mode),  # pyright: ignore[reportArgumentType]
        gamma,
        rho_clip,
        c_clip,
        advantages,
        returns,
        torch.get_num_threads(),
    )
    return advantages, returns


def group_norm(rewards: Tensor, group_ids: Tensor | None, cu_groups: Tensor | None, mode: str, eps: float) -> Tensor:
    """Advantages, `[B]`."""
    out = torch.empty_like(rewards)
    native.group_norm(rewards, group_ids, cu_groups, GROUP_MODES.index(mode), eps, out)  # pyright: ignore[reportArgumentType]
    return out


def masked_moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and centred second moment, `[]` float64."""
    out = torch.empty(3, dtype=torch.float64)
    native.masked_moments(x, mask, out, torch.get_num_threads())
    num, mean, m2 = out.unbind()
    return num, mean, m2


def whiten(
    x: Tensor,
    mask: Tensor | None,
    shift_mean: bool,
    eps: float,
    moments: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """Whitened x, its shape."""
    num, mean, m2 = (float(m) for m in (masked_moments(x, mask) if moments is None else moments))
    out = torch.empty_like(x)
    scale = (m2 / max(num - 1, 1) + eps) ** -0.5
    native.whiten(x, mask, mean, scale, 0.0 if shift_mean else mean, out, torch.get_num_threads())
    return out
