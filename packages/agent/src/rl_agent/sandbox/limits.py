"""Limits of a run of code, and the control groups that hold them for all its processes together."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_agent.types import SandboxLimits

MIN_MEMORY_BYTES = 1 << 26
"""Address space of Python itself, bytes."""
_WORKER_BYTES = 1 << 25
"""Memory of a warm worker itself, in addition to the run's, bytes."""
_WORKER_PROCESSES = 8
_END_TIMEOUT_S = 5.0
_numbers = itertools.count()


class ControlGroup:
    """Control group of one worker, version 2 or 1: the kernel limits its memory and processes.

    No process is moved: the group is made below or next to this process's own, if this user may, and the worker joins.

    Raises:
        OSError: no group can be made here.
    """

    def __init__(self, limits: SandboxLimits, root: str = "/") -> None:
        self.version, parents = _parents(Path(root))
        name = f"rl-agent-{os.getpid()}-{next(_numbers)}"
        self.paths = [parent / name for parent in dict.fromkeys(parents.values())]
        self._memory = parents["memory"] / name
        memory, processes = str(limits.memory_bytes + _WORKER_BYTES), str(limits.num_processes + _WORKER_PROCESSES)
        try:
            for parent in dict.fromkeys(parents.values()):
                _forget_dead(parent)
                (parent / name).mkdir()
            (parents["pids"] / name / "pids.max").write_text(processes)
            if self.version == 2:
                (self._memory / "memory.max").write_text(memory)
                (self._memory / "memory.oom.group").write_text("1")
                with contextlib.suppress(OSError):  # a kernel without swap
                    (self._memory / "memory.swap.max").write_text("0")
            else:
                (self._memory / "memory.limit_in_bytes").write_text(memory)
                with contextlib.suppress(OSError):
                    (self._memory / "memory.memsw.limit_in_bytes").write_text(memory)
            self.num_kills()
        except BaseException:
            self.remove(timeout_s=0)
            raise

    def num_kills(self) -> int:
        """Number of processes that the kernel has killed at the memory limit."""
        file = self._memory / ("memory.events" if self.version == 2 else "memory.oom_control")
        counts = dict(line.split() for line in file.read_text().splitlines())
        return int(counts.get("oom_kill", 0))

    def remove(self, *, timeout_s: float = _END_TIMEOUT_S) -> None:
        """Remove the group, whose processes have been killed; the kernel may take a moment to notice."""
        deadline = time.monotonic() + timeout_s
        for path in self.paths:
            while True:
                try:
                    path.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        break  # the next run of this user removes it
                    time.sleep(0.005)
                else:
                    break


def _parents(root: Path) -> tuple[int, dict[str, Path]]:
    """Version of control groups, and the folder per controller in which groups can be created.

    Raises:
        OSError: there is none.
    """
    own = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    mounts = [line.split() for line in (root / "proc/self/mountinfo").read_text().splitlines()]
    places: dict[str, Path] = {}
    for number, controllers, path in own:
        kind = "cgroup2" if number == "0" else "cgroup"
        for fields in mounts:
            mark = fields.index("-")
            options = fields[mark + 3].split(",")
            if fields[mark + 1] == kind and (kind == "cgroup2" or controllers in options):
                below = os.path.relpath(path, fields[3])
                if not below.startswith(".."):
                    place = root / fields[4].lstrip("/") / below
                    places.update(dict.fromkeys(controllers.split(",") if kind == "cgroup" else ("2",), place))
    if "2" in places:
        for place in (places["2"], places["2"].parent):  # below this process's own, or next to it
            with contextlib.suppress(OSError):
                given = set((place / "cgroup.subtree_control").read_text().split())
                if {"memory", "pids"} <= given and _is_ours(place):
                    return 2, {"memory": place, "pids": place}
    if {"memory", "pids"} <= places.keys() and all(_is_ours(places[name]) for name in ("memory", "pids")):
        return 1, {name: places[name] for name in ("memory", "pids")}
    raise OSError("no control group for memory and processes that this user may make groups in")


def _is_ours(place: Path) -> bool:
    return os.access(place, os.W_OK) and os.access(place / "cgroup.procs", os.W_OK)


def _forget_dead(parent: Path) -> None:
    """Remove empty groups that earlier processes left behind."""
    for path in parent.glob("rl-agent-*-*"):
        owner = path.name.split("-")[2]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(OSError):
                path.rmdir()


def control_group(limits: SandboxLimits) -> ControlGroup | None:
    """Create a control group; None where that is not possible."""
    try:
        return ControlGroup(limits)
    except (OSError, ValueError):
        return None
