"""Spans of the batches that processes put, claim, get and ack, as one timeline for Chrome's and Perfetto's viewers.

Set `RL_TQ_TRACE` to a directory in every process, or call `trace`; each process writes a file of its own there, one
span per line, so that one that is killed loses none. `rl-tq trace DIRECTORY` joins them. Off, it costs nothing.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rl_tq.errors import TransferQueueError
from rl_tq.types import BatchMeta, PerGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rl_tq.base import TransferQueue

VARIABLE = "RL_TQ_TRACE"
"""The environment variable that names the directory."""
_SUFFIX = ".spans"
_TRACED = {"put": "put", "get_meta": "claim", "get": "get", "ack": "ack", "nack": "nack", "clear": "clear"}
_writers: dict[tuple[int, Path], _Writer] = {}


class _Writer:
    """The file of one process."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        # Monotonic clocks, shown as the time of day, which other hosts share.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self.write({"process": f"{socket.gethostname()} {os.getpid()} {Path(sys.argv[0]).name}"})

    def write(self, line: dict[str, Any]) -> None:
        """Write one line, in one call."""
        os.write(self._fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def span(self, name: str, start_ns: int, attributes: dict[str, Any]) -> None:
        """Write one span, which ends now."""
        took = (time.monotonic_ns() - start_ns) / 1e3
        thread = threading.get_native_id()
        self.write(
            {"name": name, "ts": (self._epoch_ns + start_ns) / 1e3, "dur": took, "tid": thread, "args": attributes}
        )


def trace(queue: TransferQueue, directory: str | Path) -> TransferQueue:
    """Have a client's `put`, `get_meta`, `get`, `ack`, `nack` and `clear` leave spans in a directory; returns it.

    A span has start and end, the partition, task and columns, row numbers and leases (the batch), bytes of tensors and
    of `bytes`, and the error if it ended with one.
    """
    key = (os.getpid(), Path(directory))
    writer = _writers.get(key)
    if writer is None:
        writer = _writers.setdefault(key, _Writer(key[1]))
    for method, name in _TRACED.items():
        setattr(queue, method, _traced(writer, name, getattr(queue, method)))
    return queue


def _traced(writer: _Writer, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def traced(*args: Any, **kwargs: Any) -> Any:
        start_ns = time.monotonic_ns()
        attributes: dict[str, Any] = {}
        try:
            answer = call(*args, **kwargs)
            attributes = _attributes(name, args, kwargs, answer)
        except BaseException as error:
            attributes = {**_attributes(name, args, kwargs, None), "error": f"{type(error).__name__}: {error}"[:400]}
            raise
        finally:
            writer.span(name, start_ns, attributes)
        return answer

    return traced


def _attributes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], answer: Any) -> dict[str, Any]:
    """Attributes of the span of a call."""
    given = args[0] if args else next((kwargs[key] for key in ("data", "meta", "meta_or_partition") if key in kwargs), None)  # fmt: skip  # noqa: E501
    meta = answer if isinstance(answer, BatchMeta) else given if isinstance(given, BatchMeta) else None
    attributes = {key: kwargs[key] for key in ("partition", "task", "batch_size", "step") if key in kwargs}
    if meta is not None:
        attributes |= {"partition": meta.partition, "rows": _ranges(meta.rows), "num_rows": len(meta)}
        attributes |= {"columns": list(meta.columns)} if name != "ack" else {}
        attributes |= {"task": meta.task, "leases": sorted(set(meta.leases))} if meta.leases else {}
    elif isinstance(given, str):
        attributes["partition"] = given
    if name in ("put", "get"):
        attributes["bytes"] = _nbytes(given if name == "put" else answer)
    return attributes


def _ranges(numbers: Sequence[int]) -> str:
    """`3-7,9`."""
    parts: list[str] = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(parts)


def _nbytes(value: Any) -> int:
    if isinstance(value, PerGroup):
        return _nbytes(value.values)
    if isinstance(value, bytes | bytearray | memoryview):
        return len(value)
    if isinstance(value, Mapping) or hasattr(value, "keys"):
        return sum(_nbytes(value.get(key)) for key in cast("Any", value).keys())  # noqa: SIM118 - a TensorDict as well
    if isinstance(value, list | tuple):
        return sum(map(_nbytes, cast("Sequence[Any]", value)))
    if getattr(value, "is_nested", False):
        return int(value.values().nbytes)
    nbytes: Any = getattr(value, "nbytes", 0)
    return nbytes if isinstance(nbytes, int) else 0


# Reading


def chrome_trace(directory: str | Path) -> dict[str, Any]:
    """Timeline of a directory's spans in the Trace Event Format, with an arrow from each claim to what came of it.

    Raises:
        TransferQueueError: there are none.
    """
    files = sorted(Path(directory).glob(f"*{_SUFFIX}"))
    if not files:
        raise TransferQueueError(f"{directory} has no spans: set {VARIABLE} to it before processes serve or connect")
    events: list[dict[str, Any]] = []
    for number, path in enumerate(files, 1):  # process ids of several hosts may be the same
        for line in _lines(path):
            if "process" in line:
                events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": line["process"]}})
            else:
                events.append({"ph": "X", "cat": "rl-tq", "pid": number, **line})
    return {"traceEvents": [*events, *_arrows(events)], "displayTimeUnit": "ms"}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().split(b"\n")[:-1]:  # the rest is of a process that was killed in a write
        yield json.loads(line)


def _arrows(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    batches: dict[str, list[dict[str, Any]]] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        for lease in event["args"].get("leases", ()):
            batches.setdefault(f"{event['args']['partition']}/{lease}", []).append(event)
    for key, spans in batches.items():
        for i, span in enumerate(spans if len(spans) > 1 else ()):
            phase = "s" if i == 0 else "f" if i == len(spans) - 1 else "t"
            arrow = {"ph": phase, "cat": "batch", "name": "batch", "id": key, "bp": "e"}
            yield {**arrow, "pid": span["pid"], "tid": span["tid"], "ts": span["ts"] + span["dur"] / 2}
