"""The native module as the other files see it, and the memory its kernels write to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_csrc import _cpu

native: Any = _cpu


def new_floats(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32)


def with_adjacent_columns(logits: Tensor) -> Tensor:
    """Logits whose columns are adjacent, as the kernels want them."""
    return logits if logits.stride(1) == 1 or logits.shape[1] < 2 else logits.contiguous()
