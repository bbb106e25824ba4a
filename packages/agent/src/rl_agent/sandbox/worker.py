"""Sandbox worker: the client side of a warm subprocess that runs code.

Not under rl-rollout's supervisor (`ChildProcess`): it has no lines to read, it is asked by packets that carry
descriptors, it is killed with its whole namespace, and its own end is part of a verdict (which limit was reached).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_agent.sandbox.folders import entering
from rl_agent.sandbox.limits import ControlGroup, control_group
from rl_agent.sandbox.process.execution import REPORT
from rl_agent.sandbox.process.isolation import Watch, kill_descendants
from rl_agent.types import CodeResult, CodeStatus, SandboxLimits, SandboxReport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROGRAM = Path(__file__).with_name("process")
PYTHON = os.path.realpath(sys.executable)  # a virtual environment's is a link that is not there in the sandbox
_START_TIMEOUT_S = 60.0
"""Seconds for a worker to start: 20 ms usually, the rest is for starved machines."""
_END_TIMEOUT_S = 10.0
"""Seconds for a worker to end: the kernel ends a namespace in milliseconds, the rest is for starved machines."""
_LATE_S = 0.5
"""Seconds that a worker may take to end a run past its deadline, before the worker itself is killed."""
_MAX_PACKET_BYTES = 1 << 16
Mode = Literal["code", "solution", "judge", "session"]
_TOO_MUCH = "the memory limit of all processes was reached"
_KINDS = ("ok", "error", "memory", "output")
"""Statuses that a run may report itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Service of this process that code in a sandbox may connect to, at `127.0.0.1:port`; it has no other network."""

    port: int
    """TCP port on loopback."""
    socket: Path
    """UNIX socket of the same service, alone in its folder, for sandboxes with a network namespace."""


class ProtocolError(Exception):
    """Answer that the worker itself would not give: it cannot be trusted any more."""


class Worker:
    """Worker subprocess with its descendants."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        control: socket.socket,
        limits: SandboxLimits,
        group: ControlGroup | None,
    ) -> None:
        self._process, self._control, self._limits, self._group = process, control, limits, group
        self._session: socket.socket | None = None
        self._num_kills, self._number = 0, ""
        self._has_ended = False
        self.report = SandboxReport(
            isolation=frozenset(), memory="watcher", processes="watcher", has_filter=False, landlock=0
        )
        """Limits of code in it."""

    @property
    def isolation(self) -> frozenset[str]:
        """Isolation of code in it: see `Grader`."""
        return self.report.isolation

    @classmethod
    async def start(
        cls,
        limits: SandboxLimits,
        *,
        may_isolate: bool = True,
        may_group: bool = True,
        folders: Mapping[str, Path] | None = None,
        readable: Sequence[Path] = (),
        service: Service | None = None,
        namespace: int | None = None,
    ) -> Worker:
        """Start a worker, and wait until it answers.

        Args:
            limits: Limits of each run.
            may_isolate: Make namespaces, where the kernel lets this user.
            may_group: Make a control group, where this user may; else a watcher does its work.
            folders: Folders that code may change, by their path inside; it works in the first.
            readable: Further files and folders that code may read.
            service: A service of ours that code may connect to.
            namespace: Process whose mount namespace has the folders; None: this one.

        Raises:
            OSError, EOFError, TimeoutError, ValueError: it does not start.
        """
        group = control_group(limits) if may_group else None
        settings = {
            "memory_bytes": limits.memory_bytes,
            "num_processes": limits.num_processes,
            "file_bytes": limits.file_bytes,
            "scratch_bytes": limits.scratch_bytes,
            "may_isolate": may_isolate,
            "folders": [(inside, str(folder)) for inside, folder in (folders or {}).items()],
            "readable": [str(path) for path in (*readable, *([] if service is None else [service.socket.parent]))],
            "service": None if service is None else (service.port, str(service.socket)),
            "cgroups": [] if group is None else [str(path) for path in group.paths],
            "is_watched": group is None,
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with tempfile.TemporaryFile() as complaints:  # of its start; code's standard error is its output
            try:
                process = await asyncio.create_subprocess_exec(
                    *(*entering(namespace), PYTHON, "-I", "-S", str(PROGRAM)),
                    stdin=theirs.fileno(),
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=complaints,
                    start_new_session=True,
                    env={"PATH": os.defpath, "LANG": "C.UTF-8"},  # no secret of ours reaches the code
                    cwd="/",
                )
            except BaseException:
                ours.close()
                if group is not None:
                    group.remove()
                raise
            finally:
                theirs.close()
            worker = cls(process, ours, limits, group)
            try:
                async with asyncio.timeout(_START_TIMEOUT_S):
                    ours.send(json.dumps(settings).encode())
                    worker._learn(await worker._receive(ours))
            except BaseException as error:
                await worker.kill()
                complaints.seek(0)
                if isinstance(error, (EOFError, OSError)) and (
                    said := complaints.read().decode(errors="replace").strip()
                ):
                    raise EOFError(said[-2000:]) from error
                raise
        return worker

    def _learn(self, reported: dict[str, Any]) -> None:
        kernel = None if self._group is None else "cgroup2" if self._group.version == 2 else "cgroup1"
        self.report = SandboxReport(
            isolation=frozenset(reported["isolated"]),
            memory=kernel or "watcher",
            processes=kernel or ("rlimit" if reported["has_rlimit"] else "watcher"),
            has_filter=reported["is_filtered"],
            landlock=reported["landlock"],
        )

    async def run(self, code: str, stdin: str, timeout_s: float, *, is_fresh: bool) -> CodeResult:
        """Run code, in its own process (`is_fresh`) or in the one that earlier code of this worker left.

        `is_alive` says whether the worker can run more; after the `timeout`, `memory` or `died` of code that is not
        fresh it cannot.
        """
        start = time.perf_counter()
        with Files(code, stdin) as files:
            try:
                async with asyncio.timeout(timeout_s):
                    kind, error = await (self.end_of("code", files) if is_fresh else self._go_on(files))
            except TimeoutError:
                kind, error = self.late(timeout_s)
                await (self.stop() if is_fresh else self.kill())
            except asyncio.CancelledError:
                await self.kill()
                raise
            return files.result(kind, error, self._limits.output_bytes, time.perf_counter() - start)

    async def end_of(
        self, mode: Mode, files: Files, channel: socket.socket | None = None
    ) -> tuple[CodeStatus | None, str]:
        """Run code in its own process until it ends; returns why it was killed, or None if it ended by itself.

        Past a deadline, cancel this, and then `stop` or `kill` the worker.
        """
        try:
            number = self._begin(mode, [*files.descriptors, *([] if channel is None else [channel.fileno()])])
            answer = await self._receive(self._control)
            if answer.get("number") != number:
                raise ProtocolError
        except (OSError, EOFError):
            return await self._why(has_ended=True)
        except (ProtocolError, ValueError, AttributeError):
            return await self._why(has_ended=False)
        if self._group is not None and (kills := self._group.num_kills()) > self._num_kills:
            self._num_kills = kills
            return "memory", _TOO_MUCH
        if answer["signal"]:
            return "died", f"the process was killed by signal {answer['signal']}"
        return None, ""

    def late(self, timeout_s: float) -> tuple[CodeStatus, str]:
        """Reason for which a run did not end by itself: the kernel may have killed a process that it waits for."""
        if self._group is not None and self._group.num_kills() > self._num_kills:
            return "memory", _TOO_MUCH
        return "timeout", f"no end within {timeout_s:g} s"

    def _begin(self, mode: Mode, descriptors: list[int]) -> str:
        number = self._number = secrets.token_hex(16)
        socket.send_fds(self._control, [json.dumps({"mode": mode}).encode()], descriptors)
        self._control.send(json.dumps({"number": number}).encode())
        return number

    async def _go_on(self, files: Files) -> tuple[CodeStatus | None, str]:
        """Run code in the namespace of earlier code."""
        try:
            if self._session is None:
                self._session, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._session.setblocking(False)
                with theirs, Files("", "") as none:
                    self._begin("session", [*none.descriptors, theirs.fileno()])
            number = secrets.token_hex(16)
            socket.send_fds(self._session, [json.dumps({"number": number}).encode()], files.descriptors)
            answer = await self._receive(self._session)
            if answer.get("number") != number:
                raise ProtocolError
        except (OSError, EOFError, ProtocolError, ValueError, AttributeError):
            return await self._why(has_ended=False)
        return None, ""

    async def _why(self, *, has_ended: bool) -> tuple[CodeStatus, str]:
        """End the worker, if it still runs; returns the reason of its end."""
        kills = 0 if self._group is None else self._group.num_kills()
        if has_ended:  # its exit status says why
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_TIMEOUT_S):
                    await asyncio.shield(self._process.wait())
        await self.kill()
        if kills > self._num_kills or self._process.returncode == Watch.TOO_MUCH_MEMORY:
            return "memory", _TOO_MUCH
        if self._process.returncode == Watch.TOO_MANY_PROCESSES:
            return "died", f"it had more than {self._limits.num_processes} processes"
        return "died", "the process ended by itself"

    async def stop(self) -> None:
        """End a cancelled run. The worker survives if it can end the run soon, else it is killed."""
        try:
            self._control.send(json.dumps({"stop": self._number}).encode())
            async with asyncio.timeout(_LATE_S):
                answer = await self._receive(self._control)
            if answer.get("number") != self._number:
                raise ProtocolError
            if self._group is not None:
                self._num_kills = self._group.num_kills()
        except (OSError, EOFError, TimeoutError, ValueError, AttributeError, ProtocolError):
            await self.kill()
        except asyncio.CancelledError:
            await self.kill()  # else the next run would be given this one's answer
            raise

    @staticmethod
    async def _receive(source: socket.socket) -> dict[str, Any]:
        packet = await asyncio.get_running_loop().sock_recv(source, _MAX_PACKET_BYTES)
        if not packet:
            raise EOFError
        return json.loads(packet)

    @property
    def is_alive(self) -> bool:
        """Whether it can run more code."""
        return not self._has_ended and self._process.returncode is None

    async def kill(self) -> None:
        """Kill the worker and its descendants; none of them runs any more when this returns, cancelled or not."""
        self._has_ended = True
        try:
            await self._end_processes()
        except asyncio.CancelledError:
            await self._end_processes()  # whole: without a namespace, descendants are found by way of the worker alone
            raise
        finally:
            self._control.close()
            if self._session is not None:
                self._session.close()
            if self._group is not None:
                await asyncio.to_thread(self._group.remove)

    async def _end_processes(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if "processes" in self.isolation:
                self._process.terminate()  # it ends when its namespace has
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_END_TIMEOUT_S):
                        await asyncio.shield(self._process.wait())
            elif self._process.returncode is None:
                os.kill(
                    self._process.pid, signal.SIGSTOP
                )  # stopped, it forks no more, and orphans are still reparented to it
                await asyncio.to_thread(kill_descendants, self._process.pid)
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.shield(self._process.wait())


