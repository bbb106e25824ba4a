"""Models whose positions mean something else beside longer neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_rollout.errors import ConfigError


def check_positions(text_config: Any, max_model_len: int) -> None:
    """See that a token's position turns it alike whoever is beside it.

    Transformers chooses the frequencies of `longrope` by the largest position of a pass, for all that is in it.

    Raises:
        ConfigError: tells the length up to which it does.
    """
    found: Any = getattr(text_config, "rope_parameters", None) or {}
    for rope in (found, *found.values()):  # where kinds of layers differ, one each
        if not isinstance(rope, Mapping) or rope.get("rope_type") != "longrope":
            continue
        limit = rope["original_max_position_embeddings"]
        if max_model_len > limit:
            raise ConfigError(
                f"max_model_len={max_model_len}: this model (longrope) turns all tokens of a batch by other "
                f"frequencies once one of them is beyond {limit}, so that what is computed would depend on neighbours; "
                f"set it to {limit} at most, or use the backend vllm"
            )
