"""Gated delta nets (Yang et al., 2412.06464) of a served model: convolution and recurrent state per row of the batch.

Qwen3-Next and Qwen3.5 have them between attention layers. The layers are transformers' own; a forward pass gives them
the newest tokens of decoding rows together, and chunks of prompts one by one. A chunk from position 0 begins with an
empty state, so that a row that is computed again needs no clearing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_rollout.backends.embedded.model.paged_attention import PagedBatch, ProbeBatch

if TYPE_CHECKING:
    from collections.abc import Callable

LINEAR_LAYER = "linear_attention"
"""Layer type of a gated delta net in a config, among others."""
NAME = "linear_attn"
"""Name of the net in a decoder layer."""


def delta_nets(module: nn.Module) -> list[Any]:
    """Gated delta nets of a transformers model."""
    return [layer for layer in module.modules() if type(layer).__name__.endswith("GatedDeltaNet")]


def serve_delta_nets(module: nn.Module) -> None:
    """Let every gated delta net take packed tokens with `rl_batch`, whose rows have the states."""
    for net in delta_nets(module):
        net.forward = partial(_forward, net.layer_idx, net.forward)


@dataclass(slots=True)
class _States:
    """Cache of one call of one net, with the methods that transformers asks for; B rows."""

    conv: Tensor | None = None
    """[B, channels, kernel size - 1], newest last; None: the rows begin."""
    recurrent: Tensor | None = None
    """[B, heads, key size, value size]"""

    def get_conv_state(self, *_: Any, **__: Any) -> Tensor | None:
        return self.conv

    def get_recurrent_state(self, *_: Any, **__: Any) -> Tensor | None:
        return self.recurrent

    def is_recording_past(self, *_: Any) -> bool:
        return False

    def update_conv_state(self, new: Tensor, *_: Any, conv_kernel_size: int, **__: Any) -> Tensor:
        """Append `[B, channels, T]` and return all of it; a single token is written by the layer's kernel itself."""
        if self.conv is None:
            self.conv = new.new_zeros(*new.shape[:2], conv_kernel_size - 1)
        whole = torch.cat([self.conv, new], dim=-1)
        self.conv = whole[..., -self.conv.shape[-1] :]
        return whole

    def update_recurrent_state(self, recurrent: Tensor, *_: Any, **__: Any) -> None:
        self.recurrent = recurrent


def _forward(
    layer: int, forward: Callable[..., Tensor], hidden_states: Tensor, *, rl_batch: PagedBatch | ProbeBatch, **_: Any
) -> Tensor:
    """Output `[1, T, H]` of packed tokens, whose rows' states go on."""
    if isinstance(rl_batch, ProbeBatch):
        found = _States()
        out = forward(hidden_states, cache_params=found)
        assert found.conv is not None
        assert found.recurrent is not None
        rl_batch.states[layer] = (found.conv[0], found.recurrent[0])
        return out
    states, hidden, at = rl_batch.states[layer], hidden_states[0], rl_batch.num_single
    spans = [(rl_batch.rows[:at], hidden[:at, None], False)] if at else []
    for row, start, count in rl_batch.chunks:
        rows = torch.tensor([row], device=hidden.device)
        spans.append((rows, hidden[None, at : at + count], start == 0))
        at += count
    parts: list[Tensor] = []
    for rows, tokens, is_first in spans:
        its = _States() if is_first else _States(*(state.index_select(0, rows) for state in states))
        parts.append(forward(tokens, cache_params=its).flatten(0, 1))
        for state, new in zip(states, (its.conv, its.recurrent), strict=True):
            assert new is not None
            state.index_copy_(0, rows, new)
    return torch.cat(parts)[None]
