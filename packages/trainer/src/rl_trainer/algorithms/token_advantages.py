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
    """Reward-to-go less the baseline of least variance for its position in the completion, arXiv 2602.07078.

    With W_t = sum over the model tokens up to t of (1 - 2 pi + sum_v pi_v^2) [times the squared weight of rollout
    correction, where there is one] of a row, a position's baseline is sum_i G_i W_i / sum_i W_i over the group's rows
    with a model token there. It is 0 where fewer than two rollouts have one: none is its own baseline.
    """
    lengths = data.cu_seqlens.diff()
    return _less_baseline(data, _running(torch.ones_like(data.loss_mask).double(), data.cu_seqlens[:-1], lengths))


def optimal_token_baseline_with_tools(data: AdvantageInput) -> Tensor:
    """As `optimal_token_baseline`, positions counting the model's tokens alone, which tools would put out of line."""
    return _less_baseline(data, _running(data.loss_mask.double(), data.cu_seqlens[:-1], data.cu_seqlens.diff()))


def _less_baseline(data: AdvantageInput, position: Tensor) -> Tensor:
    """(T,) float32 reward-to-go less the baseline of `position`, (T,) whole numbers."""
    mask = data.loss_mask.bool()
    to_go = reward_to_go(data).double()
    energy = 1 - 2 * data.needed("logprobs").double().exp() + data.needed("sum_pi_squared").double()
    if data.weights is not None:
        energy = energy * data.weights.double() ** 2
    rollouts, lengths = data.rollouts(), data.cu_seqlens.diff()
    share = rollouts.to_rows(1 / rollouts.sum(torch.ones_like(data.group_ids)))  # a rollout's trajectories share it
    energy = torch.where(mask, energy.clamp(min=0), 0.0) * share.repeat_interleave(lengths)  # below 0 by rounding alone
    weight = _running(energy, data.cu_seqlens[:-1], lengths)
    rows = torch.arange(lengths.numel(), device=mask.device).repeat_interleave(lengths)[mask]
    groups = data.group_ids.unique(return_inverse=True)[1]
    size = int(lengths.max()) + 1 if lengths.numel() else 1
    slot = groups[rows] * size + position[mask].long()
    nothing = torch.zeros((int(groups.max()) + 1 if groups.numel() else 0) * size, dtype=torch.float64).to(mask.device)
    weights = nothing.index_add(0, slot, weight[mask])
    weighted = nothing.index_add(0, slot, weight[mask] * to_go[mask])
    num_rollouts = rollouts.group_ids.numel()
    reached = torch.unique(slot * num_rollouts + rollouts.of_row[rows]) // num_rollouts
    is_shared = torch.bincount(reached, minlength=nothing.numel()) > 1
    baseline = torch.where(is_shared & (weights > 0), weighted / weights.clamp(min=1e-300), 0.0)
    advantages = torch.zeros_like(to_go)
    advantages[mask] = to_go[mask] - baseline[slot]
    return advantages.float()


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


_AHEAD, _LAMBDA = ("gamma",), ("gamma", "lam")
register_advantage("gae", gae, needs=("values",), keys=_LAMBDA)
register_advantage("vtrace", vtrace, needs=("values", "ratio"), keys=_LAMBDA)
register_advantage("reinforce_pp", reinforce_plus_plus, keys=_AHEAD)
register_advantage("remax", remax, needs=("greedy_rewards",), keys=_AHEAD)
for _name, _compute in (
    ("optimal_token_baseline", optimal_token_baseline),
    ("tir_optimal_token_baseline", optimal_token_baseline_with_tools),
):
    _needs = ("logprobs", "sum_pi_squared")
    register_advantage(_name, _compute, needs=_needs, compares_group=True, keys=_AHEAD, uses_weights=True)
register_advantage("prime", prime, needs=("process_rewards",), compares_group=True, keys=_AHEAD)
