"""Profilers of processes (`tracking.profiler`): files of torch.profiler, memory snapshots and NVTX ranges, by step.

The controller starts and stops them around the steps that are asked for. A process has one profiler at a time: where
roles share one, as with `runtime=inline`, the first role's file has the work of all.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_trainer.errors import PlanError
from rl_trainer.runtime import tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_trainer.config import Config

_MOST_ALLOCATIONS = 100_000
"""Allocations and frees that a memory snapshot has the stacks of."""
_CUDA_TOOLS = frozenset(["memory", "nvtx"])
_ACTIVE: list[ProcessProfiler] = []
"""Profiler of this process, while it records."""
_LOCK = threading.Lock()


def profile_process(tools: Sequence[str], stem: str) -> list[str]:
    """Start to record this process with tools, unless it is recorded already; without tools stop.

    Args:
        tools: `torch`, `memory`, `nvtx`.
        stem: Path of the files without their endings.

    Returns:
        The files that were written, or for a tool without a GPU what is missing.
    """
    with _LOCK:
        if tools and not _ACTIVE:
            _ACTIVE.append(ProcessProfiler(tools, stem))
            _ACTIVE[0].start()
        elif not tools and _ACTIVE:
            return _ACTIVE.pop().stop()
    return []


class ProcessProfiler:
    """Profiler of one process: `start` and `stop` enclose what is recorded."""

    def __init__(self, tools: Sequence[str], stem: str) -> None:
        self._tools, self._stem = tools, stem
        self._profile: Any = None
        self._ranges = ExitStack()

    def start(self) -> None:
        """Start to record, in all threads."""
        import torch

        Path(self._stem).parent.mkdir(parents=True, exist_ok=True)
        has_cuda = torch.cuda.is_available()
        if "torch" in self._tools:
            import torch._C._profiler as options  # the only way to all threads
            from torch.profiler import ProfilerActivity, profile

            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_cuda else [])]
            threads: Any = options._ExperimentalConfig(profile_all_threads=True)  # pyright: ignore[reportPrivateUsage]
            self._profile = profile(activities=kinds, experimental_config=threads)
            self._profile.start()
        if "memory" in self._tools and has_cuda:
            _cuda_memory()._record_memory_history(max_entries=_MOST_ALLOCATIONS)
        if "nvtx" in self._tools and has_cuda:
            self._ranges.enter_context(torch.autograd.profiler.emit_nvtx())
            tracing.RANGES.append(torch.cuda.nvtx.range)
            self._ranges.callback(tracing.RANGES.clear)

    def stop(self) -> list[str]:
        """Stop to record; returns the files that were written, or for a tool without a GPU what is missing."""
        import torch

        found: list[str] = []
        if self._profile is not None:
            self._profile.stop()
            found.append(f"{self._stem}.trace.json")
            self._profile.export_chrome_trace(found[-1])
        self._ranges.close()
        if not torch.cuda.is_available():
            return found + [f"{Path(self._stem).name}: no {each}, no CUDA device" for each in self._cuda_tools()]
        if "memory" in self._tools:
            found.append(f"{self._stem}.memory.pickle")
            _cuda_memory()._dump_snapshot(found[-1])
            _cuda_memory()._record_memory_history(enabled=None)
        return found

    def _cuda_tools(self) -> list[str]:
        return sorted(_CUDA_TOOLS & {*self._tools})


def _cuda_memory() -> Any:
    import torch

    return torch.cuda.memory


class Profiles:
    """Profiles of a run: calls `profile(tools, stem)` of the workers of `roles` around each step that is asked for."""

    def __init__(
        self, config: Config, folder: Path, roles: dict[str, Callable[[Sequence[str], str], list[str]]]
    ) -> None:
        self._section, self._folder, self._roles = config.tracking.profiler, folder, roles
        self._step: int | None = None
        self.files: list[str] = []
        """What was written so far."""

    def begin(self, step: int) -> None:
        """Begin a step; does nothing if it has begun."""
        if not self._section.tools or step not in self._section.steps or step == self._step:
            return
        self._step = step
        for role in self._section.roles:
            if (call := self._roles.get(role)) is not None:
                call(self._section.tools, str((self._folder / f"step-{step}-{role}").absolute()))

    def end(self, step: int) -> None:
        """End a step, if it is recorded."""
        if self._step == step:
            self._step = None
            for role in self._section.roles:
                if (call := self._roles.get(role)) is not None:
                    self.files += call((), "")


def check_profiler(config: Config, has: Callable[[Config, str], bool]) -> None:
    """Check `tracking.profiler`; `has`: whether the run has a role.

    Raises:
        PlanError: a step or role that the run does not have, or tools that need a GPU in a run without one.
    """
    section = config.tracking.profiler
    if not section.tools:
        return
    if {"torch", "nvtx"} <= {*section.tools}:
        raise PlanError("tracking.profiler.tools has torch and nvtx, which both record operators; take one of them")
    if beyond := [each for each in section.steps if not 1 <= each <= config.steps]:
        raise PlanError(f"tracking.profiler.steps has {beyond[0]}; the run has the steps 1 to {config.steps}")
    if absent := [each for each in section.roles if each in ("reference", "critic") and not has(config, each)]:
        raise PlanError(f"tracking.profiler.roles has {absent[0]}, which this run does not have; leave it out")
    if "rollout" in section.roles and config.runtime != "inline":
        raise PlanError(
            "tracking.profiler.roles has rollout, whose servers are recorded with runtime=inline alone; elsewhere they "
            "are processes of their own, as vLLM's, which have profilers of their own"
        )
    import torch

    if config.runtime == "inline" and not torch.cuda.is_available() and (needed := _CUDA_TOOLS & {*section.tools}):
        raise PlanError(f"tracking.profiler.tools has {min(needed)}, which needs a GPU; on processors take torch")
