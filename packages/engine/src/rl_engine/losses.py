"""Loss functions that any backend takes. Each returns this micro-batch's share of the global value.

Legend: `C` completion tokens of the micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

    from rl_engine.types import ModelOutput


_LOG_HALF = -0.6931471805599453


def sft_loss(output: ModelOutput, rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the completion tokens with `loss_mask` 1, averaged over those of the whole batch.

    Metrics: `accuracy`, the share of those tokens to which the model gives more than half of the probability, and
    `sequence_accuracy`, the share of rows in which it does so for every one of them: greedy decoding reproduces those.
    """
    mask = token_values(rows, "loss_mask", output.logprobs)
    loss = -token_mean(output.logprobs, mask, output)
    likely = (output.logprobs.detach() > _LOG_HALF).to(mask.dtype)
    lengths = output.cu_seqlens.diff()
    row_of = torch.arange(lengths.numel(), device=mask.device).repeat_interleave(lengths)
    counted, right = mask.new_zeros(2, lengths.numel()).index_add_(1, row_of, torch.stack([mask, mask * likely]))
    is_exact = (counted > 0) & (counted == right)
    exact = is_exact.to(mask.dtype).sum() / max(output.counts.sequences, 1.0)
    return loss, {"accuracy": token_mean(likely, mask, output), "sequence_accuracy": exact}


def token_mean(values: Tensor, mask: Tensor, output: ModelOutput) -> Tensor:
    """This micro-batch's share of the masked mean of (C,) `values`; 0 where nothing counts."""
    return (values * mask).sum() / max(output.counts.tokens, 1.0)


def token_values(rows: TensorDict, column: str, like: Tensor) -> Tensor:
    """A ragged column's (C,) values in the number format of `like`."""
    return rows.get(column).values().to(like.dtype)
