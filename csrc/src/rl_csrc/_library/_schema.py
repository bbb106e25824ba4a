"""What the registrations share: the decorator, and how optional values cross a schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.library import custom_op

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def op(name: str, schema: str, mutates: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """Register a function as `torch.ops.rl_csrc.<name>`."""
    return cast("Callable[[Any], Any]", custom_op(f"rl_csrc::{name}", mutates_args=mutates, schema=schema))


def filled(x: Tensor | None, like: Tensor) -> Tensor:
    """An optional result as a schema returns it: empty for None."""
    return like.new_empty(0) if x is None else x


def split(value: float | Tensor) -> tuple[Tensor | None, float]:
    """A number or tensor as the two arguments a schema has for it."""
    return (value, 1.0) if isinstance(value, torch.Tensor) else (None, float(value))


def number(tensor: Tensor | None, scalar: float) -> float | Tensor:
    """The two arguments of a schema as the number or tensor they are."""
    return scalar if tensor is None else tensor


def float_type(x: Tensor) -> torch.dtype:
    """What results are in: float32, or float64 where `x` is."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
