"""Tokens that a policy loss treats apart because they drive the entropy down: Clip-Cov and KL-Cov, arXiv 2505.22617.

Chosen over the whole batch, seeded, so that neither micro-batches nor ranks change the choice. Legend: `T` tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor


def select_tokens(
    logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    loss: Literal["clip_cov", "kl_cov"],
    share: float,
    low: float = 1.0,
    high: float = 5.0,
    seed: int = 0,
) -> Tensor:
    """(T,) uint8, 1 at the chosen model tokens.

    A token's covariance is (logprob - mean logprob) (advantage - mean advantage), means over the model tokens.

    Args:
        logprobs: (T,) before the update.
        advantages: (T,).
        loss_mask: (T,) 1 where the model wrote the token.
        loss: `clip_cov`: at random among the tokens whose covariance is within [low, high]; `kl_cov`: those of the
            largest covariance.
        share: Share of the model tokens to choose; at least one is chosen where there are candidates.
        low: Lower bound; clip_cov only.
        high: Upper bound; clip_cov only.
        seed: Of the draw; clip_cov only.
    """
    at = torch.nonzero(loss_mask.bool())[:, 0]
    chosen = torch.zeros(loss_mask.shape, dtype=torch.uint8, device=loss_mask.device)
    if at.numel() == 0:
        return chosen
    x, y = logprobs[at].double(), advantages[at].double()
    covariance = (x - x.mean()) * (y - y.mean())
    count = max(1, int(share * at.numel()))
    if loss == "kl_cov":
        chosen[at[covariance.topk(count).indices]] = 1
        return chosen
    candidates = at[(covariance >= low) & (covariance <= high)]
    order = torch.randperm(candidates.numel(), generator=torch.Generator().manual_seed(seed)).to(candidates.device)
    chosen[candidates[order[:count]]] = 1
    return chosen
