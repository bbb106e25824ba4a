"""Moves of rows: to the device, and between token rows and slots.

The backward pass of a move that repeats nothing is a copy, not the serial sum that plain indexing needs. Where rows are
repeated, their gradients are summed in a fixed order, on a GPU too, and in float32 at least.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Which row of a source each row of a result is, where a source's row may come many times."""

    index: Tensor
    """(N,) int64."""
    num_rows: int
    """Of the source."""
    sums: tuple[tuple[Tensor, Tensor], ...]
    """By how often (n) they come: (u,) int64 rows of the source, and the (u * n,) of the result that each became."""


def repeats(index: Tensor, num_rows: int, device: torch.device) -> Repeats:
    """`index` (on the CPU) into `num_rows` rows, made ready for `take_rows`."""
    order = index.sort(stable=True).indices
    counts = torch.bincount(index, minlength=num_rows)
    starts = counts.cumsum(0) - counts
    sums: list[tuple[Tensor, Tensor]] = []
    for count in counts.unique().tolist():
        if count:
            rows = (counts == count).nonzero()[:, 0]
            slots = order[(starts[rows, None] + torch.arange(count)).flatten()]
            sums.append((to_device(rows, device), to_device(slots, device)))
    return Repeats(index=to_device(index, device), num_rows=num_rows, sums=tuple(sums))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on `device`, without waiting for what that still computes."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def take_rows(source: Tensor, index: Tensor | Repeats) -> Tensor:
    """`source[index]` over the first dimension; an entry that comes twice needs `Repeats`."""
    if isinstance(index, Repeats):
        return _RepeatRows.apply(source, index)  # pyright: ignore[reportReturnType]
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


class _RepeatRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Repeats) -> Tensor:
        ctx.repeats = index
        return source.index_select(0, index.index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].new_zeros((ctx.repeats.num_rows, *grads[0].shape[1:]))
        for rows, slots in ctx.repeats.sums:
            copies = grads[0].index_select(0, slots)
            is_alone = len(slots) == len(rows)
            grad.index_copy_(0, rows, copies if is_alone else copies.unflatten(0, (len(rows), -1)).sum(1))
        return grad, None


class _SpreadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return source.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None
