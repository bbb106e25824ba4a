"""Holds a solution and does with it what the judge asks, who is in another process.

Everything here belongs to the solution's process: the code may change any of it, and can change nothing but what comes
out of its own functions.
"""

from __future__ import annotations

import os
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_agent.sandbox.process import execution, values
else:  # this folder is the path of the process that it is started in
    import execution
    import values


def main(code: str, descriptor: int) -> None:
    """Serve until the judge has ended."""
    module = execution.own_main_module("solution")
    namespace = vars(module)

    def load(_: str) -> None:
        exec(compile(code, "<code>", "exec"), namespace)

    def is_module(name: str) -> bool:
        return isinstance(namespace[name], types.ModuleType) and namespace[name].__name__ == name

    operations = {"load": load, "global": namespace.__getitem__, "module": is_module}
    values.add_operations(operations)
    try:
        values.Peer(descriptor, _allow_all).serve()
    except values.BrokenPipeOfValuesError:  # the judge has ended
        pass
    finally:
        sys.stdout.flush()
        os._exit(0)


def _allow_all(operation: str, target: Any, name: Any) -> None:
    """The judge is trusted."""
