"""Execution of code: its output goes to one file, followed by a report of how it ended.

The report is the code's own claim, for the code could write one too: whoever reads it believes nothing of it that an
honest process could not have printed.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import os
import resource
import struct
import sys
import traceback
import types
from typing import Any

REPORT = struct.Struct("<I")
"""Length of the report before it, bytes: the last field of the output file."""
MAX_REPORT_BYTES = 8192
"""Bytes that the limit of file sizes leaves for the report."""
_FRAMES = ("<code>", "<test>")


def own_main_module(name: str = "__main__") -> types.ModuleType:
    """Fresh `__main__` module for code: dataclasses and pickle find it, and ours is not in `sys.modules`."""
    module = types.ModuleType(name)
    sys.modules.pop("__main__", None)
    sys.modules["__main__"] = sys.modules[name] = module
    return module


def open_streams() -> None:
    """Open standard streams on descriptors 0 to 2."""
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stderr = open(1, "w", closefd=False, errors="replace")  # noqa: SIM115
    sys.__stdout__ = sys.__stderr__ = sys.stdout


def warm_up() -> None:
    """Warm up before the fork what every run needs: types of the syntax tree, an encoder."""
    compile(ast.parse("0"), "<code>", "exec")
    json.dumps({"kind": 0})


def run(code: str, namespace: dict[str, Any], *, is_last: bool) -> None:
    """Run code and report; waits for its threads and exit handlers if it is the process's last code."""
    ours = os.getpid()
    kind, error = _execute(code, namespace)
    if is_last:
        kind, error = _leave(kind, error)
    if os.getpid() != ours:  # a fork of the code's came to its end
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(0)
    for stream in (sys.stdout, sys.__stdout__):
        try:
            stream.flush()  # pyright: ignore[reportOptionalMemberAccess]
        except (OSError, ValueError, AttributeError):  # too much was written, or the code closed or replaced it
            kind, error = ("output", "too much output") if kind == "ok" else (kind, error)
    finish(kind, error, os.fstat(1).st_size)


def finish(kind: str, error: str, size: int) -> None:
    """Append the report to the output."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        report = json.dumps({"kind": kind, "error": error[-2000:], "num_output_bytes": size}).encode()
        os.lseek(1, 0, os.SEEK_END)
        os.write(1, report + REPORT.pack(len(report)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _execute(code: str, namespace: dict[str, Any]) -> tuple[str, str]:
    """Run code; as in a notebook, the value of an expression in the last line is printed."""
    try:
        tree = ast.parse(code, "<code>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<code>", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<code>", "eval"), namespace)
            if value is not None:
                print(repr(value))  # noqa: T201
        sys.stdout.flush()
    except MemoryError:
        return "memory", "MemoryError: the memory limit was reached"
    except SystemExit as error:
        return ("ok", "") if error.code in (None, 0) else ("error", f"SystemExit: {error.code}")
    except OSError as error:
        if error.errno == errno.EFBIG:
            return "output", "too much output"
        return "error", short(error)
    except BaseException as error:  # noqa: BLE001 - code may raise anything
        return "error", short(error)
    return "ok", ""


def _leave(kind: str, error: str) -> tuple[str, str]:
    """End as an interpreter does: wait for threads, and call exit handlers, whatever they raise."""
    try:
        if (threading := sys.modules.get("threading")) is not None:
            threading._shutdown()
        if (atexit := sys.modules.get("atexit")) is not None:
            atexit._run_exitfuncs()
    except OSError as problem:
        if problem.errno == errno.EFBIG:
            return "output", "too much output"
    except BaseException:  # noqa: BLE001 - an interpreter ignores it too
        return kind, error
    return kind, error


def short(error: BaseException) -> str:
    """Traceback without the sandbox's own frames."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in _FRAMES]
    lines = [f"line {frame.lineno}, in {frame.name}\n" for frame in frames[-5:]]
    return "".join([*lines, *traceback.format_exception_only(error)]).strip()
