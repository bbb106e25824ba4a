"""Rollout correction: the sampler's probabilities are not the trainer's. Legend: `T` tokens (packed), `B` rows.

Delta = old_logprobs - rollout_logprobs, the log of the ratio trainer / sampler. References: truncated importance
sampling as in AReaL (arXiv 2505.24298), IcePop's two-sided mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor

Correction = Literal["none", "tis", "icepop"]
Level = Literal["token", "sequence"]

_LOG_MAX = 20.0
"""Log ratios are cut here before exp; any bound is far below."""


def correction_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    correction: Literal["tis", "icepop"],
    level: Level,
    low: float,
    high: float,
) -> Tensor:
    """(T,) float32 weights of the policy loss, without gradient; 0 where the model did not write the token.

    Args:
        old_logprobs: (T,) by the trainer, before the update.
        rollout_logprobs: (T,) by the sampler.
        loss_mask: (T,) 1 where the model wrote the token.
        cu_seqlens: (B + 1,) int64 row offsets into T.
        correction: `tis` truncates the ratio at `high`; `icepop` gives 0 outside [low, high].
        level: `token`: each token's own ratio; `sequence`: the product over the row's model tokens.
        low: Lower bound of the ratio; icepop only.
        high: Upper bound of the ratio.
    """
    mask = loss_mask.bool()
    delta = torch.where(mask, old_logprobs.detach().float() - rollout_logprobs.float(), 0.0)
    if level == "sequence":
        lengths = cu_seqlens.diff()
        row_of = torch.arange(lengths.numel(), device=delta.device).repeat_interleave(lengths)
        delta = delta.new_zeros(lengths.numel()).index_add_(0, row_of, delta)[row_of]
    ratio = delta.clamp(max=_LOG_MAX).exp()
    if correction == "tis":
        weights = ratio.clamp(max=high)
    else:
        weights = torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    return torch.where(mask, weights, 0.0)


def mismatch_metrics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, weights: Tensor | None, num_tokens: float
) -> dict[str, Tensor]:
    """How far the trainer is from the sampler: shares of means over `num_tokens`, so that micro-batches add up.

    `mismatch_k1` and `mismatch_k3` estimate KL(sampler || trainer), `mismatch_abs` is the mean difference of the
    probabilities, `mismatch_chi2` the mean squared ratio less one; `correction_mean` and `correction_zero` are the mean
    weight and the share of tokens that got none.
    """
    mask = loss_mask.bool()
    old, rollout = old_logprobs.detach().float(), rollout_logprobs.float()
    delta = torch.where(mask, old - rollout, 0.0).clamp(max=_LOG_MAX)
    difference = torch.where(mask, old.exp() - rollout.exp(), 0.0)
    sums = {
        "mismatch_k1": -delta.sum(),
        "mismatch_k3": (torch.expm1(delta) - delta).sum(),
        "mismatch_abs": difference.abs().sum(),
        "mismatch_chi2": torch.expm1(2 * delta).sum(),
    }
    if weights is not None:
        sums |= {"correction_mean": weights.sum(), "correction_zero": ((weights == 0) & mask).sum().float()}
    return {name: value / max(num_tokens, 1.0) for name, value in sums.items()}
