"""Losses of models trained with the policy: the value function, and the implicit process reward model (PRIME)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from rl_trainer.algorithms.aggregation import Aggregation, row_of, row_sums

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

    from rl_engine.types import ModelOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLossFunction:
    """Half the larger of the clipped and the plain squared error over model tokens (PPO, arXiv 1707.06347).

    Reads the columns `values` (before the update), `returns` and `loss_mask`. `value_clipped` is the share of tokens
    whose value left the bounds and whose clipped error is the larger one: those have no gradient.
    """

    clip: float
    """A value may leave its old one by this much before it stops being pulled; 0 turns clipping off."""
    aggregation: Aggregation = field(default_factory=Aggregation)
    """Aggregation of token errors."""

    def __call__(self, output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss share and metric shares of one micro-batch."""
        mask = rows["loss_mask"].values().bool()
        old, returns = (torch.where(mask, rows[name].values(), 0.0) for name in ("values", "returns"))
        values = output.values
        error = (values - returns).square()
        count = max(output.counts.tokens, 1.0)
        metrics = {"value_mean": torch.where(mask, values.detach(), 0.0).sum() / count}
        if self.clip > 0:
            distance = (values - old).detach()
            bounded = (old + distance.clamp(-self.clip, self.clip) - returns).square()
            clipped = (distance.abs() > self.clip) & (bounded > error) & mask  # within the clip they differ by rounding
            error = torch.where(clipped, bounded, error)
            metrics["value_clipped"] = clipped.sum().float() / count
        loss = self.aggregation.share(0.5 * error, mask, output.cu_seqlens, output.counts)
        return loss, metrics | {"value_loss": loss.detach()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRewardLoss:
    """Cross-entropy of a completion's outcome and `sigmoid(beta * log-ratio)`: PRIME, arXiv 2502.01456, equation 5.

    The log-ratio is that of the whole completion under the model and under the reference, so that what each token adds
    to it becomes its reward. Mean over completions. Reads the columns `ref_logprobs`, `rewards` (which add up to
    the outcome, 0 to 1) and `loss_mask`.
    """

    beta: float = 0.05
    """Scale of the log-ratio; by default that of the paper's experiments."""

    def __call__(self, output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss share and metric shares of one micro-batch."""
        mask = rows["loss_mask"].values().bool()
        rows_of = row_of(output.cu_seqlens, mask.numel())

        def per_row(values: Tensor) -> Tensor:
            return row_sums(values, rows_of, output.cu_seqlens)

        ratio = torch.where(mask, output.logprobs - rows["ref_logprobs"].values(), 0.0)
        logits, outcomes = self.beta * per_row(ratio), per_row(rows["rewards"].values().float())
        counts = per_row(mask.float()) > 0
        losses = binary_cross_entropy_with_logits(logits, outcomes, reduction="none")
        count = max(output.counts.sequences, 1.0)
        loss = torch.where(counts, losses, 0.0).sum() / count
        is_right = ((logits > 0) == (outcomes > 0.5)) & counts
        return loss, {"process_loss": loss.detach(), "process_accuracy": is_right.sum().float() / count}
