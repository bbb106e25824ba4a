"""Grader in sandboxes of any kind: code runs there, and the tests that decide about it on this machine.

In each sandbox the program `process/elsewhere.py` connects to a service of this process, by the only network that the
sandbox has, and gets code over the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shlex
import shutil
import struct
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_agent.base import CodeGrader
from rl_agent.errors import SandboxError
from rl_agent.sandbox.base import SandboxSpec
from rl_agent.sandbox.pool import Grader, judged
from rl_agent.sandbox.worker import PROGRAM, Files, Service

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, Mapping

    from rl_agent.sandbox.base import Sandbox, SandboxKind
    from rl_agent.sandbox.worker import Mode
    from rl_agent.types import CodeResult, CodeStatus

_HEADER = struct.Struct("<I")
"""Length of a frame, before it; as in `process/elsewhere.py`, which only a sandbox imports."""
_START_S = 120.0
_END_S = 1.0
"""Least time that a program has to end after its connection, seconds."""
_SESSION_S = 3600.0
"""Longest life of a program in a sandbox, seconds."""
_CALL = "import sys; sys.path.insert(0, {folder!r}); import elsewhere; elsewhere.main(*{arguments!r})"


class SandboxGrader(CodeGrader):
    """Grader whose runs are in sandboxes of a kind, one each; see `Grader` for what a run is.

    Args:
        kind: Kind of the sandboxes; it is closed with the grader.

    Raises:
        SandboxError: its network does not reach this process.
    """

    def __init__(self, kind: SandboxKind) -> None:
        if kind.network == "none":
            raise SandboxError(
                f"Python in a sandbox {kind.name} gets its code from this process, which network=none shuts off; leave "
                "it out: the sandbox has no other network"
            )
        self._kind, self.limits = kind, kind.limits
        self._tests = Grader(num_workers=kind.max_running)
        self._slots = asyncio.Semaphore(kind.max_running)
        self._listening = asyncio.Lock()
        self._arriving: dict[str, asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = {}
        self._servers: list[asyncio.Server] = []
        self._service: Service | None = None

    async def check(self) -> str:
        """Start a sandbox, and Python in it; returns a line for the plan.

        Raises:
            SandboxError: it cannot be started, or has no Python.
        """
        said = await self._kind.check()
        result = await self.run("print(6 * 7)")
        if result.output != "42\n":
            raise SandboxError(f"python3 in a sandbox {self._kind.name} fails: {result.output} {result.error}".strip())
        return said

    async def run(self, code: str, stdin: str = "", *, timeout_s: float | None = None) -> CodeResult:
        """See `CodeGrader`."""
        async with self.worker() as worker:
            return await worker.run(code, stdin, timeout_s or self.limits.timeout_s, is_fresh=True)

    async def judge(self, code: str, test: str, *, timeout_s: float | None = None) -> CodeResult:
        """See `CodeGrader`. The test is trusted: it runs on this machine."""
        async with self.worker(mode="solution") as solution, self._tests.worker(is_kept=False) as tests:
            return await judged(solution, tests, code, test, timeout_s or self.limits.timeout_s, self.limits)

    @asynccontextmanager
    async def worker(self, *, is_kept: bool = False, mode: Mode = "code") -> AsyncGenerator[SandboxWorker]:
        """Start Python in a sandbox, which ends with the context; waits where `max_running` have been started.

        Raises:
            SandboxError: it cannot be started.
        """
        del is_kept  # a sandbox serves one run, or one trajectory
        async with self._slots, AsyncExitStack() as stack:
            service = await self._listen()
            folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="rl-agent-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            spec = SandboxSpec(folder=Path(folder), readable=(PROGRAM,), service=service)
            sandbox = await stack.enter_async_context(self._kind.open(spec))
            worker = SandboxWorker(self._kind, sandbox)
            stack.push_async_callback(worker.kill)
            token = secrets.token_hex(16)
            self._arriving[token] = asyncio.get_running_loop().create_future()
            try:
                await worker.start(service, token, mode, self._arriving[token])
            finally:
                del self._arriving[token]
            yield worker

    async def _listen(self) -> Service:
        """Serve the programs: on loopback, and at a UNIX socket for sandboxes that have a network of their own."""
        async with self._listening:
            if self._service is None:
                folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="rl-agent-code-"))
                inside = await asyncio.start_unix_server(self._arrive, folder / "code")
                server = await asyncio.start_server(self._arrive, self._kind.proxy_host, 0)
                self._servers = [inside, server]
                self._service = Service(port=server.sockets[0].getsockname()[1], socket=folder / "code")
            return self._service

    async def _arrive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        token = ""
        with contextlib.suppress(TimeoutError, ValueError, ConnectionError):
            async with asyncio.timeout(_START_S):
                token = (await reader.readline()).decode(errors="replace").strip()
        arriving = self._arriving.get(token)
        if arriving is None or arriving.done():
            writer.close()
        else:
            arriving.set_result((reader, writer))

    async def close(self) -> None:
        """End the sandboxes."""
        for server in self._servers:
            server.close()
        if self._service is not None:
            await asyncio.to_thread(shutil.rmtree, self._service.socket.parent, ignore_errors=True)
        await self._tests.close()
        await self._kind.close()


class SandboxWorker:
    """Python in a sandbox, with the methods of `Worker` that a grade and the tool `python` use."""

    def __init__(self, kind: SandboxKind, sandbox: Sandbox) -> None:
        self._kind, self._sandbox = kind, sandbox
        self._running: asyncio.Task[CodeResult] | None = None
        self.is_alive = False
        """Whether it can run more code."""

    async def start(
        self,
        service: Service,
        token: str,
        mode: Mode,
        arriving: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]],
    ) -> None:
        """Start the program, and wait until it connects.

        Raises:
            SandboxError: it does not.
        """
        host = self._sandbox.url_of(service).removeprefix("http://").rpartition(":")[0]
        arguments = [host, str(service.port), token, mode]
        code = _CALL.format(folder=self._sandbox.path_of(PROGRAM), arguments=arguments)
        command = f"exec python3 -I -c {shlex.quote(code)}"
        self._running = asyncio.create_task(self._sandbox.run(command, timeout_s=_SESSION_S))
        await asyncio.wait([arriving, self._running], timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        if not arriving.done():
            ended = self._running.result() if self._running.done() else None
            said = f"no connection within {_START_S:g} s" if ended is None else f"{ended.output}{ended.error}".strip()
            raise SandboxError(f"python3 (3.10 or later) in a sandbox {self._kind.name} does not start: {said[-500:]}")
        self._reader, self._writer = arriving.result()
        self.is_alive = True

    async def run(self, code: str, stdin: str, timeout_s: float, *, is_fresh: bool) -> CodeResult:
        """Run code in the namespace of earlier code; the last, if it is fresh. See `Worker.run`."""
        start, limits = time.perf_counter(), self._kind.limits
        with Files("", "") as files:
            kind: CodeStatus | None = None
            error = ""
            try:
                async with asyncio.timeout(timeout_s):
                    request: Mapping[str, Any] = {"code": code, "stdin": stdin, "is_last": is_fresh}
                    self._send(json.dumps(request).encode())
                    (size,) = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
                    if size > limits.file_bytes:
                        raise ValueError(size)  # the code's own doing
                    os.write(files.descriptors[2], await self._reader.readexactly(size))
            except TimeoutError:
                kind, error = self.late(timeout_s)
                await self.kill()
            except (asyncio.IncompleteReadError, ConnectionError, ValueError):
                rest_s = start + timeout_s - time.perf_counter()
                kind, error = await self._why(files, max(rest_s, _END_S))
            return files.result(kind, error, limits.output_bytes, time.perf_counter() - start)

    async def end_of(self, mode: Mode, files: Files, channel: socket.socket) -> tuple[CodeStatus | None, str]:
        """Hold a solution until its judge ends, with the values of both passed on. See `Worker.end_of`."""
        assert mode == "solution", "a test runs on this machine"
        code = os.pread(files.descriptors[0], os.fstat(files.descriptors[0]).st_size, 0)
        self._send(code)
        near, far = await asyncio.open_connection(sock=channel.dup())
        passing = [asyncio.create_task(_pass(*ends)) for ends in ((near, self._writer), (self._reader, far))]
        try:
            await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
            far.close()
            self._writer.close()
            return await self._why(files, _START_S)
        finally:
            for each in passing:
                each.cancel()
            far.close()

    def late(self, timeout_s: float) -> tuple[CodeStatus, str]:
        """Reason for which a run did not end by itself."""
        return "timeout", f"no end within {timeout_s:g} s"

    async def _why(self, files: Files, within_s: float) -> tuple[CodeStatus | None, str]:
        """Why the program was ended, None where it ended by itself; what it printed is added to the output.

        One that runs on without its connection is ended after `within_s` seconds.
        """
        assert self._running is not None, "it was started"
        await asyncio.wait([self._running], timeout=within_s)
        ended = self._running.result() if self._running.done() else None
        await self.kill()
        if ended is None:
            return "died", "the process ended by itself"
        os.write(files.descriptors[2], ended.output.encode())
        return (None, "") if ended.kind in ("ok", "error") else (ended.kind, ended.error)

    async def stop(self) -> None:
        """End a cancelled run."""
        await self.kill()

    async def kill(self) -> None:
        """End the program, with all that it started."""
        self.is_alive = False
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        if hasattr(self, "_writer"):
            self._writer.close()

    def _send(self, data: bytes) -> None:
        self._writer.write(_HEADER.pack(len(data)) + data)


async def _pass(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
