"""Finds a backend by its name, over the entry points of group `rl_engine.backends`: its engine, or what it refuses."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from rl_engine.errors import BackendError, ConfigError
from rl_engine.types import Precision

if TYPE_CHECKING:
    from rl_engine.base import Engine
    from rl_engine.types import EngineConfig

_GROUP = "rl_engine.backends"
_BFLOAT16_FLAGS = frozenset(["avx512_bf16", "amx_bf16", "bf16"])
"""Flags in /proc/cpuinfo of processors that multiply bfloat16: Intel and AMD, AMX, ARM."""


def check(backend: str, config: EngineConfig, world_size: int = 1) -> dict[str, str]:
    """Refuse what the named backend could not run on `world_size` ranks; see `Engine.check`. Starts no process.

    Returns:
        By key, what settings that are left to the engine come to.

    Raises:
        BackendError: no such backend, or a package that it or a setting needs is missing (with the pip line).
        ConfigError: a setting that cannot be meant, or that the backend, the model or the ranks do not allow.
        ModelFolderError: the model folder cannot be read, or the backend does not take its architecture.
    """
    if world_size < 1:
        raise ConfigError(f"world_size is {world_size}; it is a number of ranks, 1 or more.")
    return create_engine(backend, config).check(world_size)


def create_engine(backend: str, config: EngineConfig) -> Engine:
    """Build the named backend's engine; nothing is loaded before `initialize`.

    An entry point names a module with a function `create(config) -> Engine`.

    Raises:
        BackendError: no such backend is installed, or its imports fail (with the pip line).
    """
    found = {point.name: point for point in entry_points(group=_GROUP)}
    if backend not in found:
        names = ", ".join(sorted(found)) or "none"
        raise BackendError(f"No engine backend is named {backend!r}. Installed: {names}.")
    try:
        module = found[backend].load()
    except ImportError as error:
        raise BackendError(
            f"Engine backend {backend!r} cannot be imported: {error}. Run: pip install 'rl-engine[{backend}]'"
        ) from error
    return module.create(for_this_machine(config))


def for_this_machine(config: EngineConfig) -> EngineConfig:
    """Fill in the settings of a configuration that are left to the machine."""
    precision, checkpointing = config.precision, config.activation_checkpointing
    if precision == Precision.AUTO:
        precision = auto_precision()[0]
    if checkpointing is None:
        checkpointing = _has_gpu()
    return replace(config, precision=precision, activation_checkpointing=checkpointing)


def auto_precision() -> tuple[Precision, str]:
    """Number format for `precision=auto` on this machine, and the reason: bfloat16 that is emulated is slow."""
    import torch

    if _has_gpu():
        is_native = torch.cuda.is_bf16_supported(including_emulation=False)
        return (Precision.BFLOAT16, "the GPU multiplies it") if is_native else (Precision.FLOAT32, "an older GPU")
    if _processor_flags() & _BFLOAT16_FLAGS:
        return Precision.BFLOAT16, "this processor multiplies it"
    return Precision.FLOAT32, "this processor only emulates bfloat16"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@cache
def _processor_flags() -> frozenset[str]:
    """Features of the processor as Linux names them; none where there is no /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())
