"""Loss functions that any backend takes. Each returns this micro-batch's share of the global value.

Legend: `C` completion tokens of the micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

    from rl_engine.types import ModelOutput


_LOG_HALF = -0.6931471805599453


def sft_loss(output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the completion tokens with `loss_mask` 1, averaged over those of the whole batch.

    Metrics: `accuracy`, the share of those tokens to which the model gives more than half of the probability.
    """
    mask = token_values(rows, "loss_mask", output.logprobs)
    loss = -token_mean(output.logprobs, mask, output)
    likely = (output.logprobs.detach() > _LOG_HALF).to(mask.dtype)
    return loss, {"accuracy": token_mean(likely, mask, output)}


def token_mean(values: Tensor, mask: Tensor, output: ModelOutput) -> Tensor:
    """This micro-batch's share of the masked mean of (C,) `values`; 0 where nothing counts."""
    return (values * mask).sum() / max(output.counts.tokens, 1.0)


def token_values(rows: TensorDict, column: str, like: Tensor) -> Tensor:
    """A ragged column's (C,) values in the number format of `like`."""
    return rows.get(column).values().to(like.dtype)
