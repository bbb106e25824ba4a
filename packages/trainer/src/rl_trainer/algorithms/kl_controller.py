"""KL to the reference: estimators; coefficients of KL and entropy that follow a target. Legend: `T` tokens (packed)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor

K3_MAX = 10.0
UNBIASED = "k3*"
TOKEN_ENTROPY = "token_entropy"
"""Metric that `AdaptiveEntropy` follows: mean over the tokens that are learned from, whatever the aggregation."""
KlEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "k3+", "k3*"]
"""`+`: that value, with the gradient of k2 where it is in the loss. `*`: times the ratio to the old policy, whose
gradient is that of the KL itself (DeepSeek-V3.2, arXiv 2512.02556); in the loss alone."""


def estimate_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """(T,) float32 estimate of KL(policy || reference) from each token, with d = logprob - ref_logprob.

    k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman, "Approximating KL divergence"), capped at 10 as it
    is in the loss (`rl_csrc.policy_loss`): a token that the reference rules out would else outweigh the batch.
    """
    d = logprobs.float() - ref_logprobs.float()
    name = estimator.removesuffix("+")
    if name == "k1":
        return d
    if name == "abs":
        return d.abs()
    if name == "k2":
        return d.square() / 2
    return (torch.expm1(-d) + d).clamp(max=K3_MAX)


@dataclass(slots=True, kw_only=True)
class AdaptiveKl:
    """A coefficient that follows a target: coef *= 1 + 0.1 clip(kl / target - 1, -0.2, 0.2), arXiv 1909.08593, 2.2."""

    coef: float
    """Weight of the KL in the reward."""
    target: float
    """KL per token to keep; 0 keeps the coefficient as it is."""

    def update(self, kl: float) -> None:
        """Take the mean KL of a batch into account."""
        if self.target > 0:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + 0.1 * error


@dataclass(slots=True, kw_only=True)
class AdaptiveEntropy:
    """A coefficient of the entropy bonus that keeps the entropy from falling below a target: arXiv 2505.22312, 3.2.5.

    After each optimizer step it goes up by `step` where the entropy was at most the target, else down by as much, and
    stays within 0 and 1. A bonus is paid only while the entropy is at most the target.
    """

    coef: float
    """Present coefficient."""
    target: float
    """Entropy per token to keep, nats; 0 leaves the coefficient as it is."""
    step: float
    """Step by which the coefficient moves."""
    is_below: bool = True
    """Whether the entropy was at most the target when it was last seen."""

    @property
    def weight(self) -> float:
        """Coefficient of the bonus in the next optimizer step."""
        return self.coef if self.is_below or self.target == 0 else 0.0

    def update(self, entropy: float) -> None:
        """Take the mean entropy of an optimizer step into account; 0 is that of one without a token to learn from."""
        if self.target > 0 and entropy > 0:
            self.is_below = entropy <= self.target
            self.coef = min(max(self.coef + (self.step if self.is_below else -self.step), 0.0), 1.0)
