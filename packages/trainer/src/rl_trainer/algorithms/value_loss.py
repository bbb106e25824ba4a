"""The loss that the trainer injects into the critic's engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

    from rl_engine.types import ModelOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLossFunction:
    """Half the larger of the clipped and the plain squared error, mean over model tokens (PPO, arXiv 1707.06347).

    Reads the columns `values` (before the update), `returns` and `loss_mask`.
    """

    clip: float
    """A value may leave its old one by this much before it stops being pulled; 0 turns clipping off."""

    def __call__(self, output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss share and metric shares of one micro-batch."""
        mask = rows["loss_mask"].values().bool()
        old, returns = (torch.where(mask, rows[name].values(), 0.0) for name in ("values", "returns"))
        values = output.values
        error = (values - returns).square()
        clipped = torch.zeros_like(mask)
        if self.clip > 0:
            near = old + (values - old).clamp(-self.clip, self.clip)
            error_near = (near - returns).square()
            clipped = (error_near > error) & mask
            error = torch.maximum(error, error_near)
        count = max(output.counts.tokens, 1.0)
        loss = 0.5 * torch.where(mask, error, 0.0).sum() / count
        metrics = {
            "value_loss": loss.detach(),
            "value_mean": torch.where(mask, values.detach(), 0.0).sum() / count,
            "value_clipped": clipped.sum().float() / count,
        }
        return loss, metrics
