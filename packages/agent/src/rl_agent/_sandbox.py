"""Runs code in warm subprocesses with hard limits: the grader's and the Python tool's."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import OrderedDict
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_agent.errors import FailureError, SandboxError
from rl_agent.sandbox_worker.isolation import kill_descendants
from rl_agent.types import Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Sequence

_WORKER = Path(__file__).with_name("sandbox_worker")
_PYTHON = os.path.realpath(sys.executable)  # a virtual environment's is a link that is not there in the sandbox
_ISOLATIONS = ("network", "processes", "files")
_MIN_MEMORY_BYTES = 1 << 26
_START_TIMEOUT_S = 60.0
"""A Python of the standard library alone takes 20 ms to start; this is for machines that are starved."""
_END_TIMEOUT_S = 10.0
"""The kernel ends a namespace in milliseconds; the rest is for machines that are starved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one run of code may take."""

    timeout_s: float = 10.0
    """Seconds on the clock."""
    memory_bytes: int = 1 << 30
    """Address space, the interpreter's own included."""
    output_bytes: int = 1 << 16
    """Of output that are returned."""
    file_bytes: int = 1 << 24
    """Of any file that is written, output included; more is an error in the code."""
    scratch_bytes: int = 1 << 26
    """Of all files in `/tmp` together, where code has one of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeResult:
    """How a run of code ended."""

    kind: Literal["ok", "error", "timeout", "memory", "output", "died"]
    """`output`: it wrote too much; `died`: its process was killed or ended by itself."""
    output: str
    """Standard output and error, cut at the limit."""
    error: str
    """Lines and exception, without the frames of the machinery; empty where all went well."""
    num_output_bytes: int
    """Written in all."""
    wall_s: float
    """Seconds that it ran; of a result from the cache, those of the first time."""


class Worker:
    """One subprocess with what it starts."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.isolation: frozenset[str] = frozenset()
        """What code in it is shut off from: see `Grader`."""

    @classmethod
    async def start(
        cls,
        limits: SandboxLimits,
        *,
        may_isolate: bool = True,
        workspace: Path | None = None,
        readable: Sequence[Path] = (),
    ) -> Worker:
        """Start one and wait until it answers."""
        settings = {
            "memory_bytes": limits.memory_bytes,
            "output_bytes": limits.output_bytes,
            "file_bytes": limits.file_bytes,
            "scratch_bytes": limits.scratch_bytes,
            "may_isolate": may_isolate,
            "workspace": None if workspace is None else str(workspace),
            "readable": [str(path) for path in readable],
        }
        with tempfile.TemporaryFile() as complaints:  # of its start; code's standard error is its output
            process = await asyncio.create_subprocess_exec(
                *(_PYTHON, "-I", "-S", str(_WORKER), json.dumps(settings)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=complaints,
                start_new_session=True,
                env={"PATH": os.defpath, "LANG": "C.UTF-8"},  # no secret of ours reaches the code
                cwd="/",
                limit=limits.output_bytes * 8 + (1 << 16),
            )
            worker = cls(process)
            try:
                async with asyncio.timeout(_START_TIMEOUT_S):
                    worker.isolation = frozenset((await worker._read())["isolated"])
            except BaseException as error:
                await worker.kill()
                complaints.seek(0)
                if isinstance(error, EOFError) and (said := complaints.read().decode(errors="replace").strip()):
                    raise EOFError(said[-2000:]) from error
                raise
        return worker

    async def run(self, code: str, stdin: str, timeout_s: float, *, is_fresh: bool) -> CodeResult:
        """Run code. After any `timeout` or `died` of a run that is not fresh, and any `timeout`, the worker is dead."""
        assert self._process.stdin is not None, "it is a pipe"
        start = time.perf_counter()
        found: dict[str, Any]
        try:
            async with asyncio.timeout(timeout_s):
                request = {"code": code, "stdin": stdin, "is_fresh": is_fresh}
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                await self._process.stdin.drain()
                found = await self._read()
        except TimeoutError:
            await self.kill()
            found = {"kind": "timeout", "output": "", "error": f"no end within {timeout_s:g} s", "num_output_bytes": 0}
        except (ConnectionError, EOFError):
            await self.kill()
            found = {"kind": "died", "output": "", "error": "the process ended by itself", "num_output_bytes": 0}
        except asyncio.CancelledError:
            await self.kill()
            raise
        return CodeResult(**found, wall_s=time.perf_counter() - start)

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "it is a pipe"
        line = await self._process.stdout.readline()
        if not line:
            raise EOFError
        return json.loads(line)

    @property
    def is_alive(self) -> bool:
        """Whether it can run more code."""
        return self._process.returncode is None

    async def kill(self) -> None:
        """End it and all that it started; when this returns, none of that runs."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if "processes" in self.isolation:
                self._process.terminate()  # it ends when its namespace has
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_END_TIMEOUT_S):
                        await asyncio.shield(self._process.wait())
            elif self.is_alive:
                os.kill(self._process.pid, signal.SIGSTOP)  # it starts no more, and orphans still come back to it
                await asyncio.to_thread(kill_descendants, self._process.pid)
            os.killpg(self._process.pid, signal.SIGKILL)
        transport = self._process._transport  # pyright: ignore - a stray child may hold the pipes open
        await asyncio.shield(self._process.wait())
        transport.close()


class Grader:
    """A pool of warm subprocesses that run code for rewards, each run in a fresh fork of its process.

    Limits are hard: a run past its deadline is killed with everything that it started, and memory and file sizes are
    bounded by `setrlimit`. Where the kernel permits (Linux user namespaces) code is shut off from three things, and
    `isolation` says from which: `network`, there is none; `processes`, it sees its own alone, and none outlives it;
    `files`, it finds the system's programs and Python, read-only, and an empty `/tmp`. Without `files` code sees what
    this user can read. The kernel is shared: this bounds a model, not somebody with an exploit for it.

    Args:
        num_workers: Subprocesses, that is, runs at the same time.
        limits: Of each run.
        max_waiting: Runs that may wait for a subprocess; one more fails at once.
        cache_size: Results kept, by code and input; runs that ended by a limit of time or memory are not.
        needs: What code has to be shut off from, of `network`, `processes` and `files`; where that cannot be, nothing
            runs.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(
        self,
        *,
        num_workers: int = 2,
        limits: SandboxLimits | None = None,
        max_waiting: int = 4096,
        cache_size: int = 4096,
        needs: Collection[str] = (),
    ) -> None:
        if num_workers < 1 or max_waiting < 0 or cache_size < 0:
            raise ValueError(
                f"num_workers={num_workers} must be positive; max_waiting={max_waiting} and cache_size={cache_size} "
                "must not be negative"
            )
        self.limits = limits or SandboxLimits()
        if self.limits.memory_bytes < _MIN_MEMORY_BYTES or self.limits.timeout_s <= 0:
            raise ValueError(
                f"memory_bytes={self.limits.memory_bytes} must be at least {_MIN_MEMORY_BYTES}, which Python itself "
                f"takes, and timeout_s={self.limits.timeout_s} positive"
            )
        if unknown := sorted(set(needs).difference(_ISOLATIONS)):
            raise ValueError(f"needs names {unknown[0]!r}; there are: {', '.join(_ISOLATIONS)}")
        self.isolation: frozenset[str] | None = None
        """What code is shut off from; None before the first run."""
        self._num_workers = num_workers
        self._max_waiting = max_waiting
        self._cache_size = cache_size
        self._needs = frozenset(needs)
        self._slots = asyncio.Semaphore(num_workers)
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._cache: OrderedDict[bytes, CodeResult] = OrderedDict()
        self._num_waiting = 0
        self.num_cache_hits = 0
        """Runs that were answered from the cache."""

    async def run(self, code: str, stdin: str = "", *, timeout_s: float | None = None) -> CodeResult:
        """Run code in a fresh process. Its deadline counts from when it starts, not from when it waits.

        Raises:
            FailureError: too many runs wait (kind `grader`, retryable): nothing was said about the code.
            SandboxError: no subprocess can be started, or network is not denied and has to be.
        """
        key = hashlib.blake2b(json.dumps([code, stdin, timeout_s]).encode(), digest_size=16).digest()
        if (known := self._cache.get(key)) is not None:
            self.num_cache_hits += 1
            self._cache.move_to_end(key)
            return known
        async with self.worker() as worker:
            result = await worker.run(code, stdin, timeout_s or self.limits.timeout_s, is_fresh=True)
        if result.kind in ("ok", "error") and self._cache_size:
            self._cache[key] = result
            if len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return result

    @asynccontextmanager
    async def worker(
        self, *, is_kept: bool = True, workspace: Path | None = None, readable: Sequence[Path] = ()
    ) -> AsyncGenerator[Worker, None]:
        """A subprocess to oneself; waits for a free one.

        Args:
            is_kept: Give it back to the pool; else, and with a workspace, it is killed.
            workspace: A folder that code works in and may change, `/workspace` where code has files of its own.
            readable: Further files and folders that code may read there.

        Raises:
            FailureError, SandboxError: as of `run`.
        """
        if self._slots.locked() and self._num_waiting >= self._max_waiting:
            message = f"{self._num_waiting} runs wait for {self._num_workers} subprocesses; no more may"
            raise FailureError(Failure(kind=FailureKind.GRADER, stage="grader", message=message, is_retryable=True))
        self._num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._num_waiting -= 1
        try:
            is_pooled = workspace is None and not readable
            worker = self._idle.pop() if self._idle and is_pooled else await self._start(workspace, readable)
            self._busy.add(worker)
            try:
                yield worker
            finally:
                self._busy.discard(worker)
                if is_kept and is_pooled and worker.is_alive:
                    self._idle.append(worker)
                else:
                    await worker.kill()
        finally:
            self._slots.release()

    async def _start(self, workspace: Path | None, readable: Sequence[Path]) -> Worker:
        try:
            worker = await Worker.start(self.limits, workspace=workspace, readable=readable)
        except (OSError, EOFError, ValueError) as error:
            raise SandboxError(
                f"a subprocess for code, {_PYTHON} {_WORKER}, did not start: {type(error).__name__}: {error}"
            ) from error
        self.isolation = worker.isolation
        if missing := self._needs - worker.isolation:
            await worker.kill()
            raise SandboxError(
                f"code cannot be shut off from {', '.join(sorted(missing))} here: the kernel does not let this user "
                "make namespaces (user.max_user_namespaces, or a container's seccomp profile); allow it, or leave that "
                "out of needs"
            )
        return worker

    async def close(self) -> None:
        """Kill the subprocesses."""
        workers, self._idle = [*self._idle, *self._busy], []
        for worker in workers:
            await worker.kill()
