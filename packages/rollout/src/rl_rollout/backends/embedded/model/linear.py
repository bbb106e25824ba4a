"""Linear layers of a served model: weights packed for the CPU, and LoRA adapters beside them.

A layer keeps its place and its weight in the module; what changes is its `forward`. So weight updates, tied weights and
whatever else looks at the module find what they know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear

if TYPE_CHECKING:
    from collections.abc import Mapping

MIN_PACKED_PRODUCTS = 2**19
"""Rows times numbers of the weight; below, what the call of oneDNN costs is more than it saves."""
MOST_ROWS = 256
"""Weights that are too small for packing at this many rows are not packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """One layer of an adapter: x -> scaling * b (a x) is added (LoRA, 2106.09685)."""

    a: Tensor
    """[rank, in]"""
    b: Tensor
    """[out, rank]"""
    scaling: float


@dataclass(slots=True)
class ActiveAdapters:
    """Which tokens of the pass under way belong to which adapter; all layers look here."""

    tokens: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Adapter's name to int64 positions among the packed tokens."""


class ServedLinear:
    """The `forward` of one linear layer."""

    def __init__(self, module: torch.nn.Linear, active: ActiveAdapters, *, is_packed: bool) -> None:
        self._module = module
        self._active = active
        self._is_packed = is_packed
        self._packed: Any = None
        self.adapters: dict[str, LowRank] = {}
        self.repack()

    @property
    def weight(self) -> Tensor:
        """Weight of the layer, [out, in]."""
        return self._module.weight

    def repack(self) -> None:
        """The weight has changed."""
        weight = self._module.weight
        self._packed = None
        if self._is_packed and weight.numel() * MOST_ROWS >= MIN_PACKED_PRODUCTS:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 64)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        bias = self._module.bias
        if self._packed is None or x.numel() * self._module.out_features < MIN_PACKED_PRODUCTS:
            out = linear(x, self._module.weight, bias)
        else:
            out = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        for name, tokens in self._active.tokens.items():
            if name in self.adapters:
                layer = self.adapters[name]
                its = x[0, tokens]
                out[0, tokens] += linear(linear(its, layer.a), layer.b) * layer.scaling
        return out


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch packs weights here: oneDNN, in float32, on a CPU. The products stay float32."""
    is_built = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return is_built and device.type == "cpu" and dtype == torch.float32


def serve_linears(module: torch.nn.Module, active: ActiveAdapters, *, is_packed: bool) -> dict[str, ServedLinear]:
    """Take over the linear layers of a model; by their names."""
    served: dict[str, ServedLinear] = {}
    for name, layer in module.named_modules():
        if type(layer) is torch.nn.Linear:
            served[name] = ServedLinear(layer, active, is_packed=is_packed)
            layer.forward = served[name]  # pyright: ignore[reportAttributeAccessIssue]
    return served
