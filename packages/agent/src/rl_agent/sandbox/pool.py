"""Pool of warm subprocesses that run code with hard limits, for the grader and the Python tool."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import time
from collections import OrderedDict
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from rl_agent.base import CodeGrader
from rl_agent.errors import FailureError, SandboxError
from rl_agent.sandbox import worker as workers
from rl_agent.sandbox.limits import MIN_MEMORY_BYTES
from rl_agent.sandbox.worker import Files, Service, Worker
from rl_agent.types import CodeResult, CodeStatus, Failure, FailureKind, SandboxLimits, SandboxReport

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
    from pathlib import Path

    from rl_agent.sandbox.worker import Mode

_GRACE_S = 0.05
"""Seconds for a solution's process to notice that its judge has ended."""
_CACHE_SIZE = 4096
"""Results kept, by code and input; of runs that ended by themselves alone."""
_ISOLATIONS = ("network", "processes", "files")


class Grader(CodeGrader):
    """Grader: a pool of warm subprocesses that run code for rewards, each run in a fresh fork.

    Limits are hard: a run past its deadline is killed with everything that it started, and its processes together are
    held to memory and number by control groups where this user may make them, else by a watcher. Where the kernel
    permits (Linux user namespaces) code is shut off from three things, and `isolation` says from which: `network`,
    there is none; `processes`, it sees its own alone, and none outlives it; `files`, it finds the system's programs and
    Python, read-only, and an empty `/tmp`. Without `files` code sees what this user can read. `check` tells what
    holds. The kernel is shared: this bounds a model, not an attacker with an exploit for it.

    Args:
        num_workers: Subprocesses, that is, runs at the same time.
        limits: Limits of each run.
        max_waiting: Runs that may wait for a subprocess; one more fails at once.
        needs: Isolation that is required, of `network`, `processes` and `files`; without it nothing runs.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(
        self,
        *,
        num_workers: int = 2,
        limits: SandboxLimits | None = None,
        max_waiting: int = 4096,
        needs: Collection[str] = (),
    ) -> None:
        if num_workers < 1 or max_waiting < 0:
            raise ValueError(f"num_workers={num_workers} must be positive, and max_waiting={max_waiting} not negative")
        self.limits = limits or SandboxLimits()
        if self.limits.memory_bytes < MIN_MEMORY_BYTES or self.limits.timeout_s <= 0:
            raise ValueError(
                f"memory_bytes={self.limits.memory_bytes} must be at least {MIN_MEMORY_BYTES}, which Python itself "
                f"takes, and timeout_s={self.limits.timeout_s} positive"
            )
        if self.limits.num_processes < 1:
            raise ValueError(f"num_processes={self.limits.num_processes} must be at least 1")
        if unknown := sorted(set(needs).difference(_ISOLATIONS)):
            raise ValueError(f"needs names {unknown[0]!r}; there are: {', '.join(_ISOLATIONS)}")
        self.isolation: frozenset[str] | None = None
        """Isolation in force; None before the first run."""
        self._num_workers = num_workers
        self._max_waiting = max_waiting
        self._needs = frozenset(needs)
        self._slots = asyncio.Semaphore(num_workers)
        self.idle: list[Worker] = []
        self._judges: list[Worker] = []
        self._busy: set[Worker] = set()
        self._cache: OrderedDict[bytes, CodeResult] = OrderedDict()
        self._num_waiting = 0

    async def run(self, code: str, stdin: str = "", *, timeout_s: float | None = None) -> CodeResult:
        """See `CodeGrader`."""
        key = _key(code, stdin, timeout_s)
        if (known := self._known(key)) is not None:
            return known
        async with self.worker() as worker:
            result = await worker.run(code, stdin, timeout_s or self.limits.timeout_s, is_fresh=True)
        return self._keep(key, result)

    async def judge(self, code: str, test: str, *, timeout_s: float | None = None) -> CodeResult:
        """See `CodeGrader`."""
        key = _key(code, test, timeout_s, "judge")
        if (known := self._known(key)) is not None:
            return known
        async with self.worker() as solution:
            judge = self._judges.pop() if self._judges else await self._start()
            self._busy.add(judge)
            try:
                result = await judged(solution, judge, code, test, timeout_s or self.limits.timeout_s, self.limits)
            finally:
                self._busy.discard(judge)
                if judge.is_alive:
                    self._judges.append(judge)
                else:
                    await judge.kill()
        return self._keep(key, result)

    async def check(self) -> SandboxReport:
        """See `CodeGrader`."""
        async with self.worker() as worker:
            return worker.report

    def _known(self, key: bytes) -> CodeResult | None:
        if (known := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
        return known

    def _keep(self, key: bytes, result: CodeResult) -> CodeResult:
        if result.kind in ("ok", "error"):
            self._cache[key] = result
            if len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        return result

    @asynccontextmanager
    async def worker(
        self,
        *,
        is_kept: bool = True,
        folders: Mapping[str, Path] | None = None,
        readable: Sequence[Path] = (),
        service: Service | None = None,
        namespace: int | None = None,
    ) -> AsyncGenerator[Worker, None]:
        """Reserve a subprocess; waits for a free one.

        Args:
            is_kept: Return it to the pool; else, and with folders, it is killed.
            folders: Folders that code may change, by their path inside; it works in the first.
            readable: Further files and folders that code may read there.
            service: A service of ours that code may connect to.
            namespace: Process whose mount namespace has the folders; None: this one.

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
            is_pooled = not folders and not readable and service is None
            given = {"folders": folders, "readable": readable, "service": service, "namespace": namespace}
            worker = self.idle.pop() if self.idle and is_pooled else await self._start(**given)
            self._busy.add(worker)
            try:
                yield worker
            finally:
                self._busy.discard(worker)
                if is_kept and is_pooled and worker.is_alive:
                    self.idle.append(worker)
                else:
                    await worker.kill()
        finally:
            self._slots.release()

    async def _start(self, **given: Any) -> Worker:
        try:
            worker = await Worker.start(self.limits, **given)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            raise SandboxError(
                f"a subprocess for code, {workers.PYTHON} {workers.PROGRAM}, did not start: "
                f"{type(error).__name__}: {error}"
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
        """See `CodeGrader`."""
        ours = [*self.idle, *self._judges, *self._busy]
        self.idle, self._judges = [], []
        await asyncio.gather(*(worker.kill() for worker in ours))


def _key(*given: object) -> bytes:
    return hashlib.blake2b(json.dumps(given).encode(), digest_size=16).digest()


class Runner(Protocol):
    """What `judged` asks of the process with the code: a `Worker`, or Python in another kind of sandbox."""

    async def end_of(self, mode: Mode, files: Files, channel: socket.socket) -> tuple[CodeStatus | None, str]:
        """Run files with a channel to the other side; how that ended, and its error."""
        ...

    def late(self, timeout_s: float) -> tuple[CodeStatus, str]:
        """How a run ended that did not end in time."""
        ...

    async def stop(self) -> None:
        """End what runs."""
        ...


async def judged(
    solution: Runner, judge: Worker, code: str, test: str, timeout_s: float, limits: SandboxLimits
) -> CodeResult:
    """Run the code in one process and the test in another, with a pipe of values between them."""
    start = time.perf_counter()
    with Files(code, "") as ours, Files(test, "") as theirs:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with near, far:
            running = asyncio.ensure_future(solution.end_of("solution", ours, near))
            judging = asyncio.ensure_future(judge.end_of("judge", theirs, far))
            await asyncio.sleep(0)  # both have been sent
        try:
            async with asyncio.timeout(timeout_s):
                kind, error = await asyncio.shield(judging)
        except TimeoutError:
            kind, error = solution.late(timeout_s)
        finally:
            await asyncio.gather(_end(running, solution), _end(judging, judge))
        verdict = theirs.result(kind, error, limits.output_bytes, time.perf_counter() - start)
        ended = running.result() if running.done() and not running.cancelled() else (None, "")
        if verdict.kind == "error" and ended[0] is not None:  # it says more than that the pipe ended
            verdict = theirs.result(*ended, limits.output_bytes, verdict.wall_s)
        said = ours.result(ended[0], "", limits.output_bytes, verdict.wall_s)
        return replace(verdict, output=said.output, num_output_bytes=said.num_output_bytes)


async def _end(run: asyncio.Future[tuple[CodeStatus | None, str]], worker: Runner) -> None:
    """End a run that has ended by itself, or is killed a moment later."""
    try:
        await asyncio.wait([run], timeout=_GRACE_S)
    finally:  # cancelled, too
        if not run.done():
            run.cancel()
            await asyncio.wait([run])
            await worker.stop()
