"""Supervisor of child processes: starts one, keeps its last lines of output, and ends it with all its descendants.

Used for rl-rollout's servers and for what rl-trainer starts (reward servers, the warm-up). Two kinds of processes have
supervisors of their own, since they are called over descriptors and killed per call: rl-agent's sandbox workers
(`rl_agent.sandbox.worker`) and rl-trainer's pool of reward functions (`rl_trainer.rewards.process_pool`).

`python -m rl_rollout.process COMMAND...` guards a command: inference servers start processes that outlive their
parent. The guard, the command and its descendants are one process group, which ends when the guard's standard input is
closed or the command has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from rl_rollout.base import Subprocess
from rl_rollout.errors import ServerStartError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence


NUM_LAST_LINES = 20
NUM_FIRST_ERRORS = 3
TERMINATE_S = 8.0
"""Seconds from SIGTERM to SIGKILL of a guarded process group."""
STOP_TIMEOUT_S = 10.0
"""Seconds that a killed process may take to end."""
STOPPED_S = 10.0
"""Seconds that a process may be stopped (SIGSTOP) before its server counts as lost."""
EXIT_CHECK_S = 0.02
"""Seconds between two checks whether a process has ended."""

_IS_ERROR = re.compile(r"\b\w*(Error|Exception)\b: \S")


class ChildProcess(Subprocess):
    """Child process that ends when its standard input is closed.

    Args:
        command: Command to run, in a session of its own: a Ctrl-C in this terminal goes to this process alone.
        environment: Environment variables in addition to those of this process.
        name: Name of the process in errors.
        workers: Beginning of the titles of those processes of its session that it cannot do without; empty: none.
        on_line: Called in the reading thread with every line of output; True keeps the line out of `last_lines`.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        name: str,
        workers: str = "",
        on_line: Callable[[str], bool] = lambda line: False,
    ) -> None:
        self.command = list(command)
        self._title, self._workers = workers, dict[int, str]()
        self._why_ended = ""
        self.environment = dict(environment)
        """Environment variables in addition to those of this process."""
        self._name = name
        self._on_line = on_line
        self._process: subprocess.Popen[str] | None = None
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._first_errors: list[str] = []
        self._stopped_since: dict[int, float] = {}
        self._reader = threading.Thread(target=self._read, name="rl-rollout-log", daemon=True)

    @property
    def last_lines(self) -> tuple[str, ...]:
        """Last lines of its output, at most 20."""
        return tuple(self._last_lines)

    @property
    def first_errors(self) -> tuple[str, ...]:
        """First lines of its output that look like errors, at most three."""
        return tuple(self._first_errors)

    @property
    def pid(self) -> int:
        """See `Subprocess`."""
        return 0 if self._process is None else self._process.pid

    @property
    def returncode(self) -> int | None:
        """See `Subprocess`."""
        return None if self._process is None else self._process.poll()

    def why_stopped(self) -> str | None:
        """Message about a process of the session that has been stopped (SIGSTOP) for `STOPPED_S`, or None.

        A stopped process neither ends nor answers, so that everything else waits for it. Durations count from the first
        call that saw it. Always None without /proc.
        """
        now, stopped = time.monotonic(), _stopped_of_session(self.pid)
        self._stopped_since = {pid: self._stopped_since.get(pid, now) for pid in stopped}
        for pid, since in self._stopped_since.items():
            if now - since >= STOPPED_S:
                return self.with_output(
                    f"process {pid} ({stopped[pid]}) of {self._name} is stopped since {now - since:.0f} s (SIGSTOP); "
                    f"end it, or let it go on by `kill -CONT {pid}`"
                )
        return None

    def start(self) -> None:
        """See `Subprocess`."""
        if self._process is not None:
            raise ServerStartError(f"{self._name} was started and stopped already; launch another")
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | self.environment,
                start_new_session=True,
            )
        except OSError as error:
            raise ServerStartError(f"{self._name} cannot be started with {self.command[0]!r}: {error}") from error
        self._reader.start()

    async def wait_until(self, is_ready: Callable[[], Awaitable[bool]], *, timeout_s: float, check_s: float) -> None:
        """Wait until `is_ready` returns True.

        Raises:
            ServerStartError: the process ended, or was not ready in time; has its last lines of output.
        """
        deadline = time.monotonic() + timeout_s
        while not await is_ready():
            if self.returncode is not None:
                raise ServerStartError(self.why_ended())
            if time.monotonic() > deadline:
                raise ServerStartError(
                    self.with_output(f"{self._name} (pid {self.pid}) was not ready within {timeout_s} s")
                )
            await asyncio.sleep(check_s)

    def end_without_workers(self) -> bool:
        """Kill the process and its descendants if a worker is gone that was there at an earlier call; returns whether.

        The others wait for it, and find out late: vLLM 0.32 needs 15 s to answer its requests with an error. A process
        whose title another one has was no worker, but what one has forked. Always False without /proc.
        """
        there = titled(self.pid, self._title) if self._title else {}
        titles = set(there.values())
        gone = {pid: title for pid, title in self._workers.items() if pid not in there and title not in titles}
        self._workers = {**gone, **there}
        if not gone or self.returncode is not None:
            return False
        named = ", ".join(f"{title} (pid {pid})" for pid, title in gone.items())
        self._why_ended = f"{self._name} (pid {self.pid}) was ended, because its process {named} had died"
        self._kill()
        return True

    def why_ended(self) -> str:
        """Message about how the process ended, with its last lines of output."""
        return self.with_output(self._why_ended or f"{self._name} (pid {self.pid}) ended with code {self.returncode}")

    async def has_ended(self, timeout_s: float) -> bool:
        """Wait for the end of the process; returns whether it ended within the time."""
        if self._process is None:
            return False
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None:  # polled: every request of a lost server waits here, too many for threads
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(EXIT_CHECK_S)
        return True

    async def end(self, *, grace_s: float) -> None:
        """End the process by closing its standard input, and by SIGKILL after `grace_s`. Idempotent."""
        process = self._process
        if process is None or process.stdin is None or process.stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        if not await self.has_ended(grace_s):
            self._kill()
            await self.has_ended(STOP_TIMEOUT_S)
        self._reader.join(1.0)

    def wait(self, timeout_s: float) -> int | None:
        """See `Subprocess`."""
        assert self._process is not None, "it was started"
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def kill(self) -> None:
        """See `Subprocess`."""
        process = self._process
        if process is None or process.stdin is None or process.stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        if process.poll() is None:
            self._kill()
            self.wait(STOP_TIMEOUT_S)
        self._reader.join(1.0)

    def _kill(self) -> None:
        """Kill its process group, which is its own: descendants end with it."""
        assert self._process is not None, "it was started"
        with contextlib.suppress(ProcessLookupError):  # the group has ended
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self) -> None:
        """Read the output in a thread; keep the last lines, and the first errors, which later output often buries."""
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:  # open until the last descendant that writes to it has ended
            for line in lines:
                if self._on_line(line):
                    continue
                self._last_lines.append(line.rstrip("\n"))
                if len(self._first_errors) < NUM_FIRST_ERRORS and _IS_ERROR.search(line):
                    self._first_errors.append(line.rstrip("\n"))

    def with_output(self, what: str) -> str:
        """See `Subprocess`."""
        if self.returncode is not None:
            self._reader.join(1.0)  # its last output may not have been read yet
        if not self._last_lines:
            return f"{what}, and it wrote nothing"
        buried = [line for line in self._first_errors if line not in self._last_lines]
        first = "".join(f"\n  | {line}" for line in buried)
        lines = "".join(f"\n  | {line}" for line in self._last_lines)
        return f"{what}; " + (f"its first errors:{first}\n" if first else "") + f"its last lines:{lines}"


