"""The `megatron` backend: megatron-core's GPT with tensor, pipeline, expert and data parallelism.

Where things are: `architectures` reads a Hugging Face config and refuses what is not mapped; `weights` maps parameters
to Hugging Face names; `adapters` adds LoRA; `layout` has the process groups and runs the pipeline schedules;
`attention` is fed packed rows; `model` builds this rank's part of the model and scores rows; `optimizer` is
megatron-core's over its sharded gradients; `megatron_engine` ties them together.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # megatron-core warns at import of each optional package that it goes without
    from rl_engine.backends.megatron.megatron_engine import MegatronEngine

if TYPE_CHECKING:
    from rl_engine.base import Engine
    from rl_engine.types import EngineConfig

__all__ = ["MegatronEngine", "create"]


def create(config: EngineConfig) -> Engine:
    """The registry's entry."""
    return MegatronEngine(config)
