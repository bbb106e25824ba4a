"""Linear layers of a served model: weights packed for oneDNN on a CPU, float32 logits on a GPU, LoRA adapters.

Only a layer's `forward` is replaced. Layer and weight stay where they are in the module, so weight updates, tied
weights and whatever else reads the module are unaffected.
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
"""Rows times elements of the weight; below that, calling oneDNN costs more than packing saves."""
MOST_ROWS = 256
"""A weight that stays below `MIN_PACKED_PRODUCTS` even at this many rows is not packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """LoRA adapter of one layer: adds scaling * b (a x) to its output (2106.09685)."""

    a: Tensor
    """[rank, in]"""
    b: Tensor
    """[out, rank]"""
    scaling: float


@dataclass(slots=True)
class ActiveAdapters:
    """Tokens of each adapter in the current forward pass; shared by all layers."""

    tokens: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Adapter's name to int64 indices among the packed tokens."""
    kept: Tensor | None = None
    """int64 indices of the packed tokens that the LM head gets; None before the first pass."""


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits [B, V] of hidden states [B, H] by the LM head's weight [V, H], float32 on a GPU whatever their dtype.

    A product accumulates in float32. Rounding its sums to bfloat16 would move log-probs by some 1e-2 from those of the
    trainer, which scores without that rounding.
    """
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return linear(hidden, weight)


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 of each row of a matrix [N, H]: values int8 [N, H] and scales [N, 1], float32."""
    rows = rows.float()
    scales = rows.abs().amax(1, keepdim=True).clamp_(min=1e-12) / 127
    return (rows / scales).round_().to(torch.int8), scales


def int8_linear(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Product of x [..., in] and an int8 weight [out, in] with its scales [out, 1]; x is quantised by token.

    The sums are of integers, and so exact: a token's result does not depend on the tokens computed with it.
    """
    tokens, token_scales = quantise(x.flatten(0, -2))
    out = torch.ops.aten._int_mm(tokens, weight.t()) * token_scales * scales.t()
    return out.to(x.dtype).unflatten(0, x.shape[:-1])


class ServedLinear:
    """The `forward` of one linear layer.

    Args:
        module: The layer.
        active: Tokens of each adapter, set before a pass.
        is_packed: Whether its weight is packed for oneDNN.
        is_head: Whether it is the LM head, whose product is stored as `head_logits` does.
        is_int8: Whether products are of int8.
    """

    def __init__(
        self,
        module: torch.nn.Linear,
        active: ActiveAdapters,
        *,
        is_packed: bool,
        is_head: bool = False,
        is_int8: bool = False,
    ) -> None:
        self._module = module
        self._active = active
        self._is_packed = is_packed
        self._gets_kept = is_head
        self._is_head = is_head and getattr(module, "bias", None) is None
        self._is_int8 = is_int8
        self._packed: Any = None
        self._int8: tuple[Tensor, Tensor] | None = None
        self.adapters: dict[str, LowRank] = {}
        self.repack()

    @property
    def weight(self) -> Tensor:
        """Weight of the layer, [out, in]."""
        return self._module.weight

    def repack(self) -> None:
        """Pack or quantise the weight again, after it has changed."""
        weight = self._module.weight
        self._packed = self._int8 = None
        if self._is_int8 and weight.numel():
            self._int8 = quantise(weight.detach())
        elif self._is_packed and weight.numel() * MOST_ROWS >= MIN_PACKED_PRODUCTS:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 64)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        bias: Tensor | None = getattr(self._module, "bias", None)
        if self._is_head and x.is_cuda:
            out = head_logits(x.flatten(0, -2), self._module.weight).unflatten(0, x.shape[:-1])
        elif self._int8 is not None:
            out = int8_linear(x, *self._int8)
            out = out if bias is None else out + bias
        elif self._packed is None or x.numel() * self._module.out_features < MIN_PACKED_PRODUCTS:
            out = linear(x, self._module.weight, bias)
        else:
            out = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        for name, tokens in self._active.tokens.items():
            if name in self.adapters:
                layer = self.adapters[name]
                if self._gets_kept and self._active.kept is not None:
                    tokens = torch.isin(self._active.kept, tokens).nonzero()[:, 0]
                its = x[0, tokens]
                out[0, tokens] += linear(linear(its, layer.a), layer.b) * layer.scaling
        return out


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch can pack weights here: oneDNN, float32, on a CPU. Products stay float32."""
    is_built = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return is_built and device.type == "cpu" and dtype == torch.float32


def serve_linears(
    module: torch.nn.Module, active: ActiveAdapters, *, is_packed: bool, is_int8: bool = False
) -> dict[str, ServedLinear]:
    """Replace the `forward` of every linear layer of a model; returns the replacements by layer name."""
    served: dict[str, ServedLinear] = {}
    head: Any = getattr(module, "get_output_embeddings", lambda: None)()
    for name, layer in module.named_modules():
        if type(layer) is torch.nn.Linear:
            is_head = layer is head
            served[name] = ServedLinear(layer, active, is_packed=is_packed, is_head=is_head, is_int8=is_int8)
            layer.forward = served[name]  # pyright: ignore[reportAttributeAccessIssue]
    return served
