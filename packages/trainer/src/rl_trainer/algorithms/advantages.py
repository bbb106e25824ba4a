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


register_advantage("grpo", partial(group_relative, mode="grpo"))
register_advantage("dr_grpo", partial(group_relative, mode="dr_grpo"))
register_advantage("rloo", partial(group_relative, mode="rloo"))
register_advantage("reinforce_pp", reinforce_plus_plus)
