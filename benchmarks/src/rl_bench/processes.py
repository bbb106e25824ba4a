"""Processes of a benchmark: one that answers lines, one that writes a JSON, and what the kernel says of any."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0


class Child:
    """A script with arguments in a process: a line to it starts something, a line back ends it.

    Attributes:
        cpu_ms: Milliseconds of processor time, for each `done` of the child that says so.
    """

    def __init__(self, script: Path | str, *arguments: object) -> None:
        command = [sys.executable, str(script), *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.cpu_ms: list[float] = []
        self._said = b""

    def tell(self, what: str = "go") -> None:
        """Send one line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n".encode())
        self.process.stdin.flush()

    def hear(self, first: str = "done") -> str:
        """The rest of the next line that starts with this word; lines of libraries that log are skipped."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            line, end, rest = self._said.partition(b"\n")
            if end:
                self._said = rest
                word, _, told = line.decode().partition(" ")
                if word == first:
                    self.cpu_ms += [float(told)] if first == "done" and told else []
                    return told
                continue
            assert self.process.stdout is not None
            with selectors.DefaultSelector() as waiting:  # `select` takes no descriptor above 1,023
                waiting.register(self.process.stdout, selectors.EVENT_READ)
                is_there = waiting.select(max(0.0, deadline - time.monotonic()))
            if not is_there:
                raise TimeoutError(f"{self.process.args} said nothing for {TIMEOUT_S:g} s")
            if not (more := os.read(self.process.stdout.fileno(), 1 << 16)):
                raise RuntimeError(f"{self.process.args} ended early")
            self._said += more

    def ask(self, what: str = "go", first: str = "done") -> str:
        """Send one line and wait for its answer."""
        self.tell(what)
        return self.hear(first)

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


def say(*words: object) -> None:
    """Send one line to the process that started this one."""
    print(*words, flush=True)


def race(
    script: Path, system: str, given: dict[str, Any], folder: Path, *, python: str | None = None, timeout_s: float = 200
) -> dict[str, Any] | str:
    """Run `script SETTINGS.json SYSTEM` and read the `SYSTEM.json` that it writes; a sentence if memory is too small.

    Raises:
        RuntimeError: the process failed.
    """
    settings = folder / "settings.json"
    settings.write_text(json.dumps(given))
    command = [python or sys.executable, "-W", "ignore", str(script), str(settings), system]
    # Libraries report their start to the hub, which waits where none answers.
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, check=False, timeout=timeout_s, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip
    if done.returncode and "OutOfMemoryError" in done.stderr:
        return "the GPU's memory is too small"
    if done.returncode:
        raise RuntimeError(f"{system} failed: {done.stderr[-3000:]}")
    return json.loads((folder / f"{system}.json").read_text())


def status_bytes(key: str, pid: int | str = "self") -> int:
    """A field of `/proc/PID/status`: `VmRSS` is memory now, `VmHWM` the most since `reset_peak`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def reset_peak(pid: int | str = "self") -> None:
    """Start the most resident memory of a process anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def cpu_s(pid: int) -> float:
    """Processor seconds of a process since its start."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Processes below one, such as the workers of a server."""
    found: list[int] = []
    todo = [pid]
    while todo:
        own = Path(f"/proc/{todo.pop()}/task").glob("*/children")
        below = [int(child) for file in own for child in file.read_text().split()]
        found += below
        todo += below
    return found
