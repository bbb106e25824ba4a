"""Estimators with a value of their own at each token: recurrences over a completion, and baselines per position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import rl_csrc
from rl_trainer.algorithms.advantages import AdvantageInput, members_of, register_advantage

if TYPE_CHECKING:
    from torch import Tensor


def reward_to_go(data: AdvantageInput, rewards: Tensor | None = None) -> Tensor:
    """(T,) float32, G_t = R_t + gamma G_{t+1} at model tokens, 0 elsewhere; of `data.rewards` or of others."""
    rewards = data.rewards if rewards is None else rewards
    scan = rl_csrc.scan_reverse(
        rewards, None, data.cu_seqlens, loss_mask=data.loss_mask, kind="returns", gamma=data.gamma, mask_mode="compress"
    )
    return scan.returns


def value_scan(data: AdvantageInput, kind: str) -> rl_csrc.Scan:
    """Advantages (not whitened) and returns (what the critic learns), (T,) float32 each, by `gae` or `vtrace`."""
    return rl_csrc.scan_reverse(
        data.rewards,
        data.needed("values"),
        data.cu_seqlens,
        loss_mask=data.loss_mask,
        kind=kind,  # pyright: ignore[reportArgumentType] - one of the two
        gamma=data.gamma,
        lam=data.lam,
        rho=data.needed("ratio") if kind == "vtrace" else None,
        mask_mode="compress",
    )


def gae(data: AdvantageInput) -> Tensor:
    """Generalized advantage estimation over model tokens, whitened over those of the batch, arXiv 1506.02438."""
    return rl_csrc.whiten(value_scan(data, "gae").advantages, data.loss_mask) * data.loss_mask


def vtrace(data: AdvantageInput) -> Tensor:
    """Off-policy corrected advantages: V-trace, arXiv 1802.01561, ratios truncated at 1."""
    return value_scan(data, "vtrace").advantages


def reinforce_plus_plus(data: AdvantageInput) -> Tensor:
    """Discounted reward-to-go, whitened over the batch's model tokens, arXiv 2501.03262."""
    return rl_csrc.whiten(reward_to_go(data), data.loss_mask) * data.loss_mask


def remax(data: AdvantageInput) -> Tensor:
    """Reward-to-go less the reward of the prompt's greedy completion: ReMax, arXiv 2310.10505."""
    return (reward_to_go(data) - data.broadcast(data.needed("greedy_rewards"))) * data.loss_mask


def optimal_token_baseline(data: AdvantageInput) -> Tensor:
    """Reward-to-go less the baseline of least variance for its position, arXiv 2602.07078.

    With W_t = sum over the tokens up to t of (1 - 2 pi + sum_v pi_v^2) [times the squared ratio trainer / sampler,
    where it is given] of a row, a position's baseline is sum_i G_i W_i / sum_i W_i over the group's rows that reach it.
    Positions count model tokens only.
    """
    lengths = data.cu_seqlens.diff()
    return _less_baseline(data, _running(data.loss_mask.double(), data.cu_seqlens[:-1], lengths).long() - 1)


def optimal_turn_baseline(data: AdvantageInput) -> Tensor:
    """As `optimal_token_baseline`, one baseline for all tokens of a group's k-th turns, which tools put out of line."""
    return _less_baseline(data, _turns(data))


