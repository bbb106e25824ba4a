"""Tokens that are chosen over the whole batch, before it is learned from: neither micro-batches nor ranks change them.

Legend: `T` tokens (packed).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from rl_trainer.algorithms.advantages import BatchRanks

if TYPE_CHECKING:
    from collections.abc import Callable

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
    ranks: BatchRanks | None = None,
) -> Tensor:
    """(T,) uint8, 1 at the model tokens that Clip-Cov and KL-Cov (arXiv 2505.22617) treat apart.

    They drive the entropy down. Chosen over the whole batch, seeded, so that neither micro-batches nor ranks change it.

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
        seed: Seed of the draw; clip_cov only.
        ranks: That hold the other tokens of the batch; None: there are no others.
    """
    ranks = ranks or BatchRanks()
    at = torch.nonzero(loss_mask.bool())[:, 0]
    chosen = torch.zeros(loss_mask.shape, dtype=torch.uint8, device=loss_mask.device)
    x, y = logprobs[at].double(), advantages[at].double()
    num, mean_x, mean_y = ranks.sum(torch.stack([x.new_tensor(float(at.numel())), x.sum(), y.sum()])).tolist()
    if num == 0:
        return chosen
    covariance = (x - mean_x / num) * (y - mean_y / num)
    count = max(1, int(share * num))
    if loss == "kl_cov":  # of the largest of every rank, the largest of all
        values, places = covariance.topk(min(count, at.numel()))
        largest = ranks.gather(torch.cat([values, values.new_full((count - values.numel(),), -torch.inf)]))
        ours = largest.flatten().topk(count).indices - ranks.rank * count
        chosen[at[places[ours[(ours >= 0) & (ours < places.numel())]]]] = 1
        return chosen
    candidates = at[(covariance >= low) & (covariance <= high)]
    nums = ranks.gather(x.new_tensor(float(candidates.numel()))).long()
    order = torch.randperm(int(nums.sum()), generator=torch.Generator().manual_seed(seed)).to(candidates.device)
    ours = order[:count] - int(nums[: ranks.rank].sum())
    chosen[candidates[ours[(ours >= 0) & (ours < candidates.numel())]]] = 1
    return chosen


def high_entropy(entropy: Tensor, loss_mask: Tensor, *, share: float, ranks: BatchRanks | None = None) -> Tensor:
    """(T,) uint8, 1 at the `share` of the model tokens of largest entropy: arXiv 2506.01939, equation 5.

    Rounded up; tokens as uncertain as the last one chosen are chosen too.

    Args:
        entropy: (T,) float32 of the distributions that tokens were drawn from, nats.
        loss_mask: (T,) 1 where the model wrote the token.
        share: Above 0, up to 1.
        ranks: That hold the other tokens of the batch; None: there are no others.
    """
    ranks, mask = ranks or BatchRanks(), loss_mask.bool()
    values = entropy[mask].float().clamp(min=0)
    num = float(ranks.sum(torch.tensor([float(values.numel())], dtype=torch.float64)))

    def is_wanted(bound: Tensor) -> bool:
        return float(ranks.sum((values >= bound).sum().double()[None])) >= max(1.0, share * num - 1e-6)

    bound = _largest(is_wanted) if num else torch.zeros(())
    return (mask & (entropy.float().clamp(min=0) >= bound)).to(torch.uint8)


def beyond_moment(
    log_ratio: Tensor, advantages: Tensor, loss_mask: Tensor, *, m2_max: float, ranks: BatchRanks | None = None
) -> Tensor:
    """(T,) uint8, 1 at the tokens that M2PO leaves out: arXiv 2510.01161, algorithm 1.

    Of the tokens whose update leads away from the sampler (the ratio above 1 with a positive advantage, or below 1 with
    a negative one) those of largest log_ratio^2 go, until the mean of log_ratio^2 over the rest is at most `m2_max`;
    equal ones go together.

    Args:
        log_ratio: (T,) log of the ratio trainer / sampler, before the update.
        advantages: (T,).
        loss_mask: (T,) 1 where the model wrote the token.
        m2_max: The second moment that may remain.
        ranks: That hold the other tokens of the batch; None: there are no others.
    """
    ranks = ranks or BatchRanks()
    leads_away = loss_mask.bool() & (log_ratio * advantages > 0)
    moment = log_ratio.float().square()
    values = moment[leads_away]

    def is_small(bound: Tensor) -> bool:
        kept = values[values <= bound].double()
        num, total = ranks.sum(torch.stack([kept.new_tensor(float(kept.numel())), kept.sum()])).tolist()
        return total <= m2_max * num

    return (leads_away & (moment > _largest(is_small))).to(torch.uint8)


def _largest(holds: Callable[[Tensor], bool]) -> Tensor:
    """[] float32, the largest number from 0 up for which `holds`, which holds for 0 and up to a bound.

    Found in 31 questions, exactly: positive floats are ordered as the whole numbers that their bits are.
    """
    low, high = 0, 0x7F800000  # 0 and infinity
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(_float(middle)) else (low, middle)
    return _float(low)


def _float(bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)
