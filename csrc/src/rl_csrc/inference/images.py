"""Whether a model takes images: one answer for the plan, the engine and the servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

PACKED_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Layer types whose tokens meet in attention alone, so that rows can be packed."""


def takes_images(config: Mapping[str, Any]) -> bool:
    """Whether a model takes images as patches among packed tokens, with the interface of Qwen2.5-VL and Qwen3-VL.

    Args:
        config: Values of its `config.json`.
    """
    vision, text = config.get("vision_config") or {}, config.get("text_config") or config
    layers = {*(text.get("layer_types") or ())}
    return {"spatial_merge_size", "patch_size"} <= vision.keys() and layers <= PACKED_LAYERS | {"linear_attention"}