def _less_baseline(data: AdvantageInput, position: Tensor) -> Tensor:
    """(T,) float32 reward-to-go less the baseline of `position`, (T,) int64."""
    mask = data.loss_mask.bool()
    to_go = reward_to_go(data).double()
    energy = 1 - 2 * data.needed("logprobs").double().exp() + data.needed("sum_pi_squared").double()
    if data.ratio is not None:
        energy = energy * data.ratio.double() ** 2
    rollouts = data.rollouts()  # of several trajectories of one, each has its share of a weight
    share = rollouts.to_rows(1 / rollouts.sum(torch.ones_like(data.group_ids)))
    energy = torch.where(mask, energy, 0.0) * share.repeat_interleave(data.cu_seqlens.diff())
    starts = data.cu_seqlens[:-1]
    lengths = data.cu_seqlens.diff()
    weight = _running(energy, starts, lengths)
    row_of = torch.arange(lengths.numel(), device=mask.device).repeat_interleave(lengths)
    baseline = torch.zeros_like(to_go)
    for members in members_of(data.group_ids):
        at = torch.isin(row_of, members) & mask
        where, slot = torch.nonzero(at)[:, 0], position[at]
        total = torch.zeros(int(slot.max()) + 1 if slot.numel() else 0, dtype=torch.float64, device=mask.device)
        weights = total.index_add(0, slot, weight[where])
        weighted = total.index_add(0, slot, weight[where] * to_go[where])
        baseline[where] = torch.where(weights > 0, weighted / weights.clamp(min=1e-12), 0.0)[slot]
    return ((to_go - baseline) * mask).float()


def prime(data: AdvantageInput) -> Tensor:
    """Implicit process reward plus outcome, each against the group's other completions: PRIME, arXiv 2502.01456.

    The process part is the reward-to-go of (r_t - mean over the others of their mean r), the outcome part is that of
    rloo; both are added, and stand at every model token.
    """
    mask = data.loss_mask.bool()
    process = torch.where(mask, data.needed("process_rewards").float(), 0.0)
    rollouts = data.rollouts()
    counts = data.sum_rows(data.loss_mask).clamp(min=1.0)
    means = rollouts.mean(data.sum_rows(process) / counts)
    baseline = data.broadcast(rollouts.to_rows(_mean_of_others(means, rollouts.group_ids)))
    outcomes = rl_csrc.group_norm(rollouts.mean(data.sum_rewards()), rollouts.group_ids, mode="rloo")
    return (reward_to_go(data, process - baseline) + data.broadcast(rollouts.to_rows(outcomes))) * mask


def _mean_of_others(values: Tensor, group_ids: Tensor) -> Tensor:
    """(S,) mean over the other rollouts of each one's group; its own value where there is none."""
    means = values.clone()
    for members in members_of(group_ids):
        if (n := members.numel()) > 1:
            means[members] = (values[members].sum() - values[members]) / (n - 1)
    return means


def _running(per_token: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """(T,) sum from a row's first token up to each."""
    total = per_token.cumsum(0)
    before = torch.cat([total.new_zeros(1), total])[starts]
    return total - before.repeat_interleave(lengths)


def _turns(data: AdvantageInput) -> Tensor:
    """(T,) int64 number of the turn that each model token belongs to: a turn is a run of model tokens."""
    mask = data.loss_mask.long()
    before = torch.cat([mask.new_zeros(1), mask[:-1]])
    before[data.cu_seqlens[:-1][data.cu_seqlens.diff() > 0]] = 0
    begins = (mask == 1) & (before == 0)
    return _running(begins.double(), data.cu_seqlens[:-1], data.cu_seqlens.diff()).long() - 1


_AHEAD, _LAMBDA = ("gamma",), ("gamma", "lam")
register_advantage("gae", gae, needs=("values",), keys=_LAMBDA)
register_advantage("vtrace", vtrace, needs=("values", "ratio"), keys=_LAMBDA)
register_advantage("reinforce_pp", reinforce_plus_plus, keys=_AHEAD)
register_advantage("remax", remax, needs=("greedy_rewards",), keys=_AHEAD)
_OTB = ("logprobs", "sum_pi_squared")
register_advantage("optimal_token_baseline", optimal_token_baseline, needs=_OTB, compares_group=True, keys=_AHEAD)
register_advantage("tir_optimal_token_baseline", optimal_turn_baseline, needs=_OTB, compares_group=True, keys=_AHEAD)
register_advantage("prime", prime, needs=("process_rewards",), compares_group=True, keys=_AHEAD)
