"""Rollout correction: the sampler's probabilities are not the trainer's. Legend: `T` tokens (packed), `B` rows.

Delta = old_logprobs - rollout_logprobs, the log of the ratio trainer / sampler. References: truncated importance
sampling as in AReaL (arXiv 2505.24298), IcePop's two-sided mask.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch

from rl_trainer.algorithms.aggregation import LOG_MAX, row_of, row_sums

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tensordict import TensorDict
    from torch import Tensor

    from rl_trainer.config.schema import AlgorithmConfig

Level = Literal["token", "sequence"]
RejectionLevel = Literal["token", "sequence", "sequence_mean", "sequence_max"]
Divergence = Literal["k1", "k2", "k3"]

REJECTED_PER_KEPT = "rejected_per_kept"
"""Metric of a micro-batch whose rejected tokens are not counted; `finished_metrics` makes their share of it."""
_OF_KEPT = ("log_ratio", "k3", "ratio", "clipped_high", "clipped_low", "clipped_dual")


def correction_bounds(algorithm: AlgorithmConfig) -> tuple[float, float]:
    """`algorithm.correction_bounds`, or what it is if it was left out."""
    return algorithm.correction_bounds or (0.5 if algorithm.correction.endswith("icepop") else 0.0, 2.0)


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
        rows = row_of(cu_seqlens, delta.numel())
        delta = row_sums(delta, rows, cu_seqlens)[rows]
    ratio = delta.clamp(max=LOG_MAX).exp()
    if correction == "tis":
        weights = ratio.clamp(max=high)
    else:
        weights = torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    return torch.where(mask, weights, 0.0)


def configured_weights(
    algorithm: AlgorithmConfig, trained: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor
) -> Tensor | None:
    """(T,) float32 `correction_weights` as the configuration says; None without `algorithm.correction`."""
    if algorithm.correction == "none":
        return None
    level, _, scheme = algorithm.correction.rpartition("_")  # such as sequence_tis
    low, high = correction_bounds(algorithm)
    given: dict[str, Any] = {"correction": scheme, "level": level or "token", "low": low, "high": high}
    return correction_weights(trained, rollout_logprobs, loss_mask, cu_seqlens, **given)


def configured_rejection(
    algorithm: AlgorithmConfig, trained: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor
) -> Tensor | None:
    """(T,) bool `rejection_mask` as the configuration says; None without `algorithm.rejection`."""
    if algorithm.rejection == "none":
        return None
    level, _, divergence = algorithm.rejection.rpartition("_")  # such as sequence_mean_k3
    low, high = algorithm.rejection_bounds or (0.5 if divergence == "k1" else 0.0, 2.0)
    given: dict[str, Any] = {"level": level, "divergence": divergence, "low": low, "high": high}
    return rejection_mask(trained, rollout_logprobs, loss_mask, cu_seqlens, **given)


def rejection_mask(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    level: RejectionLevel,
    divergence: Divergence,
    low: float,
    high: float,
) -> Tensor:
    """(T,) bool, the model tokens that are learned from; a rejected row loses all of its tokens.

    Args:
        old_logprobs: (T,) by the trainer, before the update.
        rollout_logprobs: (T,) by the sampler.
        loss_mask: (T,) 1 where the model wrote the token.
        cu_seqlens: (B + 1,) int64 row offsets into T.
        level: `token`: each token by itself; a row by the sum (`sequence`), the mean (`sequence_mean`, so its ratio is
            the geometric mean) or the largest (`sequence_max`; for k1 of |Delta|) of its model tokens' divergences.
        divergence: k1: exp(Delta) has to lie within [low, high] (its inverse too, where the largest |Delta| counts);
            k2 = Delta^2 / 2 and k3 = exp(Delta) - 1 - Delta: at most `high`.
        low: Lower bound of the ratio trainer / sampler; k1 only.
        high: Upper bound.
    """
    mask = loss_mask.bool()
    delta = torch.where(mask, old_logprobs.detach().float() - rollout_logprobs.float(), 0.0)
    if divergence == "k1":
        per_token = delta.abs() if level == "sequence_max" else delta
    else:
        per_token = delta.square() / 2 if divergence == "k2" else torch.expm1(delta.clamp(max=LOG_MAX)) - delta
    measure = per_token
    if level != "token":
        rows = row_of(cu_seqlens, mask.numel())
        if level == "sequence_max":
            per_row = torch.segment_reduce(per_token, "max", offsets=cu_seqlens, initial=0.0)
        else:
            per_row = row_sums(per_token, rows, cu_seqlens)
        if level == "sequence_mean":
            per_row = per_row / row_sums(mask.float(), rows, cu_seqlens).clamp(min=1.0)
        measure = per_row[rows]
    if divergence != "k1":
        return mask & (measure <= high)
    ratio = measure.exp()
    return mask & (ratio <= high) & ((-measure).exp() >= low if level == "sequence_max" else ratio >= low)


def off_policy_rows(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    advantages: Tensor,
    *,
    most: float,
) -> Tensor:
    """(T,) bool, tokens of a negative advantage in completions too far off policy (DeepSeek-V3.2, arXiv 2512.02556).

    Too far are those whose mean of log(sampler / policy under update) over the model's tokens is above `most`.

    Args:
        logprobs: (T,) of the policy under update, without gradient.
        rollout_logprobs: (T,) by the sampler.
        loss_mask: (T,) 1 where the model wrote the token.
        cu_seqlens: (B + 1,) int64 row offsets into T.
        advantages: (T,).
        most: Bound of the mean, nats.
    """
    mask, rows = loss_mask.bool(), row_of(cu_seqlens, loss_mask.numel())
    gaps = row_sums(torch.where(mask, rollout_logprobs - logprobs, 0.0), rows, cu_seqlens)
    means = gaps / row_sums(mask.float(), rows, cu_seqlens).clamp(min=1.0)
    return (means > most)[rows] & (advantages < 0)


def mismatch_metrics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, weights: Tensor | None, num_tokens: float
) -> dict[str, Tensor]:
    """Metrics of the difference between trainer and sampler: shares of means over `num_tokens`, which add up.

    `mismatch_k1` and `mismatch_k3` estimate KL(sampler || trainer), `mismatch_abs` is the mean difference of the
    probabilities, `mismatch_chi2` the mean squared ratio less one; `correction_mean` and `correction_zero` are the mean
    weight and the share of tokens that got none.
    """
    mask = loss_mask.bool()
    old, rollout = old_logprobs.detach().float(), rollout_logprobs.float()
    delta = torch.where(mask, old - rollout, 0.0).clamp(max=LOG_MAX)
    difference = torch.where(mask, old.clamp(max=0).exp() - rollout.clamp(max=0).exp(), 0.0)  # a density may exceed 1
    sums = {
        "mismatch_k1": -delta.sum(),
        "mismatch_k3": (torch.expm1(delta) - delta).sum(),
        "mismatch_abs": difference.abs().sum(),
        "mismatch_chi2": torch.expm1(2 * delta).sum(),
    }
    if weights is not None:
        sums |= {"correction_mean": weights.sum(), "correction_zero": ((weights == 0) & mask).sum().float()}
    return {name: value / max(num_tokens, 1.0) for name, value in sums.items()}


def drop_rejected(algorithm: AlgorithmConfig, rows: TensorDict) -> None:
    """Take rejected tokens out of `loss_mask` where `rejection_counts=after`, so that they are not counted either.

    Reads the columns `old_logprobs`, `rollout_logprobs` and `loss_mask`; adds `was_rejected`.
    """
    if algorithm.rejection_counts == "before" or algorithm.rejection == "none":
        return
    mask = rows["loss_mask"]
    old, rollout = rows["old_logprobs"].values(), rows["rollout_logprobs"].values()
    kept = configured_rejection(algorithm, old, rollout, mask.values(), mask.offsets().to(torch.int64))
    assert kept is not None, "something is rejected by"
    for name, values in (("was_rejected", mask.values().bool() & ~kept), ("loss_mask", kept)):
        rows[name] = torch.nested.nested_tensor_from_jagged(values.to(mask.dtype), mask.offsets())


def finished_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a whole mini-batch, and what follows from them.

    `mismatch_ppl_ratio` is the trainer's perplexity on what was sampled over the sampler's; `mismatch_ess` the
    effective sample size of the tokens' ratios, (sum w)^2 / sum w^2, as a share of the tokens. Where tokens were
    `rejected` (their share), the metrics of the policy's ratio are means over the others.
    """
    found = dict(metrics)
    if REJECTED_PER_KEPT in found:
        per_kept = found.pop(REJECTED_PER_KEPT)
        found["rejected"] = per_kept / (1 + per_kept)
    elif "rejected" in found:
        kept = max(1 - found["rejected"], 1e-12)
        found |= {name: found[name] / kept for name in _OF_KEPT if name in found}
    mean_ratio = 1 + found["mismatch_k3"] - found["mismatch_k1"]
    found["mismatch_ppl_ratio"] = math.exp(min(found["mismatch_k1"], LOG_MAX))
    found["mismatch_ess"] = mean_ratio**2 / max(1 + found["mismatch_chi2"], 1e-12)
    return found
