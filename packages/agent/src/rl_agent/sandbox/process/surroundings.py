"""Streams, files and introspection that a test and its solution share, though each has its own process.

A test that redirects standard output gets what the solution prints; one that replaces standard input or `input` gives
it lines; either may open a file that the other has written. Nothing else of the test's process reaches the solution.
"""

from __future__ import annotations

import builtins
import io
import linecache
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_agent.sandbox.process.values import Peer

_MAX_PRINTED = 1 << 20
_MAX_FILE_BYTES = 1 << 24
_INPUT = builtins.input
_INSPECTED = ("isfunction", "isclass", "ismethod", "iscoroutinefunction", "isgeneratorfunction", "isasyncgenfunction",
              "isabstract", "getsource", "getdoc")  # fmt: skip


class _Tee:
    """Output stream that also records its text."""

    def __init__(self, stream: Any, name: str, printed: list[tuple[str, str]]) -> None:
        self._stream, self._name, self._printed = stream, name, printed

    def write(self, text: str) -> int:
        if sum(len(piece) for _, piece in self._printed[-100:]) < _MAX_PRINTED and len(self._printed) < _MAX_PRINTED:
            self._printed.append((self._name, text))
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Lines(io.TextIOBase):
    """Standard input of a solution: the lines that the test gives."""

    def __init__(self, peer: Peer, real: Any) -> None:
        self._peer = peer
        self.buffer = real.buffer

    def readline(self, size: int = -1) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        del size
        line = self._peer.ask("line", "")
        return line if isinstance(line, str) else ""

    def read(self, size: int | None = -1) -> str:
        del size
        return "".join(iter(self.readline, ""))

    def __iter__(self) -> Any:
        return iter(self.readline, "")


class TestSurroundings:
    """Surroundings of a test: what it redirects and opens."""

    def __init__(self, peer: Peer, test: str) -> None:
        self._streams = {"out": sys.stdout, "err": sys.stderr}
        self._input = sys.stdin
        self._written: set[str] = set()
        _share_files(peer, self._written)
        if "inspect" in test:
            _ask_for_introspection(peer)
        if "sleep" in test:
            _forget_over_time(peer)

    def show(self, printed: Any) -> None:
        """Write what the solution printed to streams that the test has redirected."""
        for name, text in printed or ():
            stream = {"out": sys.stdout, "err": sys.stderr}[name]
            if stream is not self._streams[name] and isinstance(text, str):
                stream.write(text)

    def line(self, _: str) -> str:
        """Next line of what the test gives as input."""
        if builtins.input is not _INPUT:
            return f"{builtins.input()}\n"
        return "" if sys.stdin is self._input else sys.stdin.readline()

    def file(self, path: str) -> bytes | None:
        """Content of a file that the test has written."""
        return _content(path) if path in self._written else None


def surround_solution(peer: Peer, code: str) -> None:
    """Set up the streams of a solution, the files that it shares, and its source for `inspect`."""
    printed: list[tuple[str, str]] = []

    def taken() -> list[tuple[str, str]]:
        pieces, printed[:] = [*printed], []
        return pieces

    sys.stdout, sys.stderr = _Tee(sys.stdout, "out", printed), _Tee(sys.stderr, "err", printed)
    sys.stdin = _Lines(peer, sys.stdin)
    peer.printed = taken
    _share_files(peer, None)
    if "getsource" in code:
        linecache.cache["<code>"] = (len(code), None, code.splitlines(keepends=True), "<code>")


def content_of(path: str) -> bytes | None:
    """Content of a file of the solution's process; None if there is none."""
    return _content(path)


_open = io.open


def _content(path: str) -> bytes | None:
    try:
        with _open(path, "rb") as file:
            return file.read(_MAX_FILE_BYTES)
    except OSError:
        return None


def _share_files(peer: Peer, written: set[str] | None) -> None:
    """Let `open` read files that the other side has written; `written` collects those of this side."""

    def opened(file: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
        is_path, is_read = isinstance(file, (str, os.PathLike)), not set(mode) & set("wax+")
        try:
            found = _open(file, mode, *given, **named)
        except FileNotFoundError:
            if not is_path or not isinstance(path := os.fspath(file), str):
                raise
            if not is_read:  # into a folder that the test has made
                folder = os.path.dirname(path)
                if written is not None or not folder.startswith("/tmp/"):
                    raise
                os.makedirs(folder, exist_ok=True)
                return _open(file, mode, *given, **named)
            data = peer.ask("file", os.path.abspath(path))
            if not isinstance(data, bytes):
                raise
            if "b" in mode:
                return io.BytesIO(data)
            encoding = named.get("encoding") or "utf-8"
            return io.TextIOWrapper(io.BytesIO(data), encoding, named.get("errors"), named.get("newline"))
        if written is not None and is_path and not is_read:
            written.add(os.path.abspath(os.fspath(file)))
        return found

    builtins.open = io.open = opened
    if written is not None:
        for name in ("exists", "isfile"):
            setattr(os.path, name, _existing(getattr(os.path, name), peer))


def _existing(real: Callable[[Any], bool], peer: Peer) -> Callable[[Any], bool]:
    def exists(path: Any) -> bool:
        is_here = real(path)
        return is_here or isinstance(peer.ask("file", os.path.abspath(os.fspath(path))), bytes)

    return exists


def _forget_over_time(peer: Peer) -> None:
    """Invalidate the cached state of the solution's objects after a pause of the test."""
    import asyncio
    import time

    sleep, asleep = time.sleep, asyncio.sleep

    def slept(seconds: float) -> None:
        peer.forget()
        sleep(seconds)

    async def aslept(delay: float, result: Any = None) -> Any:
        peer.forget()
        return await asleep(delay, result)

    time.sleep, asyncio.sleep = slept, aslept  # pyright: ignore[reportAttributeAccessIssue]


def _ask_for_introspection(peer: Peer) -> None:
    """Let `inspect` answer for functions and classes of the solution."""
    import inspect

    def asking(name: str) -> Any:
        real = getattr(inspect, name)

        def answer(target: Any) -> Any:
            number = peer.number_of(target)
            return real(target) if number is None else peer.ask("inspect", number, name)

        return answer

    for name in _INSPECTED:
        setattr(inspect, name, asking(name))
