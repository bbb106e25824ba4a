"""A process that runs code for somebody else. Started by path, it imports the standard library alone and obeys limits.

Requests and answers are lines of JSON on the descriptors that it was started with as standard input and output; code
never sees these two. `fresh` requests run in a fork, so that no run sees another; others share one namespace.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import json
import os
import resource
import sys
import traceback

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9


def main() -> None:
    """Serve until standard input ends."""
    limits = json.loads(sys.argv[1])
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    is_offline = _leave_network(libc) if limits["deny_network"] else False
    _limit(limits)
    _tell(answers, {"is_offline": is_offline})
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line in requests:
        request = json.loads(line)
        _tell(answers, _fork(request, limits) if request["is_fresh"] else _run(request, namespace, limits))


def _tell(answers: object, message: dict[str, object]) -> None:
    answers.write(json.dumps(message).encode() + b"\n")  # pyright: ignore[reportAttributeAccessIssue]
    answers.flush()  # pyright: ignore[reportAttributeAccessIssue]


def _leave_network(libc: ctypes.CDLL) -> bool:
    """Move into a network of no interfaces; whether the kernel let us."""
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return False
    with contextlib.suppress(OSError):  # unmapped, the process is nobody and could not read its own files
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 - no import that is not needed
                file.write(text)
    return True


def _limit(limits: dict[str, int]) -> None:
    """Hard limits: code cannot raise them again."""
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def _fork(request: dict[str, str], limits: dict[str, int]) -> dict[str, object]:
    """Run in a child. A deadline is the parent's of us both: it kills the process group."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            result = _run(request, {"__name__": "__main__"}, limits)
            data = json.dumps(result).encode()
            while data:
                data = data[os.write(writer, data) :]
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    _, status = os.waitpid(child, 0)
    if data:
        with contextlib.suppress(ValueError):
            return json.loads(data)
    signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    error = f"the process was killed by signal {signal}" if signal else "the process ended by itself"
    return {"kind": "died", "output": "", "error": error, "num_output_bytes": 0}


def _run(request: dict[str, str], namespace: dict[str, object], limits: dict[str, int]) -> dict[str, object]:
    capture = os.memfd_create("output")
    given = os.memfd_create("input")
    os.write(given, request["stdin"].encode())
    os.lseek(given, 0, os.SEEK_SET)
    os.dup2(given, 0)
    for descriptor in (1, 2):
        os.dup2(capture, descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stderr = open(1, "w", closefd=False, errors="replace")  # noqa: SIM115
    kind, error = _execute(request["code"], namespace)
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # too much was written, or the code closed it
        kind, error = ("output", "too much output") if kind == "ok" else (kind, error)
    size = os.fstat(capture).st_size
    output = os.pread(capture, limits["output_bytes"], 0).decode(errors="replace")
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    for descriptor in (capture, given):
        os.close(descriptor)
    return {"kind": kind, "output": output, "error": error[-2000:], "num_output_bytes": size}


def _execute(code: str, namespace: dict[str, object]) -> tuple[str, str]:
    """Run code; like a notebook, it prints the value of a last line that is an expression."""
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
        if error.errno == 27:  # EFBIG: the output's limit
            return "output", "too much output"
        return "error", _short(error)
    except BaseException as error:  # noqa: BLE001 - code may raise anything
        return "error", _short(error)
    return "ok", ""


def _short(error: BaseException) -> str:
    """The traceback without this file's own frames."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == "<code>"]
    lines = [f"line {frame.lineno}, in {frame.name}\n" for frame in frames[-5:]]
    return "".join([*lines, *traceback.format_exception_only(error)]).strip()


if __name__ == "__main__":
    main()
