"""Runtimes: where workers live. `ray` for processes on one machine or many, `inline` for everything in this one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from rl_trainer.secrets import make_tokens

if TYPE_CHECKING:
    from rl_trainer.base import Runtime


def create_runtime(name: Literal["ray", "inline"], *, timeout_s: float = 600.0) -> Runtime:
    """A runtime by name, and the secrets that its workers have. Ray is imported only when it is asked for."""
    make_tokens()
    if name == "inline":
        from rl_trainer.runtime.inline import InlineRuntime

        return InlineRuntime()
    # Under `uv run`, Ray copies the working directory and starts every worker with `uv run` anew, which builds the
    # whole environment again, for minutes. Workers have the environment that Ray was started in. Ray reads the
    # variable when it is imported.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    from rl_trainer.runtime.ray import RayRuntime

    return RayRuntime(timeout_s=timeout_s)
