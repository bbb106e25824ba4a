"""Plug-ins: algorithms and reward functions by name, entry point, file or module."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rl_trainer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")


def named(name: str, known: Mapping[str, T], *, group: str, kind: type[T], key: str) -> T:
    """The algorithm `name`: one of `known`, or else the object of `kind` behind that entry point of `group`.

    Raises:
        ConfigError: there is none (lists what there is), or the entry point leads to something else.
    """
    if name in known:
        return known[name]
    installed = {point.name: point for point in entry_points(group=group)}
    if name not in installed:
        raise ConfigError(f"{key}={name!r} is not known; there are {', '.join([*sorted(known), *sorted(installed)])}")
    found = installed[name].load()
    if not isinstance(found, kind):
        raise ConfigError(
            f"the entry point {name!r} of {group} leads to a {type(found).__name__}; it has to be a {kind.__name__}"
        )
    return found


GROUP = "rl_trainer.rewards"
"""Entry points that are reward functions."""


def check_function(path: str) -> None:
    """Check that a function is there, running none of its code.

    Args:
        path: `file.py:function`, `package.module:function`, or the name of an entry point of `rl_trainer.rewards`.

    Raises:
        ConfigError: it is not.
    """
    place, mark, name = path.rpartition(":")
    if not mark:
        _entry_point(path)
    elif place.endswith(".py"):
        file = Path(place)
        if not file.is_file():
            raise ConfigError(f"the reward function {path!r} is not there: {file} is no file")
        if name not in _names(file):
            raise ConfigError(f"{file} defines no {name!r} at its top level; the reward is given as FILE.py:FUNCTION")
    elif importlib.util.find_spec(place.partition(".")[0]) is None:
        raise ConfigError(f"the reward function {path!r} is not there: no module {place!r} is installed")


def load_function(path: str) -> Callable[..., Any]:
    """The function; see `check_function`.

    Raises:
        ConfigError: it is not there, or is no function.
    """
    place, mark, name = path.rpartition(":")
    if not mark:
        found = _entry_point(path).load()
    else:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(
            f"the reward {path!r} is {found!r}; a function of the completion's text and the row is needed"
        )
    return found


def _entry_point(name: str):  # noqa: ANN202 - importlib's own type
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in installed:
        there = ", ".join(sorted(installed)) or "none"
        raise ConfigError(
            f"no reward {name!r} is installed as an entry point of {GROUP}; there are: {there}. A function in a file "
            "is given as FILE.py:FUNCTION"
        )
    return installed[name]


def _load_file(file: Path):  # noqa: ANN202 - a module
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None, "it ends in .py"
    assert spec.loader is not None, "it is a file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.resolve().parent))  # what lies beside it can be imported, as if it were run
    spec.loader.exec_module(module)
    return module


def _names(file: Path) -> set[str]:
    """What a file's top level defines."""
    try:
        tree = ast.parse(file.read_text(), str(file))
    except SyntaxError as error:
        raise ConfigError(f"{file} is not valid Python: {error}") from error
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names
