"""Advantage estimators. Legend: `T` tokens (packed), `B` rows, `n` rows of one group.

Each is a pure function from `AdvantageInput` to one value per token; positions with loss_mask 0 get 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

import rl_csrc
from rl_trainer.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInput:
    """A batch of completions, packed."""

    rewards: Tensor
    """(T,) float32, a completion's reward on its last model token, turn rewards on the last token of their turn."""
    loss_mask: Tensor
    """(T,) 1 where the model wrote the token."""
    cu_seqlens: Tensor
    """(B + 1,) int64 row offsets into T."""
    group_ids: Tensor
    """(B,) int64, equal for the completions of one prompt."""

    def sum_rewards(self) -> Tensor:
        """(B,) float32, the reward of each completion."""
        return torch.segment_reduce(self.rewards.float(), "sum", offsets=self.cu_seqlens)

    def broadcast(self, per_row: Tensor) -> Tensor:
        """(T,) float32: a row's value at each of its model tokens, 0 elsewhere."""
        lengths = self.cu_seqlens.diff()
        return torch.repeat_interleave(per_row.float(), lengths) * self.loss_mask


AdvantageEstimator = Callable[[AdvantageInput], "Tensor"]
ADVANTAGES: dict[str, AdvantageEstimator] = {}


def register_advantage(name: str, estimator: AdvantageEstimator) -> None:
    """Add an estimator under a name that `algorithm.advantage` can then choose."""
    ADVANTAGES[name] = estimator


def compute_advantages(name: str, data: AdvantageInput) -> Tensor:
    """(T,) float32 advantages by a registered estimator.

    Raises:
        ConfigError: no such estimator; lists them.
    """
    if name not in ADVANTAGES:
        raise ConfigError(f"there is no advantage estimator {name!r}; there are {', '.join(sorted(ADVANTAGES))}")
    return ADVANTAGES[name](data)


def group_relative(data: AdvantageInput, *, mode: Literal["grpo", "dr_grpo", "rloo"]) -> Tensor:
    """A completion's reward against its group's, broadcast over its tokens.

    grpo: (r - mean) / (std + 1e-6), arXiv 2402.03300. dr_grpo: r - mean, arXiv 2503.20783. rloo: r - mean of the
    others, arXiv 2402.14740.
    """
    return data.broadcast(rl_csrc.group_norm(data.sum_rewards(), data.group_ids, mode=mode))


def reinforce_plus_plus(data: AdvantageInput) -> Tensor:
    """Reward-to-go, whitened over the batch's model tokens, arXiv 2501.03262 (gamma 1)."""
    reverse = torch.flip(torch.cumsum(torch.flip(data.rewards.float(), (0,)), 0), (0,))
    after_row = torch.cat([reverse, reverse.new_zeros(1)])[data.cu_seqlens[1:]]
    reward_to_go = reverse - torch.repeat_interleave(after_row, data.cu_seqlens.diff())
    return rl_csrc.whiten(reward_to_go, data.loss_mask) * data.loss_mask


def group_whitened(data: AdvantageInput) -> Tensor:
    """Reward less its group's mean, whitened over the batch's model tokens: REINFORCE++-baseline, arXiv 2501.03262."""
    centered = group_relative(data, mode="dr_grpo")
    return rl_csrc.whiten(centered, data.loss_mask) * data.loss_mask


def best_of_group(data: AdvantageInput) -> Tensor:
    """Only a group's best completion learns: (best - second best) / (std + 1e-6), arXiv 2503.19595 (pass@k).

    0 for the others, where the best is shared, and in groups of one.
    """
    rewards = data.sum_rewards()
    normed = rl_csrc.group_norm(rewards, data.group_ids, mode="grpo")
    advantages = torch.zeros_like(normed)
    for members in _members(data.group_ids):
        if members.numel() > 1:
            best, second = rewards[members].topk(2).indices.tolist()
            advantages[members[best]] = normed[members[best]] - normed[members[second]]
    return data.broadcast(advantages)


def length_weighted(data: AdvantageInput) -> Tensor:
    """Reward less the group's mean weighted by length in model tokens: OPO, arXiv 2505.23585. 0 in groups of one."""
    rewards = data.sum_rewards()
    lengths = torch.segment_reduce(data.loss_mask.float(), "sum", offsets=data.cu_seqlens)
    advantages = torch.zeros_like(rewards)
    for members in _members(data.group_ids):
        weight = lengths[members] / lengths[members].sum().clamp(min=1.0)
        advantages[members] = rewards[members] - (weight * rewards[members]).sum()
    return data.broadcast(advantages)


def gpg(data: AdvantageInput) -> Tensor:
    """Reward less its group's mean, scaled up for the completions without signal: GPG, arXiv 2504.02546.

    The scale is completions / completions of groups whose rewards differ; 0 everywhere if there are none.
    """
    rewards = data.sum_rewards()
    advantages = rl_csrc.group_norm(rewards, data.group_ids, mode="dr_grpo")
    has_signal = torch.zeros_like(rewards)
    for members in _members(data.group_ids):
        has_signal[members] = float(rewards[members].min() != rewards[members].max())
    return data.broadcast(advantages * (rewards.numel() / has_signal.sum().clamp(min=1.0)))


def _members(group_ids: Tensor) -> list[Tensor]:
    """Row numbers of each group."""
    order = torch.argsort(group_ids, stable=True)
    counts = torch.unique_consecutive(group_ids[order], return_counts=True)[1]
    return list(order.split(counts.tolist()))


register_advantage("grpo", partial(group_relative, mode="grpo"))
register_advantage("dr_grpo", partial(group_relative, mode="dr_grpo"))
register_advantage("rloo", partial(group_relative, mode="rloo"))
register_advantage("reinforce_pp", reinforce_plus_plus)
register_advantage("reinforce_pp_baseline", group_whitened)
register_advantage("grpo_passk", best_of_group)
register_advantage("opo", length_weighted)
register_advantage("gpg", gpg)
