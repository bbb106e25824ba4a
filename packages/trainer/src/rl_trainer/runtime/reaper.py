"""Reaper process: ends a local Ray, and all that Ray has started, when the controller is gone.

The kernel ends Ray's gcs_server and raylet with the controller. Ray's agents ask that GCS for a minute before they give
up, and a worker that is stopped or stuck in native code never hears of it. The reaper is a process of its own that
waits for the controller's end, however it comes, gives what carries its mark a moment to end by itself, and kills the
rest. It is run as a program, so this module imports the standard library alone.
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
    from collections.abc import Generator

VARIABLE = "RL_TRAINER_RAY_MARK"
"""Environment variable that holds the mark: Ray's processes inherit it, and theirs do."""
DEATH_GRACE_S = 8.0
"""What processes have to end by themselves after the controller died: they delete files and end servers meanwhile."""
_STOP_GRACE_S = 2.0
"""The same after a stop, which has closed the workers and ended Ray."""
_GIVE_UP_S = 30.0
"""A process that SIGKILL has not ended by then is stuck in the kernel."""


class Reaper:
    """Starts the reaper process of this controller. Where there is no /proc, nothing: there Ray has a reaper.

    Args:
        death_grace_s: What marked processes have to end by themselves after the controller died, seconds.
    """

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
        """Processes that are started in the body carry the mark."""
        os.environ[VARIABLE] = self._mark
        try:
            yield
        finally:
            del os.environ[VARIABLE]

    def end(self) -> None:
        """End what carries the mark, and the reaper. Call it when Ray was shut down."""
        if self._process is None:
            return
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_GRACE_S + _GIVE_UP_S)
        self._process = None


def marked(mark: str) -> list[int]:
    """Process ids whose environment holds `VARIABLE=mark`, zombies left out."""
    wanted, found = f"{VARIABLE}={mark}".encode(), list[int]()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone, or another user's
            if wanted in (entry / "environ").read_bytes().split(b"\0"):  # a zombie has none
                found.append(int(entry.name))
    return found


def _main(controller: int, mark: str, grace_s: float) -> None:
    with suppress(ProcessLookupError):  # it has ended already
        handle = os.pidfd_open(controller)
        if os.getppid() == controller:
            ready, _, _ = select.select([handle, sys.stdin], [], [])
            grace_s = grace_s if handle in ready else _STOP_GRACE_S
    start = time.monotonic()
    while left := marked(mark):
        passed_s = time.monotonic() - start
        if passed_s > grace_s + _GIVE_UP_S:
            return
        for pid in left if passed_s > grace_s else []:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
