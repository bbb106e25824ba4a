"""What a row costs on the model at hand: floating-point operations of one forward pass.

Legend: `F` tokens fed of a row, `C` its completion tokens, `W` window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Counts of one architecture; a backward pass costs twice as much everywhere, so it changes no comparison."""

    per_token: float
    """Products with the weights that a token meets: two operations for each (Kaplan et al., 2001.08361)."""
    per_pair: float
    """Score and weighted sum of one query with one key, in all heads of one layer."""
    per_score: float
    """Projection of one completion token onto the vocabulary."""
    windows: tuple[int | None, ...]
    """Keys that a query sees in each attention layer; None: all before it."""

    def __call__(self, fed: int, scored: int) -> float:
        """Operations for a row of F = `fed` tokens with C = `scored` of them completion."""
        pairs = sum(_pairs(fed, window) for window in self.windows)
        return self.per_token * fed + self.per_pair * pairs + self.per_score * scored


def cost_model(config: Any, shapes: Mapping[str, Sequence[int]]) -> CostModel:
    """The counts of a transformers config and the shapes of its trunk's parameters (no embedding, no head).

    Experts count as far as a token meets them. Layers without attention, or of a kind not known here, have no pairs.
    """
    experts = _first(config, ("num_experts", "num_local_experts", "n_routed_experts"), 0)
    share = _first(config, ("num_experts_per_tok",), 1) / experts if experts else 1.0
    per_token = 0.0
    for name, shape in shapes.items():
        if len(shape) < 2:
            continue
        size = 2.0
        for length in shape:
            size *= length
        per_token += size * (share if ".experts." in name else 1.0)
    hidden = int(_first(config, ("hidden_size", "n_embd", "d_model"), 0))
    heads = int(_first(config, ("num_attention_heads", "n_head"), 1))
    head_dim = int(_first(config, ("head_dim",), hidden // heads))
    layers = int(_first(config, ("num_hidden_layers", "n_layer"), 1))
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    window = getattr(config, "sliding_window", None)
    seen = {"full_attention": None, "sliding_attention": window}
    return CostModel(
        per_token=per_token,
        per_pair=4.0 * heads * head_dim,
        per_score=2.0 * hidden * config.vocab_size,
        windows=tuple(seen[kind] for kind in kinds if kind in seen),
    )


def _pairs(length: int, window: int | None) -> int:
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def _first(config: Any, names: Sequence[str], default: float) -> float:
    """The first of these settings that the config has; architectures name them differently."""
    return next((value for name in names if (value := getattr(config, name, None))), default)
