"""Argument checks and conversions that the public ops share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_csrc.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence


def check_one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse an option that is not in the list, naming the list."""
    if value not in allowed:
        raise ArgumentError(f"{name} is {value!r}; allowed are {', '.join(allowed)}.")


def check_same_length(name: str, x: Tensor | None, num: int) -> None:
    """Refuse a per-token tensor that is not `[num]`."""
    if x is not None and (x.dim() != 1 or x.shape[0] != num):
        raise ArgumentError(f"{name} has shape {list(x.shape)}; wanted [{num}], one entry per token.")


def check_rows(logits: Tensor, labels: Tensor, row_index: Tensor | None) -> None:
    """Refuse logits that are not `[R, V]` and labels that are not `[T]`, T = R unless a row index says otherwise."""
    if logits.dim() != 2 or labels.dim() != 1:
        raise ArgumentError(
            f"logits has shape {list(logits.shape)} and labels {list(labels.shape)}; "
            "wanted [rows, vocabulary] and [tokens]. Flatten the batch first."
        )
    if row_index is None and labels.shape[0] != logits.shape[0]:
        raise ArgumentError(
            f"{labels.shape[0]} labels for {logits.shape[0]} rows of logits; "
            "give as many, or say with row_index which row each scores."
        )
    if row_index is not None and row_index.shape != labels.shape:
        raise ArgumentError(
            f"row_index has shape {list(row_index.shape)}; wanted that of labels, {list(labels.shape)}."
        )


def integers(x: Tensor) -> Tensor:
    """Return x as contiguous int64, without a copy where it is so already."""
    return x if x.dtype is torch.int64 and x.is_contiguous() else x.to(torch.int64).contiguous()


def optional_integers(x: Tensor | None) -> Tensor | None:
    """As `integers`, None passing through."""
    return None if x is None else integers(x)


def booleans(mask: Tensor | None) -> Tensor | None:
    """Return a 0/1 mask as contiguous bool, None passing through."""
    return None if mask is None else mask.to(torch.bool).contiguous()


def floats(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Return x detached and contiguous in float32, or float64 where `like` (default: x) is."""
    wanted = torch.float64 if (x if like is None else like).dtype is torch.float64 else torch.float32
    if x.dtype is wanted and not x.requires_grad and x.is_contiguous():
        return x
    return x.detach().to(wanted).contiguous()


def optional_floats(x: Tensor | None, like: Tensor) -> Tensor | None:
    """As `floats`, None passing through."""
    return None if x is None else floats(x, like)


def per_token(value: float | Tensor, num: int, name: str) -> float | Tensor:
    """Return a number as float, or a tensor as float32 `[num]`."""
    if not isinstance(value, Tensor):
        return float(value)
    if value.dim() == 0:
        value = value.expand(num)
    check_same_length(name, value, num)
    return value.detach().to(torch.float32).contiguous()
