"""KL to the reference policy in the reward: estimators and the adaptive coefficient. Legend: `T` tokens (packed)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor

K3_MAX = 10.0
KlEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "k3+"]
"""`+`: that value, with the gradient of k2 where it is in the loss."""


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
