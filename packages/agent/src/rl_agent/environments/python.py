"""Custom environments: `FILE.py:NAME` or `MODULE:NAME`, a class or a function that makes one."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_agent.environments.base import EnvironmentSource
from rl_agent.errors import PluginError, RowError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType


class PythonEnvironments(EnvironmentSource):
    """Environments that a factory `FILE.py:NAME` or `MODULE:NAME` makes: an object with `reset` and `step`.

    Raises:
        PluginError: the file, the module or the name does not exist, or the module raises.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any] | None = None) -> None:
        super().__init__(name, arguments)
        self._factory = load_callable(name, "environment")

    def make(self, **arguments: Any) -> Any:
        """Create one.

        Raises:
            RowError: it does not take these arguments.
        """
        try:
            inspect.signature(self._factory).bind(**arguments)
        except TypeError as error:
            raise RowError(f"field 'environment_args' does not suit environment {self.name!r}: {error}") from error
        return self._factory(**arguments)


def load_callable(name: str, what: str) -> Callable[..., Any]:
    """Load the class or function `FILE.py:NAME` or `MODULE:NAME`.

    Raises:
        PluginError: the file, the module or the name does not exist, or the module raises.
    """
    where, _, attribute = name.rpartition(":")
    try:
        module = _module_of(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        found = getattr(module, attribute)
    except FileNotFoundError as error:
        raise PluginError(f"{what} {name!r}: there is no file {where}") from error
    except AttributeError as error:
        raise PluginError(f"{what} {name!r}: {where} has no {attribute!r}") from error
    except Exception as error:
        raise PluginError(f"{what} {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise PluginError(f"{what} {name!r} is a {type(found).__name__}; a class or function is needed")
    return found


def _module_of(file: Path) -> ModuleType:
    """Import a file under a name of its own, with its folder last in `sys.path`."""
    name = f"rl_agent_environment_{abs(hash(file.resolve()))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, "it ends in .py"
    assert spec.loader is not None, "it is a file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.append(str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
