"""Estimators that compare whole completions of one prompt; a completion's advantage stands at each of its tokens.

A rollout of several trajectories is one completion here: its reward is their mean, its length their sum, and each of
them has its advantage.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Literal

import torch

import rl_csrc
from rl_trainer.algorithms.advantages import AdvantageInput, members_of, register_advantage

if TYPE_CHECKING:
    from torch import Tensor


def grpo(data: AdvantageInput) -> Tensor:
    """Reward less the group's mean, over its deviation + 1e-6: GRPO, arXiv 2402.03300. As it is in groups of one."""
    return _against_group(data, "grpo")


def dr_grpo(data: AdvantageInput) -> Tensor:
    """Reward less the group's mean: Dr. GRPO, arXiv 2503.20783."""
    return _against_group(data, "dr_grpo")


def rloo(data: AdvantageInput) -> Tensor:
    """Reward less the mean of the group's others: RLOO, arXiv 2402.14740. 0 in groups of one, with a warning."""
    rollouts = data.rollouts()
    if (count := sum(members.numel() == 1 for members in members_of(rollouts.group_ids))) > 0:
        warnings.warn(
            f"{count} of {rollouts.group_ids.unique().numel()} groups have one completion, with which rloo can compare "
            "nothing: their advantages are 0",
            stacklevel=2,
        )
    return _against_group(data, "rloo")


def group_whitened(data: AdvantageInput) -> Tensor:
    """Reward less its group's mean, whitened over the batch's model tokens: REINFORCE++-baseline, arXiv 2501.03262."""
    centered = dr_grpo(data)
    return rl_csrc.whiten(centered, data.loss_mask) * data.loss_mask


def best_of_group(data: AdvantageInput) -> Tensor:
    """Only a group's best completion learns: (best - second best) / (std + 1e-6), arXiv 2503.19595 (pass@k).

    0 for the others, where the best is shared, and in groups of one.
    """
    rollouts = data.rollouts()
    rewards = rollouts.mean(data.sum_rewards())
    normed = rl_csrc.group_norm(rewards, rollouts.group_ids, mode="grpo")
    advantages = torch.zeros_like(normed)
    for members in members_of(rollouts.group_ids):
        if members.numel() > 1:
            best, second = rewards[members].topk(2).indices.tolist()
            advantages[members[best]] = normed[members[best]] - normed[members[second]]
    return data.broadcast(rollouts.to_rows(advantages))


def length_weighted(data: AdvantageInput) -> Tensor:
    """Reward less the group's mean weighted by length in model tokens: OPO, arXiv 2505.23585. 0 in groups of one."""
    rollouts = data.rollouts()
    rewards = rollouts.mean(data.sum_rewards())
    lengths = rollouts.sum(data.sum_rows(data.loss_mask))
    advantages = torch.zeros_like(rewards)
    for members in members_of(rollouts.group_ids):
        weight = lengths[members] / lengths[members].sum().clamp(min=1.0)
        advantages[members] = rewards[members] - (weight * rewards[members]).sum()
    return data.broadcast(rollouts.to_rows(advantages))


def gpg(data: AdvantageInput) -> Tensor:
    """Reward less its group's mean, scaled up for the completions without signal: GPG, arXiv 2504.02546.

    The scale is completions / completions of groups whose rewards differ; 0 everywhere if there are none.
    """
    rollouts = data.rollouts()
    rewards = rollouts.mean(data.sum_rewards())
    advantages = rl_csrc.group_norm(rewards, rollouts.group_ids, mode="dr_grpo")
    has_signal = torch.zeros_like(rewards)
    for members in members_of(rollouts.group_ids):
        has_signal[members] = float(rewards[members].min() != rewards[members].max())
    scale = rewards.numel() / has_signal.sum().clamp(min=1.0)
    return data.broadcast(rollouts.to_rows(advantages * scale))


def group_reward_decoupled(data: AdvantageInput) -> Tensor:
    """Each part of the reward normalised in its group (grpo), weighted, added, and whitened: GDPO, arXiv 2601.05242.

    Whitened over the batch's model tokens. Parts of different scale weigh the same, which one sum of them would not.
    """
    components = data.needed("components")
    weights = data.component_weights if data.component_weights is not None else components.new_ones(components.shape[1])
    rollouts = data.rollouts()
    total = torch.zeros(components.shape[0], dtype=torch.float32, device=components.device)
    for rewards, weight in zip(components.float().unbind(1), weights.tolist(), strict=True):
        normed = rl_csrc.group_norm(rollouts.mean(rewards), rollouts.group_ids, mode="grpo")
        total += weight * rollouts.to_rows(normed)
    return rl_csrc.whiten(data.broadcast(total), data.loss_mask) * data.loss_mask


def _against_group(data: AdvantageInput, mode: Literal["grpo", "dr_grpo", "rloo"]) -> Tensor:
    rollouts = data.rollouts()
    normed = rl_csrc.group_norm(rollouts.mean(data.sum_rewards()), rollouts.group_ids, mode=mode)
    return data.broadcast(rollouts.to_rows(normed))


register_advantage("grpo", grpo)
register_advantage("dr_grpo", dr_grpo, compares_group=True)
register_advantage("rloo", rloo, compares_group=True)
register_advantage("reinforce_pp_baseline", group_whitened, compares_group=True)
register_advantage("grpo_passk", best_of_group, compares_group=True)
register_advantage("opo", length_weighted, compares_group=True)
register_advantage("gpg", gpg, compares_group=True)
register_advantage("gdpo", group_reward_decoupled, needs=("components",))
