"""A process that runs code for somebody else. Started by path, it imports the standard library alone and obeys limits.

Requests and answers are lines of JSON on the descriptors that it was started with as standard input and output; code
never sees these two. `fresh` requests run in a fork, so that no run sees another; others share one namespace.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import resource
import select
import sys
import traceback

import isolation  # pyright: ignore[reportMissingImports] - this folder is the path of the process that it is started in


def main() -> None:
    """Serve until standard input ends."""
    settings = json.loads(sys.argv[1])
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    isolation.die_with_parent()
    isolated: set[str] = set()
    if settings["may_isolate"]:
        places = {"workspace": settings["workspace"], "readable": settings["readable"]}
        isolated = isolation.enter(**places, scratch_bytes=settings["scratch_bytes"])
    else:
        isolation.adopt_orphans()
    if settings["workspace"] and "files" not in isolated:
        os.chdir(settings["workspace"])
    _limit(settings)
    _tell(answers, {"isolated": sorted(isolated)})
    namespace: dict[str, object] = {"__name__": "__main__"}
    is_kept = False
    for line in requests:
        request = json.loads(line)
        if request["is_fresh"]:
            _tell(answers, _fork(request, settings, isolated))
            continue
        if not is_kept and isolated:
            isolation.drop_privileges()
        is_kept = True
        _tell(answers, _run(request, namespace, settings))


def _tell(answers: object, message: dict[str, object]) -> None:
    answers.write(json.dumps(message).encode() + b"\n")  # pyright: ignore[reportAttributeAccessIssue]
    answers.flush()  # pyright: ignore[reportAttributeAccessIssue]


def _limit(limits: dict[str, int]) -> None:
    """Hard limits: code cannot raise them again."""
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def _fork(request: dict[str, str], limits: dict[str, int], isolated: set[str]) -> dict[str, object]:
    """Run in a child; what it started ends with it. A deadline is the parent's of us both: it kills us."""
    reader, writer = os.pipe()
    child = isolation.fresh_child(isolated, limits["scratch_bytes"])
    if child == 0:
        os.close(reader)
        if isolated:
            isolation.drop_privileges()
        try:
            result = _run(request, {"__name__": "__main__"}, limits)
            data = json.dumps(result).encode()
            while data:
                data = data[os.write(writer, data) :]
        finally:
            os._exit(0)
    os.close(writer)
    data = _read_until_end(reader, child)
    _, status = os.waitpid(child, 0)
    if "processes" not in isolated:
        isolation.kill_descendants(os.getpid())
    if data:
        with contextlib.suppress(ValueError):
            return json.loads(data)
    code = os.waitstatus_to_exitcode(status)
    signal = -code if code < 0 else code - 128 if isolated and 128 < code <= 192 else 0  # as a shell tells it
    error = f"the process was killed by signal {signal}" if signal else "the process ended by itself"
    return {"kind": "died", "output": "", "error": error, "num_output_bytes": 0}


def _read_until_end(reader: int, child: int) -> bytes:
    """What comes until the child has ended; others that it started may hold the pipe open for longer."""
    data, is_over = b"", False
    os.set_blocking(reader, False)
    with os.fdopen(reader, "rb", buffering=0) as pipe, os.fdopen(os.pidfd_open(child)) as end:
        while not is_over:
            is_over = end in select.select([pipe, end], [], [])[0]
            while piece := pipe.read(1 << 16):
                data += piece
            is_over = is_over or piece == b""  # None: nothing yet
    return data


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
