"""rl-engine trains one language model: forward, backward, step, and the weights out again, with the loss injected.

`create_engine("fsdp", EngineConfig(...))` gives an `Engine` (see `rl_engine.base`), `TrainingWorker` one with fewer
verbs; `check` says beforehand what would be refused. Loss functions live in `rl_engine.losses`, training programs in
`rl_engine.finetune` (SFT, preferences, reward models, distillation), fakes and the conformance suite in
`rl_engine.testing`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

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
    AdamParams,
    BatchCounts,
    EngineConfig,
    EngineOutput,
    Fp8,
    Head,
    LoraConfig,
    LoraExport,
    MatmulPrecision,
    ModelFacts,
    ModelInit,
    ModelOutput,
    Mtp,
    OptimizerConfig,
    OptimizerKind,
    ParallelConfig,
    PeftConfig,
    Precision,
    RowsOutput,
    ShardSpec,
    TrainingRow,
    digest_files,
    find_damage,
    read_manifest,
    write_manifest,
)

if TYPE_CHECKING:
    from rl_engine.registry import (
        auto_precision,
        check,
        create_engine,
        create_loss,
        create_worker,
        describe_model,
        describe_tokens,
        for_this_machine,
        model_folder,
    )
    from rl_engine.training_worker import StepOutcome, TrainingWorker

__all__ = [
    "AdamParams",
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
    "Fp8",
    "Head",
    "LoraConfig",
    "LoraExport",
    "LossFunction",
    "MatmulPrecision",
    "ModelFacts",
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
    "RowsOutput",
    "ShardSpec",
    "StepOutcome",
    "TrainingRow",
    "TrainingWorker",
    "auto_precision",
    "check",
    "create_engine",
    "create_loss",
    "create_worker",
    "describe_model",
    "describe_tokens",
    "digest_files",
    "find_damage",
    "for_this_machine",
    "model_folder",
    "read_manifest",
    "write_manifest",
]

_WORKER = ("StepOutcome", "TrainingWorker")
_REGISTRY = (
    "auto_precision",
    "check",
    "create_engine",
    "create_loss",
    "create_worker",
    "describe_model",
    "describe_tokens",
    "for_this_machine",
    "model_folder",
)
"""Names that importing `rl_engine.base` does not need, by module."""


def __getattr__(name: str) -> object:
    for module, names in (("training_worker", _WORKER), ("registry", _REGISTRY)):
        if name in names:
            return getattr(import_module(f"rl_engine.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
