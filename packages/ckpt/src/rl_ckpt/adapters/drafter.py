"""Layers for multi-token prediction, with which an engine drafts: a second model, and weights of the same sync.

The drafter becomes a part of the model that it drafts for, so that both are installed, attested and restored as one.
It shares the model's embedding and head, of which a folder may have copies for it; those are left out.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn

PART = "rl_ckpt_drafter"
"""Name of the drafter among the model's modules."""
_COPIES = (".embed_tokens.weight", ".shared_head.head.weight")


def join(model: nn.Module, drafter: nn.Module) -> None:
    """Make `drafter` a part of the model. Idempotent."""
    model.add_module(PART, drafter)


def is_ahead(name: str, num_layers: int) -> bool:
    """Whether a tensor of a folder is of a layer for multi-token prediction: `mtp`, or one behind the last."""
    layer = re.match(r"model\.(?:language_model\.)?layers\.(\d+)\.", name)
    return name.startswith("mtp.") or (layer is not None and int(layer[1]) >= num_layers)


def load(model: Any, weights: Iterable[tuple[str, Tensor]], num_layers: int) -> set[str] | None:
    """Call the loaders of the model and of its drafter, if it has one, each with its own weights.

    Returns:
        Names of the parameters that were filled, if the model reports them.
    """
    drafter: Any = getattr(model, PART, None)
    if drafter is None:
        return model.load_weights(iter(weights))
    ahead: list[tuple[str, Tensor]] = []

    def own() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if not is_ahead(name, num_layers):
                yield name, tensor
            elif not name.endswith(_COPIES):
                ahead.append((name, tensor))

    loaded: set[str] | None = model.load_weights(own())
    if ahead:
        more: set[str] | None = drafter.load_weights(iter(ahead))
        loaded = None if loaded is None else loaded | {f"{PART}.{name}" for name in more or ()}
    return loaded