class Files:
    """Input and output of a run, as anonymous files in memory."""

    def __init__(self, code: str, stdin: str) -> None:
        self.descriptors: list[int] = []
        for text in (code, stdin, ""):
            self.descriptors.append(os.memfd_create("sandbox"))
            data = memoryview(text.encode(errors="surrogatepass"))
            while data:
                data = data[os.write(self.descriptors[-1], data) :]
        os.lseek(self.descriptors[1], 0, os.SEEK_SET)

    def result(self, kind: CodeStatus | None, error: str, output_bytes: int, wall_s: float) -> CodeResult:
        """Result of the run: killed for a reason, or its own report."""
        size = os.fstat(self.descriptors[2]).st_size
        report = self._report(size)
        if kind is None and report is None:
            kind, error = "died", "the process ended by itself"
        if report is not None:
            size = report["num_output_bytes"]
            kind, error = (report["kind"], report["error"]) if kind is None else (kind, error)
        output = os.pread(self.descriptors[2], min(size, output_bytes), 0).decode(errors="replace")
        assert kind is not None, "it is set above"
        return CodeResult(kind=kind, output=output, error=error, num_output_bytes=size, wall_s=wall_s)

    def _report(self, size: int) -> dict[str, Any] | None:
        """Parse the report at the end of the output; the code could have forged it, so every field is checked."""
        tail = os.pread(self.descriptors[2], REPORT.size, max(size - REPORT.size, 0))
        if len(tail) < REPORT.size:
            return None
        (length,) = REPORT.unpack(tail)
        start = size - REPORT.size - length
        if start < 0 or length > _MAX_PACKET_BYTES:
            return None
        try:
            report = json.loads(os.pread(self.descriptors[2], length, start))
            kind, error, written = report["kind"], report["error"], report["num_output_bytes"]
        except (ValueError, TypeError, LookupError, RecursionError):
            return None
        is_whole = kind in _KINDS and isinstance(error, str) and type(written) is int and 0 <= written <= start
        return report if is_whole else None

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
