"""Algorithms by name: those that ship, and those that other distributions install as entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, TypeVar

from rl_trainer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

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
