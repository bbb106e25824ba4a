"""rl-engine trains one language model: forward, backward, step, and the weights out again, with the loss injected.

`create_engine("fsdp", EngineConfig(...))` gives an `Engine` (see `rl_engine.base`), `TrainingWorker` one with fewer
verbs; `check` says beforehand what would be refused. Loss functions live in `rl_engine.losses`, training programs in
`rl_engine.finetune` (SFT, preferences, reward models, distillation), fakes and the conformance suite in
`rl_engine.testing`.
"""

from rl_engine.base import Engine, LossFunction
from rl_engine.checkpoint.hub import model_folder
from rl_engine.checkpoint.lock import hold_lock
from rl_engine.checkpoint.manifest import digest_files, find_damage, read_manifest, write_manifest
from rl_engine.errors import (
    BackendError,
    BatchError,
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    FolderInUseError,
    ModelFolderError,
    NonFiniteError,
)
from rl_engine.registry import auto_precision, check, create_engine, for_this_machine
from rl_engine.types import (
    BatchCounts,
    EngineConfig,
    EngineOutput,
    Fp8,
    Head,
    LoraConfig,
    LoraExport,
    MatmulPrecision,
    ModelInit,
    ModelOutput,
    Mtp,
    OptimizerConfig,
    OptimizerKind,
    ParallelConfig,
    PeftConfig,
    Precision,
    ShardSpec,
)
from rl_engine.worker import StepOutcome, TrainingWorker

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
    "FolderInUseError",
    "Fp8",
    "Head",
    "LoraConfig",
    "LoraExport",
    "LossFunction",
    "MatmulPrecision",
    "ModelFolderError",
    "ModelInit",
    "ModelOutput",
    "Mtp",
    "NonFiniteError",
    "OptimizerConfig",
    "OptimizerKind",
    "ParallelConfig",
    "PeftConfig",
    "Precision",
    "ShardSpec",
    "StepOutcome",
    "TrainingWorker",
    "auto_precision",
    "check",
    "create_engine",
    "digest_files",
    "find_damage",
    "for_this_machine",
    "hold_lock",
    "model_folder",
    "read_manifest",
    "write_manifest",
]
