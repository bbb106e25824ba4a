"""Turns the name of an agent loop into the loop, over the entry points `rl_agent.loops`."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from rl_agent.base import AgentLoop
from rl_agent.errors import LoopError

if TYPE_CHECKING:
    from rl_agent.base import Generator
    from rl_agent.types import Tokenizer

GROUP = "rl_agent.loops"


def create_loop(name: str, server: Generator, tokenizer: Tokenizer) -> AgentLoop:
    """Build the installed agent loop called `name`.

    Args:
        name: An entry point of the group `rl_agent.loops`, whose value is an `AgentLoop` subclass. This package ships
            `single_turn`.
        server: What generates: a rollout server, a client of one, or a router.
        tokenizer: The tokenizer of the model that is served.

    Raises:
        LoopError: no such loop is installed, or it cannot be imported here.
    """
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in installed:
        raise LoopError(f"no agent loop {name!r} is installed; there are: {', '.join(sorted(installed)) or 'none'}")
    return _load(installed[name])(server, tokenizer)


def _load(entry: EntryPoint) -> type[AgentLoop]:
    try:
        loaded = entry.load()
    except ImportError as error:
        raise LoopError(
            f"agent loop {entry.name!r} cannot be imported ({error}); install what it needs: {_pip_line(entry)}"
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, AgentLoop)):
        raise LoopError(
            f"entry point {GROUP}:{entry.name} is {entry.value}, which is not a subclass of rl_agent.AgentLoop"
        )
    return loaded


def _pip_line(entry: EntryPoint) -> str:
    """The command that installs the loop's distribution, with the extra of the loop's name where it has one."""
    if entry.dist is None:
        return f"pip install the distribution that provides {entry.module}"
    extras = entry.dist.metadata.get_all("Provides-Extra") or []
    return (
        f"pip install '{entry.dist.name}[{entry.name}]'" if entry.name in extras else f"pip install {entry.dist.name}"
    )
