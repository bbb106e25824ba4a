"""rl-engine trains one language model: forward, backward, step, and the weights out again, with the loss injected.

`create_engine("fsdp", EngineConfig(...))` gives an `Engine` (see `rl_engine.base`). Loss functions live in
`rl_engine.losses`, supervised fine-tuning in `rl_engine.sft`, fakes and the conformance suite in `rl_engine.testing`.
"""

from rl_engine._registry import create_engine
from rl_engine.base import Engine, LossFunction
from rl_engine.errors import (
    BackendError,
    BatchError,
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    ModelFolderError,
    NonFiniteError,
)
from rl_engine.types import (
    BatchCounts,
    EngineConfig,
    EngineOutput,
    Head,
    MatmulPrecision,
    ModelInit,
    ModelOutput,
    OptimizerConfig,
    PeftConfig,
    Precision,
)

__all__ = [
    "BackendError",
    "BatchCounts",
    "BatchError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineOutput",
    "Head",
    "LossFunction",
    "MatmulPrecision",
    "ModelFolderError",
    "ModelInit",
    "ModelOutput",
    "NonFiniteError",
    "OptimizerConfig",
    "PeftConfig",
    "Precision",
    "create_engine",
]
