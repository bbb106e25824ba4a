"""Operating system processes of this machine: state, thread stacks, children, SIGKILL."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import re
import signal
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

NOISY = ("torch.fx._symbolic_trace",)
"""Loggers that warn of what is none of a run's business: torch 2.13 of a name of its own, whenever a jagged tensor is
made. Delete when no torch does."""
DUMP_SIGNAL = signal.SIGUSR2
"""Signal on which a worker process writes the stacks of its threads, by a C handler without the interpreter lock."""
DUMP_WAIT_S = 3.0
_NUM_STACK_LINES = 60
_NUM_NEW_OBJECTS = 100_000
"""Number of new objects between collections within `rare_collections`."""
_IDLE = re.compile(r"(concurrent/futures/thread\.py|/ray/.*\.py)\"")
"""Top frames of threads that wait for work."""


def quiet_libraries() -> None:
    """Have the loggers in `NOISY` report errors alone; called where a process begins."""
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def rare_collections() -> Generator[None]:
    """Run the garbage collector rarely while imports and checks make objects that stay.

    Walking them again and again takes a fifth of the time until a run begins.
    """
    before = gc.get_threshold()
    is_raised = 0 < before[0] < _NUM_NEW_OBJECTS  # 0 is off; of several that overlap, in threads too, one restores
    try:
        if is_raised:
            gc.set_threshold(_NUM_NEW_OBJECTS, *before[1:])
        yield
    finally:
        if is_raised:
            gc.set_threshold(*before)


def enable_stack_dumps() -> str:
    """Have `DUMP_SIGNAL` write this process's stacks; returns the file, which other processes of the user can read."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - open while the process lives, and gone with it
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)
    _DUMP_FILES.append(file)
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


_DUMP_FILES: list[Any] = []


def describe(pid: int, dumps: str | None) -> str:
    """Describe a process of this machine: its state in a sentence, then the stacks of its threads.

    `dumps` is the file that `enable_stack_dumps` returned there; None of a process that did not call it.
    """
    state = _state(pid)
    if state is None:
        return f"process {pid} has ended"
    if is_stopped(pid):
        return f"process {pid} is stopped (state {state} in /proc/{pid}/status: SIGSTOP, or a debugger)"
    where = f"process {pid} is in state {state}"
    if dumps is None:
        return where
    stack = _dump(pid, Path(dumps))
    return f"{where}; its stack:\n{stack}" if stack else f"{where}, and wrote no stack within {DUMP_WAIT_S:g} s"


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    return (_state(pid) or "") in ("T", "t")


def _state(pid: int) -> str | None:
    """The letter in /proc/PID/status; None if there is no such process, or a zombie only."""
    try:
        found = re.search(r"^State:\s+(\S)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None or found[1] in "ZX" else found[1]


def _dump(pid: int, file: Path) -> str:
    try:
        before = file.stat().st_size
        os.kill(pid, DUMP_SIGNAL)
        deadline, size = time.monotonic() + DUMP_WAIT_S, before
        while time.monotonic() < deadline and (size == before or file.stat().st_size > size):
            size = file.stat().st_size
            time.sleep(0.05)
        with file.open("rb") as dumps:
            dumps.seek(before)
            text = dumps.read().decode(errors="replace")
    except OSError:
        return ""
    threads = re.split(r"\n(?=Thread |Current thread )", text.strip())
    busy = [thread for thread in threads if not _IDLE.search("".join(thread.splitlines()[1:2]))]
    return "\n".join("\n".join(busy or threads).splitlines()[:_NUM_STACK_LINES])


def children(names: Sequence[str] | None = None) -> dict[int, str]:
    """Child processes of this one: name by process id, all or those of these names."""
    found: dict[int, str] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            program = Path((process / "cmdline").read_bytes().split(b"\0")[0].decode()).name
        except (OSError, ValueError):
            continue
        if parent == os.getpid() and (names is None or program in names):
            found[int(process.name)] = program
    return found


@contextmanager
def sigterm_blocked() -> Generator[None]:
    """Keep SIGTERM from processes that are started inside, and from theirs: they inherit this thread's mask.

    `timeout`, `scancel` and systemd send it to all processes of a job, whose checkpoint needs them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_sigterm() -> None:
    """Let this thread's child processes have SIGTERM again."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@contextmanager
def ended_when_asked(pids: Iterable[int]) -> Generator[None]:
    """Kill processes started under `sigterm_blocked` as soon as SIGTERM waits for them.

    Whoever ends them politely would wait for each in vain. Those that had a SIGTERM before are left to Ray.
    """
    left = {pid for pid in pids if not _has_pending_sigterm(pid)}
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.02):
            for pid in [pid for pid in left if _has_pending_sigterm(pid)]:
                end(pid)
                left.discard(pid)

    thread = threading.Thread(target=look, name="ended-when-asked", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _has_pending_sigterm(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (signal.SIGTERM - 1) & 1 for mask in masks)


def has_ended(pid: int) -> bool:
    """Whether a process has ended, or is a zombie."""
    return _state(pid) is None


def end_sessions() -> None:
    """Kill the sessions that this process has started, with all their descendants.

    No signal to the group of this process reaches them, and one that still imports does not look for its end yet.
    """
    for pid in children():
        with suppress(ProcessLookupError):
            if os.getsid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)


def end(pid: int) -> None:
    """Kill a process by SIGKILL, which ends a stopped one too."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
