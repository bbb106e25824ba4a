"""Moves of rows: to the device, and between token rows and slots.

The backward pass of the latter is a copy, not the serial sum that plain indexing needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on `device`, without waiting for what that still computes."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def take_rows(source: Tensor, index: Tensor) -> Tensor:
    """`source[index]` over the first dimension, where no entry of `index` comes twice."""
    return _TakeRows.apply(source, index)  # pyright: ignore[reportReturnType]


def spread_rows(source: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """`source[index]` where `index` repeats rows as padding; only the slots in `inverse` send a gradient back.

    `index[inverse]` is 0, 1, ...; nothing but zero may flow back into the other slots.
    """
    return _SpreadRows.apply(source, index, inverse)  # pyright: ignore[reportReturnType]


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = source.shape[0]
        return source.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        grad = grads[0].new_zeros((ctx.num_rows, *grads[0].shape[1:]))
        return grad.index_copy_(0, index, grads[0]), None


class _SpreadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return source.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None
