"""Judge and solution: the two programs of a grade; one runs the assertions, the other holds the solution.

What the test does not define, it asks of the solution: a name that is not there is a name of the solution's. Names of
builtins, and of the standard library's modules and usual helpers, are the judge's own: a solution that replaces `all`
or `isclose` replaces its own copy. Everything in the solution's process belongs to the solution: it may change any of
it, and can change nothing but what comes out of its own functions.
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
import types
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rl_agent.sandbox.process import execution, values
else:  # this folder is the path of the process that it is started in
    import execution
    import values

_HELPERS = {
    "isclose": "math",
    "deepcopy": "copy",
    "Counter": "collections",
    "OrderedDict": "collections",
    "defaultdict": "collections",
    "deque": "collections",
    "namedtuple": "collections",
    "Decimal": "decimal",
    "Fraction": "fractions",
    "datetime": "datetime",
    "timedelta": "datetime",
}
"""Helpers with which tests build or compare values, often without importing them, and their modules."""
_READS = ("str", "repr", "len", "iter", "next", "bool", "hash", "item")


class _Names(dict[str, Any]):
    """Globals of a test: names that it does not define are the solution's."""

    def __init__(self, peer: values.Peer) -> None:
        super().__init__(__name__="__main__", __builtins__=builtins)
        self._peer = peer

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) or name.startswith("__"):
            raise KeyError(name)
        if name in _HELPERS:
            found = getattr(importlib.import_module(_HELPERS[name]), name)
            self[name] = found
            return found
        found = self._peer.ask("global", name)
        if type(found) is values.Remote and name in sys.stdlib_module_names and self._peer.ask("module", name):
            found = importlib.import_module(name)
        if type(found) in (values.Remote, types.ModuleType, type):
            self[name] = found  # plain values may change
        return found


class _JudgePeer(values.Peer):
    """Judge's end of the pipe: if the solution ends or cheats, no `except:` of the test sees it."""

    def end(self, why: str) -> NoReturn:
        execution.finish("error", f"the solution's process: {why}", 0)
        os._exit(0)


def allow(operation: str, target: Any, name: Any) -> None:
    """Check that an operation of the solution on an argument is one of a callee, and does not lead to the test.

    Raises:
        PermissionError: it is something else.
    """
    if operation == "call" and callable(target):
        return
    is_ours = type(target).__module__ == "__main__" and not isinstance(target, (type, types.FunctionType))
    if operation in _READS and (is_ours or hasattr(type(target), "__next__") or operation in ("str", "repr")):
        return
    if operation in ("get", "set") and is_ours and isinstance(name, str) and not name.startswith("_"):
        return
    raise PermissionError(f"{operation} of an object of the test")


def run_test(test: str, descriptor: int) -> None:
    """Run a test against the solution at the other end of the pipe, and report how it ended."""
    peer = _JudgePeer(descriptor, allow)
    try:
        names = _Names(peer)
        execution.own_main_module()
        peer.ask("load", "")
        exec(compile(test, "<test>", "exec"), names)
    except BaseException as error:  # noqa: BLE001 - SystemExit too: a test that leaves has not come to its end
        kind = "memory" if isinstance(error, MemoryError) else "error"
        execution.finish(kind, execution.short(error), 0)
        return
    execution.finish("ok", "", 0)


def hold_solution(code: str, descriptor: int) -> None:
    """Serve the judge's operations on a solution, until the judge has ended."""
    namespace = vars(execution.own_main_module("solution"))

    def load(_: str) -> None:
        exec(compile(code, "<code>", "exec"), namespace)

    def is_module(name: str) -> bool:
        return isinstance(namespace[name], types.ModuleType) and namespace[name].__name__ == name

    def allow_all(*_: Any) -> None:  # the judge is trusted
        return

    values.add_operations({"load": load, "global": namespace.__getitem__, "module": is_module})
    try:
        values.Peer(descriptor, allow_all).serve()
    except values.BrokenPipeOfValuesError:  # the judge has ended
        pass
    finally:
        sys.stdout.flush()
        os._exit(0)
