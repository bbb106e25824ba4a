"""The errors of rl-engine.

EngineError
├── BackendError (ValueError)             no such backend, or it cannot be imported here
├── ConfigError (ValueError)              a setting, or several together, that this backend cannot honour
├── ModelFolderError (ValueError)         the model folder lacks something, or its tensors do not fit
├── BatchError (ValueError)               a batch lacks a column, or a row does not fit the model or token budget
├── DataError (ValueError)                a training file is missing, or one of its rows cannot be used
├── NonFiniteError (ArithmeticError)      a loss or gradient norm is NaN or infinite; the step was not taken
└── CheckpointError (ValueError)          a checkpoint is incomplete, damaged, or belongs to another model
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

_NUMBER = re.compile(r"\((?:os error|errno) (\d+)\)|\[errno (\d+)\]", re.IGNORECASE)
"""Number of the operating system's error in the texts of safetensors and Arrow, whose errors carry none."""


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


def errno_of(error: BaseException) -> int | None:
    """The operating system's number of an error, from its attribute or its text; None without one."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _NUMBER.search(str(error))
    return int(found[1] or found[2]) if found is not None else None


@contextmanager
def naming(file: Path) -> Generator[None]:
    """Name the file in the error of a failed write: those of write(2), safetensors and Arrow have no path.

    Raises:
        OSError: with the number and the file.
    """
    try:
        yield
    except Exception as error:
        number = errno_of(error)
        source, target = (getattr(error, name, None) for name in ("filename", "filename2"))
        is_named = source is not None and target is None  # a copy's error has both
        if number is None or is_named:
            raise
        raise OSError(number, os.strerror(number), str(file)) from error
