"""Tracing (`rl-train --profile`): spans of every process of a run, as one timeline for Perfetto and Chrome.

Each process writes a file of its own into a folder that an environment variable names, a span per line, so that one
that is killed loses none; at the end they are joined to `trace.json` (Trace Event Format). rl-tq leaves its spans in
the same folder. Times are the time of day of each host, carried on by its monotonic clock: processes of one host agree
to the microsecond, hosts as well as their clocks do. Without the variable nothing is measured and nothing is written.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_trainer.output_dir import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from contextlib import AbstractContextManager

VARIABLE = "RL_TRAINER_TRACE"
"""Names the folder."""
_QUEUE_VARIABLE = "RL_TQ_TRACE"
_SUFFIX = ".spans"
RANGES: list[Callable[[str], AbstractContextManager[Any]]] = []
"""What makes a range of another profiler, if one is at work, from a span's name."""
_NOTHING = nullcontext()
_NAMES: dict[int, str] = {}
"""Names of processes: a forked one has none."""


class _Writer:
    """Trace file of one process."""

    def __init__(self, folder: Path) -> None:
        path = folder / f"{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        process = f"{socket.gethostname()} {os.getpid()} {Path(sys.argv[0]).name}"
        self._write({"process": process, "name": _NAMES.get(os.getpid())})

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def span(self, name: str, start_ns: int, args: dict[str, Any], **more: Any) -> None:
        """Write one span, which ends now."""
        took = (time.monotonic_ns() - start_ns) / 1e3
        where = {"ts": (self._epoch_ns + start_ns) / 1e3, "dur": took, "tid": threading.get_native_id()}
        self._write({"name": name, **where, "args": args, **more})


@functools.cache
def _writer_of(pid: int, folder: str) -> _Writer:
    del pid  # a forked process writes a file of its own
    return _Writer(Path(folder))


def _writer() -> _Writer | None:
    folder = os.environ.get(VARIABLE)
    return None if folder is None else _writer_of(os.getpid(), folder)


def name_process(name: str) -> None:
    """Name this process in the trace; without a name it has that of its program."""
    _NAMES[os.getpid()] = name


def span(name: str, **args: Any) -> AbstractContextManager[None]:
    """Record the body as a span of this thread, and as an NVTX range; does nothing unless the run is profiled."""
    writer = _writer()
    if RANGES:
        return _ranged(writer, name, args)
    return _NOTHING if writer is None else _span(writer, name, args)


@contextmanager
def _ranged(writer: _Writer | None, name: str, args: dict[str, Any]) -> Generator[None]:
    with RANGES[0](name), _NOTHING if writer is None else _span(writer, name, args):
        yield


@contextmanager
def _span(writer: _Writer, name: str, args: dict[str, Any]) -> Generator[None]:
    start_ns = time.monotonic_ns()
    try:
        yield
    finally:
        writer.span(name, start_ns, args)


def trace_requests(server: Any) -> None:
    """Record every `generate` of a server as an asynchronous span; does nothing unless the run is profiled."""
    writer = _writer()
    if writer is None:
        return
    generate = server.generate

    async def traced(request: Any) -> Any:
        start_ns = time.monotonic_ns()
        attributes: dict[str, Any] = {"prompt_tokens": len(request.prompt_token_ids)}
        try:
            output = await generate(request)
            attributes |= {"completion_tokens": len(output.token_ids), "finish_reason": str(output.finish_reason)}
        except BaseException as error:
            attributes["error"] = f"{type(error).__name__}: {error}"[:400]
            raise
        finally:
            writer.span("request", start_ns, attributes, request=request.request_id)
        return output

    server.generate = traced


@contextmanager
def profiled(output_dir: Path | None) -> Generator[None]:
    """Trace the processes that are started in the body; None traces nothing.

    Leaves `trace.json` in `output_dir`, also when the body raises.
    """
    if output_dir is None:
        yield
        return
    folder = output_dir / "trace"
    folder.mkdir(parents=True, exist_ok=True)
    before = {name: os.environ.get(name) for name in (VARIABLE, _QUEUE_VARIABLE)}
    os.environ.update(environment(folder))
    name_process(f"controller, process {os.getpid()}")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        write_whole(output_dir / "trace.json", json.dumps(chrome_trace(folder)))


def environment(folder: Path | None = None) -> dict[str, str]:
    """Environment variables that make a process write spans: into `folder`, or where this process writes its own."""
    where = os.environ.get(VARIABLE) if folder is None else str(folder.absolute())
    return {} if where is None else {VARIABLE: where, _QUEUE_VARIABLE: where}


def chrome_trace(folder: Path) -> dict[str, Any]:
    """Timeline of all spans of a folder in the Trace Event Format; requests are asynchronous events, others nested."""
    numbers: dict[str, int] = {}
    names: dict[str, str] = {}
    events: list[dict[str, Any]] = []
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        number = 0
        for line in _lines(path):
            if "process" in line:  # process ids of several hosts may be the same
                process = line["process"]
                number = numbers.setdefault(process, len(numbers) + 1)
                names[process] = line.get("name") or names.get(process) or process  # rl-tq's files have no names
            elif "request" in line:
                common = {"cat": "rollout", "name": line["name"], "id": line["request"]}
                common |= {"pid": number, "tid": line["tid"]}
                events.append({"ph": "b", **common, "ts": line["ts"], "args": line["args"]})
                events.append({"ph": "e", **common, "ts": line["ts"] + line["dur"]})
            else:
                events.append({"ph": "X", "cat": "rl", "pid": number, **line})
    events += [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": names[process]}}
        for process, number in numbers.items()
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().split(b"\n")[:-1]:  # the rest is of a process that was killed in a write
        yield json.loads(line)
