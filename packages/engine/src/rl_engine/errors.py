"""The errors of rl-engine.

EngineError
├── BackendError (ValueError)             no such backend, or it cannot be imported here
├── ConfigError (ValueError)              a setting, or several together, that this backend cannot honour
├── ModelFolderError (ValueError)         the model folder lacks something, or its tensors do not fit
├── BatchError (ValueError)               a batch lacks a column, or a row does not fit the model or token budget
├── DataError (ValueError)                a training file is missing, or one of its rows cannot be used
├── NonFiniteError (ArithmeticError)      a loss or gradient norm is NaN or infinite; the step was not taken
├── CheckpointError (ValueError)          a checkpoint is incomplete, damaged, or belongs to another model
└── FolderInUseError (RuntimeError)       another process writes to the folder; says which
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error that rl-engine raises on purpose."""


class BackendError(EngineError, ValueError):
    """A backend is unknown, or is known and cannot be imported."""


class ConfigError(EngineError, ValueError):
    """A setting that the backend cannot honour."""


class ModelFolderError(EngineError, ValueError):
    """A model folder cannot be loaded as it is."""


class BatchError(EngineError, ValueError):
    """A batch cannot be processed as it is."""


class DataError(EngineError, ValueError):
    """A training file cannot be used as it is."""


class NonFiniteError(EngineError, ArithmeticError):
    """A loss or a gradient norm is NaN or infinite."""


class CheckpointError(EngineError, ValueError):
    """A checkpoint cannot be loaded as it is."""


class FolderInUseError(EngineError, RuntimeError):
    """Another process writes to the folder."""
