"""Float32 linear layers on a CPU by oneDNN, whose products are faster there than those of torch's own BLAS."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_PRODUCTS = 2**26
"""Tokens times elements of the weight; a layer with fewer gains too little and keeps torch's order of sums."""


def use_onednn(model: nn.Module) -> None:
    """Let the linear layers of a model compute by oneDNN where they can: float32, plain tensors, on a CPU."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_forward, module, module.forward)  # pyright: ignore[reportAttributeAccessIssue]


def _forward(module: nn.Linear, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    weight = module.weight
    is_float = x.dtype == weight.dtype == torch.float32 and x.device.type == weight.device.type == "cpu"
    if not is_float or isinstance(weight, DTensor) or x.numel() * module.out_features < MIN_PRODUCTS:
        return plain(x)
    return _Linear.apply(x, weight, module.bias)  # pyright: ignore[reportReturnType]


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """x [..., in], weight [out, in] and bias [out] or None to [..., out]; the weight's gradient is torch's product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs, grad = ctx.needs_input_grad, grads[0]
        rows = grad.flatten(0, -2)
        return (
            _multiply(grad, weight.t()) if needs[0] else None,
            rows.t() @ x.flatten(0, -2) if needs[1] else None,
            rows.sum(0) if needs[2] else None,
        )
