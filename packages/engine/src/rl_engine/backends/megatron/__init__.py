"""The `megatron` backend: megatron-core's GPT with tensor, pipeline, expert and data parallelism.

Where things are: `weights` reads a Hugging Face config, refuses what is not mapped, and maps parameters to Hugging Face
names; `layout` has the process groups and the 1F1B schedule; `model` builds this rank's part of the model and scores
packed rows; `optimizer` is AdamW sharded over data-parallel ranks; `engine` ties them together.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # megatron-core warns at import of each optional package that it goes without
    from rl_engine.backends.megatron.engine import MegatronEngine

if TYPE_CHECKING:
    from rl_engine.base import Engine
    from rl_engine.types import EngineConfig

__all__ = ["MegatronEngine", "create"]


def create(config: EngineConfig) -> Engine:
    """The registry's entry."""
    return MegatronEngine(config)
