"""The `torchtitan` backend: torchtitan's model definitions and parallelize functions.

Where things are: `model` builds torchtitan's decoder from a Hugging Face config and scores packed rows with it;
`engine` reads the folder into it. Steps, weights and checkpoints are those of the fsdp backend.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchtitan compiles flex_attention at import, which loads what torch deprecates
    from rl_engine.backends.torchtitan.engine import TorchtitanEngine

if TYPE_CHECKING:
    from rl_engine.base import Engine
    from rl_engine.types import EngineConfig

__all__ = ["TorchtitanEngine", "create"]


def create(config: EngineConfig) -> Engine:
    """The registry's entry."""
    return TorchtitanEngine(config)