def _stopped_of_session(session: int) -> dict[int, str]:
    """Names of the stopped (state T) processes of a session, by process id; traced ones (state t) do not count."""
    found: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*/stat") if session else ():
        with contextlib.suppress(OSError):  # it has ended
            name, _, rest = entry.read_text().partition("(")[2].rpartition(")")
            state, _, _, its_session = rest.split()[:4]
            if state == "T" and int(its_session) == session:
                found[int(entry.parent.name)] = name
    return found


def titled(session: int, beginning: str) -> dict[int, str]:
    """Titles of the processes of a session that live and whose titles have this beginning, by process id."""
    found: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*") if session else ():
        with contextlib.suppress(OSError):  # it has ended
            title = (entry / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace").strip()
            if title.startswith(beginning):
                state, _, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if state not in "ZX" and int(its_session) == session:
                    found[int(entry.name)] = title
    return found


def main(command: list[str]) -> int:
    """Run and guard a command; returns its exit code."""
    signal.signal(signal.SIGTERM, _stay)  # a handler: SIG_IGN would be inherited by the command
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    code = process.wait()
    os.killpg(0, signal.SIGTERM)
    return code if code >= 0 else 128 - code


def _stay(number: int, frame: object) -> None:
    """Ignore SIGTERM, which the guard sends to its own group."""


def _end_with_stdin() -> None:
    os.read(sys.stdin.fileno(), 1)  # nothing is ever written: this returns when the other end is closed
    os.killpg(0, signal.SIGTERM)
    os.killpg(0, signal.SIGCONT)  # a stopped process handles SIGTERM only once it is continued
    time.sleep(TERMINATE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
