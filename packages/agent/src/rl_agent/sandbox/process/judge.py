"""Judge and solution: the two programs of a grade; one runs the assertions, the other holds the solution.

Names that the test does not define are the solution's: the test imports them, by `from solution import ...` or by using
them. Builtins, the standard library's modules and usual helpers are the judge's own: a solution that replaces `all`,
`math` or `isclose` replaces its own copy. Everything in the solution's process belongs to the solution: it may change
any of it, and can change nothing but what comes out of its own functions.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import sys
import types
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rl_agent.sandbox.process import execution, remote, surroundings, values
else:  # this folder is the path of the process that it is started in
    import execution
    import remote
    import surroundings
    import values

_HELPERS = (
    {"isclose": "math", "deepcopy": "copy", "Decimal": "decimal", "Fraction": "fractions"}
    | dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"), "collections")
    | dict.fromkeys(("datetime", "timedelta"), "datetime")
)
"""Helpers with which tests build or compare values, often without importing them, and their modules."""
_READS = ("len", "iter", "next", "bool", "hash", "item")
_SHOWN = ("str", "repr", "format")


class _Names(dict[str, Any]):
    """Globals of a test: names that it does not define are the solution's.

    Args:
        peer: The solution's process.
        modules: Modules of the standard library that the test uses without importing them.
    """

    def __init__(self, peer: values.Peer, modules: set[str]) -> None:
        super().__init__(__name__="__main__", __builtins__=builtins)
        self._peer, self._modules = peer, modules

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) or name.startswith("__"):
            raise KeyError(name)
        if name in self._modules:
            found = importlib.import_module(name)
        elif name in _HELPERS:
            found = getattr(importlib.import_module(_HELPERS[name]), name)
        else:
            found = self.of_solution(name)
        if type(found) in (values.Remote, types.ModuleType, type, types.FunctionType):
            self[name] = found  # plain values may change
        return found

    def of_solution(self, name: str) -> Any:
        """Global of the solution.

        Raises:
            KeyError: it has none of the name.
        """
        found = self._peer.ask("global", name)
        if name[:1].isupper() and (number := self._peer.number_of(found)) is not None:
            self._peer.classes.add(number)
        return found


class _SolutionModule(types.ModuleType):
    """Module `solution`, from which a test may import."""

    def __init__(self, names: _Names) -> None:
        super().__init__("solution")
        self.__getattr__ = self._found
        self._names = names

    def _found(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._names.of_solution(name)
        except KeyError:
            raise AttributeError(f"the solution has no {name}") from None


def modules_of(test: ast.Module) -> set[str]:
    """Modules of the standard library that a test uses as such: `math.isclose(...)`, without importing them."""
    names = [node for node in ast.walk(test) if isinstance(node, ast.Name)]
    bases = {id(node.value) for node in ast.walk(test) if isinstance(node, ast.Attribute)}
    others = {node.id for node in names if id(node) not in bases or not isinstance(node.ctx, ast.Load)}
    return ({node.id for node in names} - others) & sys.stdlib_module_names


class _JudgePeer(values.Peer):
    """Judge's end of the pipe: if the solution ends or cheats, no `except:` of the test sees it."""

    surroundings: surroundings.TestSurroundings

    def show(self, printed: Any) -> None:
        self.surroundings.show(printed)

    def end(self, why: str) -> NoReturn:
        execution.finish("error", f"the solution's process: {why}", 0)
        os._exit(0)


def allow(operation: str, target: Any, name: Any) -> None:
    """Check that an operation of the solution on an argument is one of a callee, and does not lead to the test.

    Raises:
        PermissionError: it is something else.
    """
    if operation in ("line", "file", *_SHOWN) or (operation == "call" and callable(target)):
        return
    if operation == "await" and isinstance(target, types.CoroutineType):
        return
    if (
        operation == "get"
        and isinstance(target, types.FunctionType)
        and name in ("__name__", "__qualname__", "__doc__")
    ):
        return
    is_ours = type(target).__module__ == "__main__" and not isinstance(target, (type, types.FunctionType))
    if operation in _READS and (is_ours or hasattr(type(target), "__next__")):
        return
    if operation in ("get", "set") and is_ours and isinstance(name, str) and not name.startswith("_"):
        return
    raise PermissionError(f"{operation} of an object of the test")


def _shown(target: Any, *_: Any) -> str:
    """Text of an object of the test: what it would print is the test's."""
    return f"<{type(target).__name__} of the test>"


def run_test(test: str, descriptor: int) -> None:
    """Run a test against the solution at the other end of the pipe, and report how it ended."""
    peer = _JudgePeer(descriptor, allow)
    try:
        peer.surroundings = surroundings.TestSurroundings(peer, test)
        shared = {"line": peer.surroundings.line, "file": peer.surroundings.file}
        remote.OPERATIONS.update(dict.fromkeys(_SHOWN, _shown), **shared)
        tree = ast.parse(test, "<test>")
        names = _Names(peer, modules_of(tree))
        execution.own_main_module()
        sys.modules["solution"] = _SolutionModule(names)
        peer.ask("load", "")
        exec(compile(tree, "<test>", "exec"), names)
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

    def allow_all(*_: Any) -> None:  # the judge is trusted
        return

    remote.OPERATIONS.update({"load": load, "global": namespace.__getitem__, "file": surroundings.content_of})
    peer = values.Peer(descriptor, allow_all, is_asked=True)
    surroundings.surround_solution(peer, code)
    try:
        peer.serve()
    except values.BrokenPipeOfValuesError:  # the judge has ended
        pass
    finally:
        sys.stdout.flush()
        os._exit(0)
