"""Runtimes: where workers live. `ray` for processes on one machine or many, `inline` for everything in this one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rl_trainer.base import Runtime


def create_runtime(name: Literal["ray", "inline"], *, timeout_s: float = 600.0) -> Runtime:
    """A runtime by name. Ray is imported only when it is asked for."""
    if name == "inline":
        from rl_trainer.runtime.inline import InlineRuntime

        return InlineRuntime()
    from rl_trainer.runtime.ray import RayRuntime

    return RayRuntime(timeout_s=timeout_s)
