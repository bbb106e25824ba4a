"""Gated delta nets (Yang et al., 2412.06464) over packed rows: convolution and recurrent state begin anew in each row.

Rows of like length that are neighbours are computed together, padded on the right, where causality hides it; the layer
itself is transformers'.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_engine.batch.packed import take_rows
from rl_engine.layers.packed_attention import LAYOUT_KWARG, to_block

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_engine.layers.packed_attention import RowLayout

LINEAR_LAYER = "linear_attention"
"""Layer type of a gated delta net in a config, among others."""


def delta_nets(model: nn.Module) -> list[nn.Module]:
    """Gated delta nets of transformers, as Qwen3-Next and Qwen3.5 have them."""
    return [module for module in model.modules() if type(module).__name__.endswith("GatedDeltaNet")]


def pack_delta_nets(model: nn.Module) -> None:
    """Let every gated delta net of a model take packed rows with their `RowLayout`. Idempotent."""
    for module in delta_nets(model):
        if "forward" not in vars(module):
            module.forward = partial(_by_row, module.forward)


def _by_row(forward: Callable[..., Tensor], hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """`[1, T, H]` to `[1, T, H]`, each row from an empty state; `[B, L, H]` without a layout, as the layer itself."""
    layout: RowLayout | None = kwargs.pop(LAYOUT_KWARG, None)
    if layout is None:
        return forward(hidden_states, **kwargs)
    spans = [(block.queries, block.num_rows) for block in layout.blocks]
    parts: list[Tensor] = []
    for part, (span, rows) in zip(hidden_states[0].split([span.num_tokens for span, _ in spans]), spans, strict=True):
        out = forward(to_block(part[:, None], span, rows)[:, 0], **kwargs).flatten(0, 1)
        parts.append(out if span.unpad_index is None else take_rows(out, span.unpad_index))
    return torch.cat(parts)[None]
