"""Runtimes: where workers live. `ray` for processes on one machine or many, `inline` for everything in this one."""

from __future__ import annotations

import os
import secrets
import sys
from typing import TYPE_CHECKING

from rl_trainer.runtime.network import make_tokens

if TYPE_CHECKING:
    from rl_trainer.runtime.base import Runtime


def create_runtime(name: str, *, timeout_s: float = 600.0, heartbeat_s: float = 30.0) -> Runtime:
    """A runtime by name, and the secrets that its workers have. Ray is imported only when it is asked for.

    Deadline of calls, and the longest silence of a worker process, are seconds.
    """
    make_tokens()
    if name == "inline":
        from rl_trainer.runtime.inline import InlineRuntime

        return InlineRuntime()
    # Under `uv run`, Ray copies the working directory and starts every worker with `uv run` anew, which builds the
    # whole environment again, for minutes. Workers have the environment that Ray was started in. Ray reads the
    # variable when it is imported.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    if "RAY_ADDRESS" not in os.environ:
        _close_to_others()
        # gcs_server would retain 4 kB of each call, of the last 100,000, for `ray list tasks` alone.
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    from rl_trainer.runtime.ray import RayRuntime

    return RayRuntime(timeout_s=timeout_s, heartbeat_s=heartbeat_s)


def _close_to_others() -> None:
    """Have the Ray that is about to be started here listen on the loopback interface, and ask for a token of this run.

    Whoever may submit work to Ray runs code as its user. All of this is read when Ray is imported; by a process that
    has imported it before, the mode of authentication is left to Ray, which takes the token and asks for it too.
    """
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    if "ray" in sys.modules:
        os.environ.pop("RAY_AUTH_MODE", None)
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    # Ray's switch for a node that is no part of a cluster, on Linux too: its address is 127.0.0.1, and its servers
    # bind to that alone. `ray.init(_node_ip_address="127.0.0.1")` would be replaced by the machine's own address.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
