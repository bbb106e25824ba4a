"""Batches as an engine takes them, from lists."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def ragged(rows: Sequence[Sequence[float]] | Sequence[Tensor], dtype: torch.dtype = torch.int64) -> Tensor:
    """Rows as one jagged nested tensor."""
    if not rows:
        return torch.nested.nested_tensor_from_jagged(torch.empty(0, dtype=dtype), torch.zeros(1, dtype=torch.int64))
    return torch.nested.nested_tensor([torch.as_tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def ragged_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    loss_mask: Sequence[Sequence[int]] | None = None,
) -> TensorDict:
    """A batch as an engine takes it; every completion token counts unless `loss_mask` says otherwise."""
    mask = [[1] * len(row) for row in completions] if loss_mask is None else loss_mask
    columns = {
        "prompt_token_ids": ragged(prompts),
        "completion_token_ids": ragged(completions),
        "loss_mask": ragged(mask),
    }
    return TensorDict(columns, batch_size=[len(prompts)])  # pyright: ignore[reportArgumentType]
