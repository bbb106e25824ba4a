"""Reaper process: ends a local Ray, and all that Ray has started, when the controller is gone.

The kernel ends Ray's gcs_server and raylet with the controller. Ray's agents ask that GCS for a minute before they give
up, and a worker that is stopped or stuck in native code never hears of it. The reaper is a process of its own that
waits for the controller's end, however it comes, gives the run's processes a moment to end by themselves, and kills the
rest. It is run as a program, so this module imports the standard library alone.

Processes of the run are those with the run's mark in their environment, and their descendants. Neither shows at the
end: a process title is written over the environment (Ray's agents have one), and the parent may be gone. So the reaper
looks while the controller lives, and remembers every process that it has seen.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

VARIABLE = "RL_TRAINER_RAY_MARK"
"""Environment variable that holds the mark: Ray's processes inherit it, and theirs do."""
DEATH_GRACE_S = 8.0
"""Seconds that processes have to end by themselves after the controller died; they clean up meanwhile."""
LOOK_EVERY_S = 1.0
"""Time between two looks at the processes, while the controller lives. More where a look is expensive: see below."""
_LOOK_SHARE = 0.005
"""Largest share of a core that looking may take."""
_STOP_GRACE_S = 2.0
"""Seconds that processes have after an orderly stop, which has closed the workers and ended Ray."""
_GIVE_UP_S = 30.0
"""A process that SIGKILL has not ended by then is stuck in the kernel."""


class Reaper:
    """Handle of this controller's reaper process. Without /proc it does nothing: Ray has a reaper there."""

    def __init__(self, *, death_grace_s: float = DEATH_GRACE_S) -> None:
        self._mark = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None
        if hasattr(os, "pidfd_open") and Path("/proc/self/environ").exists():
            # A session of its own: neither Ctrl-C nor a kill of the controller's group ends it.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(os.getpid()), self._mark, str(death_grace_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # who reads the controller's output need not wait for this
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    @contextmanager
    def marking(self) -> Generator[None]:
        """Mark the processes that are started in the body, by an environment variable."""
        os.environ[VARIABLE] = self._mark
        try:
            yield
        finally:
            del os.environ[VARIABLE]

    def end(self) -> None:
        """End the marked processes with their descendants, and the reaper. Call it when Ray was shut down."""
        if self._process is None:
            return
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_GRACE_S + _GIVE_UP_S)
        self._process = None


def find_processes(marking: str, known: Mapping[int, int]) -> dict[int, int]:
    """Living processes of a run: the marked ones, those of `known` that still live, and the descendants of both.

    Args:
        marking: `NAME=value`, as it stands in an environment. Empty: look for descendants alone.
        known: Result of an earlier call, or a process to begin with (see `start_time`).

    Returns:
        Start time in clock ticks by process id; the two together name a process for good. Without zombies.
    """
    starts, children, found = dict[int, int](), dict[int, list[int]](), list[int]()
    for name in os.listdir("/proc"):  # noqa: PTH208 - see _read
        if not name.isdigit() or (seen := _parent_and_start(pid := int(name))) is None:
            continue
        parent, starts[pid] = seen
        children.setdefault(parent, []).append(pid)
        if known.get(pid) == starts[pid] or (marking and _is_marked(pid, marking.encode())):
            found.append(pid)
    run = dict[int, int]()
    while found:
        if (pid := found.pop()) not in run:
            run[pid] = starts[pid]
            found += children.get(pid, ())
    return run


def start_time(pid: int) -> int:
    """Start time of a living process, clock ticks since boot; raises ProcessLookupError."""
    if (seen := _parent_and_start(pid)) is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return seen[1]


def _parent_and_start(pid: int) -> tuple[int, int] | None:
    try:
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in b"ZX" else (int(fields[1]), int(fields[19]))


def _is_marked(pid: int, marking: bytes) -> bool:
    try:
        return marking in (environment := _read(f"/proc/{pid}/environ")) and marking in environment.split(b"\0")
    except OSError:  # gone, or another user's
        return False


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a third of the time of Path.read_bytes
        return file.readall()


def _main(controller: int, mark: str, grace_s: float) -> None:
    marking = f"{VARIABLE}={mark}"
    run = dict[int, int]()
    with suppress(ProcessLookupError):  # it has ended already
        handle = os.pidfd_open(controller)
        ready, wait_s = [], LOOK_EVERY_S
        while os.getppid() == controller and not ready:
            ready, _, _ = select.select([handle, sys.stdin], [], [], wait_s)
            start = time.process_time()
            run = find_processes(marking, run)
            wait_s = max(LOOK_EVERY_S, (time.process_time() - start) / _LOOK_SHARE)
        grace_s = _STOP_GRACE_S if ready and handle not in ready else grace_s
    start = time.monotonic()
    while run := find_processes(marking, run):
        passed_s = time.monotonic() - start
        if passed_s > grace_s + _GIVE_UP_S:
            return
        for pid in run if passed_s > grace_s else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
