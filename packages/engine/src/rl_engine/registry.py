"""Finds a backend by its name, over the entry points of group `rl_engine.backends`: its engine, or what it refuses."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from rl_engine.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from rl_engine.base import Engine
    from rl_engine.types import EngineConfig

_GROUP = "rl_engine.backends"


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
    return module.create(config)
