"""Turns a backend's name into an engine, over the entry points of group `rl_engine.backends`."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from rl_engine.errors import BackendError

if TYPE_CHECKING:
    from rl_engine.base import Engine
    from rl_engine.types import EngineConfig

_GROUP = "rl_engine.backends"


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
