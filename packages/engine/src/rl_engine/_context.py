"""How long a row may be for a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl_engine.errors import BatchError


def check_lengths(lengths: Sequence[int], config: Any) -> None:
    """See that rows fit into the model's context, and that a row's positions mean the same whatever is beside it.

    Transformers chooses the frequencies of `longrope` by the largest position of a pass, for all rows that are in it.

    Args:
        lengths: Tokens of each row.
        config: The model's, of transformers.

    Raises:
        BatchError: a row is too long.
    """
    longest, context = max(lengths, default=0), getattr(config, "max_position_embeddings", None)
    if context is not None and longest > context:
        raise BatchError(f"A row has {longest} tokens; the model's context is {context}. Shorten the row.")
    for rope in _ropes(config.get_text_config()):
        if rope.get("rope_type") == "longrope" and longest > (limit := rope["original_max_position_embeddings"]):
            raise BatchError(
                f"A row has {longest} tokens; beyond {limit} this model (longrope) turns all rows of a pass by other "
                "frequencies, so that log-probs and gradients would depend on micro-batches. Shorten the row."
            )


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """The settings of rotary positions: one, or one for each kind of layer."""
    found: Any = getattr(config, "rope_parameters", None) or {}
    for rope in (found, *found.values()):
        if isinstance(rope, Mapping):
            yield rope
