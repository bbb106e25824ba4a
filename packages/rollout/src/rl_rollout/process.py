"""Supervisor of child processes: started, watched for their last lines, and ended with all that they started.

rl-rollout's servers run under it, and what rl-trainer starts: reward servers and the warm-up. Two kinds of processes
have one of their own, since they are asked over descriptors and killed by call: rl-agent's sandbox workers
(`rl_agent.sandbox.worker`) and rl-trainer's pool of reward functions (`rl_trainer.rewards.process_pool`).

`python -m rl_rollout.process COMMAND...` guards a command: inference servers start processes of their own, which
outlive whoever started them. The guard, the command and all that it starts are one process group; it ends when the
guard's standard input is closed or the command has ended.
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

from rl_rollout.errors import ServerStartError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence


NUM_LAST_LINES = 20
NUM_FIRST_ERRORS = 3
TERMINATE_S = 8.0
"""How long a guarded group may take to end after SIGTERM, seconds."""
STOP_TIMEOUT_S = 10.0
"""How long a process may take to end by itself before it is killed, seconds."""
STOPPED_S = 10.0
"""How long a process of a group may be stopped (SIGSTOP) before its server is taken for lost, seconds."""
EXIT_CHECK_S = 0.02
"""How often it is looked whether a process has ended, seconds."""

_IS_ERROR = re.compile(r"\b\w*(Error|Exception)\b: \S")


class ChildProcess:
    """One child process, which is to end when its standard input is closed.

    Args:
        command: What to run. It is in a session of its own, so that a Ctrl-C in this terminal is this process's to
            handle.
        environment: Variables beside those of this process.
        name: What errors call it.
        on_line: Called in the reading thread with every line; says whether to keep it from the last lines.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        name: str,
        on_line: Callable[[str], bool] = lambda line: False,
    ) -> None:
        self._command = list(command)
        self.environment = dict(environment)
        """Variables beside those of this process."""
        self._name = name
        self._on_line = on_line
        self._process: subprocess.Popen[str] | None = None
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._first_errors: list[str] = []
        self._stopped_since: dict[int, float] = {}
        self._reader = threading.Thread(target=self._read, name="rl-rollout-log", daemon=True)

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The newest lines that it wrote, 20 at most."""
        return tuple(self._last_lines)

    @property
    def first_errors(self) -> tuple[str, ...]:
        """The first lines that look like errors, of all it wrote."""
        return tuple(self._first_errors)

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return 0 if self._process is None else self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs."""
        return None if self._process is None else self._process.poll()

    def told_stopped(self) -> str | None:
        """A sentence on a process of this session that is stopped since `STOPPED_S` or longer, as far as calls saw it.

        A stopped process ends nothing and answers nothing, so that all else waits for it. Always None where there is
        no /proc.
        """
        now, stopped = time.monotonic(), _stopped_of_session(self.pid)
        self._stopped_since = {pid: self._stopped_since.get(pid, now) for pid in stopped}
        for pid, since in self._stopped_since.items():
            if now - since >= STOPPED_S:
                return self.told(
                    f"process {pid} ({stopped[pid]}) of {self._name} is stopped since {now - since:.0f} s (SIGSTOP); "
                    f"end it, or let it go on by `kill -CONT {pid}`"
                )
        return None

    def start(self) -> None:
        """Start it.

        Raises:
            ServerStartError: there is no such command, or it was started before.
        """
        if self._process is not None:
            raise ServerStartError(f"{self._name} was started and stopped already; launch another")
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | self.environment,
                start_new_session=True,
            )
        except OSError as error:
            raise ServerStartError(f"{self._name} cannot be started with {self._command[0]!r}: {error}") from error
        self._reader.start()

    async def wait_until(self, is_ready: Callable[[], Awaitable[bool]], *, timeout_s: float, check_s: float) -> None:
        """Wait until it is ready.

        Raises:
            ServerStartError: it ended, or was not ready in time; with its last lines.
        """
        deadline = time.monotonic() + timeout_s
        while not await is_ready():
            if self.returncode is not None:
                raise ServerStartError(self.told_end())
            if time.monotonic() > deadline:
                raise ServerStartError(self.told(f"{self._name} (pid {self.pid}) was not ready within {timeout_s} s"))
            await asyncio.sleep(check_s)

    def told_end(self) -> str:
        """A sentence on how it ended, with its last lines."""
        return self.told(f"{self._name} (pid {self.pid}) ended with code {self.returncode}")

    async def has_ended(self, timeout_s: float) -> bool:
        """Whether it ends within the time."""
        if self._process is None:
            return False
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None:  # a thread each would be scarce: every request of a lost server waits here
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(EXIT_CHECK_S)
        return True

    async def end(self, *, grace_s: float) -> None:
        """End it: by closing its standard input, and by force after `grace_s`. Idempotent."""
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
        """For callers without an event loop: how it ended, or None where it has not within the time."""
        assert self._process is not None, "it was started"
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def kill(self) -> None:
        """For callers without an event loop: end it at once, with all that it started. Idempotent."""
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
        """It has its own session, so its own process group: whatever it started ends with it."""
        assert self._process is not None, "it was started"
        with contextlib.suppress(ProcessLookupError):  # the group has ended
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self) -> None:
        """In a thread: keep the last lines, and the first errors, which servers of many processes bury."""
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:  # open until the last process that writes to it has ended
            for line in lines:
                if self._on_line(line):
                    continue
                self._last_lines.append(line.rstrip("\n"))
                if len(self._first_errors) < NUM_FIRST_ERRORS and _IS_ERROR.search(line):
                    self._first_errors.append(line.rstrip("\n"))

    def told(self, what: str) -> str:
        """A sentence on the process, followed by its first errors and last lines."""
        if self.returncode is not None:
            self._reader.join(1.0)  # what it wrote at its end may not have been read yet
        if not self._last_lines:
            return f"{what}, and it wrote nothing"
        buried = [line for line in self._first_errors if line not in self._last_lines]
        first = "".join(f"\n  | {line}" for line in buried)
        lines = "".join(f"\n  | {line}" for line in self._last_lines)
        return f"{what}; " + (f"its first errors:{first}\n" if first else "") + f"its last lines:{lines}"


def _stopped_of_session(session: int) -> dict[int, str]:
    """Names of stopped processes of a session, by process id; one that a debugger holds for a moment is none."""
    found: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*/stat") if session else ():
        with contextlib.suppress(OSError):  # it has ended
            name, _, rest = entry.read_text().partition("(")[2].rpartition(")")
            state, _, _, its_session = rest.split()[:4]
            if state == "T" and int(its_session) == session:
                found[int(entry.parent.name)] = name
    return found


def main(command: list[str]) -> int:
    """Guard a command; returns its exit code."""
    signal.signal(signal.SIGTERM, _stay)  # a handler, and not SIG_IGN, which the command would inherit
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    code = process.wait()
    os.killpg(0, signal.SIGTERM)
    return code if code >= 0 else 128 - code


def _stay(number: int, frame: object) -> None:
    """The guard signals its own group, and goes on."""


def _end_with_stdin() -> None:
    os.read(sys.stdin.fileno(), 1)  # nothing is ever written to it: this returns when the other end is closed
    os.killpg(0, signal.SIGTERM)
    os.killpg(0, signal.SIGCONT)  # one that is stopped takes the other signal then
    time.sleep(TERMINATE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
