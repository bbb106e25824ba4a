"""Sandbox server: the sandboxes of a kind on this machine, for trainers elsewhere; `backends/http.py` is its client."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from hmac import compare_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from rl_agent.errors import AgentError, RowError, SandboxError
from rl_agent.sandbox.base import SandboxKind, SandboxSpec
from rl_agent.sandbox.folders import pack, unpack_into
from rl_agent.sandbox.worker import Service
from rl_agent.types import SandboxLimits

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from rl_agent.sandbox.base import Sandbox
    from rl_agent.types import CodeResult

_MAX_BODY_BYTES = 1 << 30


class SandboxServer:
    """Sandbox server.

    A request may ask for less than the server's limits, and never for more. A sandbox of a client that left is ended
    after `expiry_s` without a request.

    Args:
        make: Makes the kind of sandboxes, with limits and a network policy.
        limits: Largest limits of a sandbox.
        token: Token that callers must show.
        host: Interface to bind.
        port: Port; 0 picks a free one.
        expiry_s: Seconds without a request after which a sandbox is ended.
    """

    def __init__(
        self,
        make: Callable[..., SandboxKind],
        *,
        limits: SandboxLimits,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        expiry_s: float = 3600.0,
    ) -> None:
        if not token:
            raise ValueError("the sandbox server needs a token: whoever reaches it runs commands on this machine")
        self._make, self._limits, self._token = make, limits, token
        self._host, self._port, self._expiry_s = host, port, expiry_s
        self._kinds: dict[tuple[Any, ...], SandboxKind] = {}
        self._opened: dict[str, _Opened] = {}
        self._runner: web.AppRunner | None = None
        self._expiring: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Bind the endpoint; returns its URL.

        Raises:
            SandboxError: no sandbox can be started on this machine.
        """
        self._report = await self._kind(self._limits, "none").check()
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_post("/sandboxes", self._open)
        app.router.add_post("/sandboxes/{id}/run", self._run)
        app.router.add_put("/sandboxes/{id}/files", self._write)
        app.router.add_get("/sandboxes/{id}/files", self._read)
        app.router.add_put("/sandboxes/{id}/folder", self._fill)
        app.router.add_get("/sandboxes/{id}/folder", self._pack)
        app.router.add_delete("/sandboxes/{id}", self._end)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        self._expiring = asyncio.create_task(self._expire())
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def stop(self) -> None:
        """End all sandboxes."""
        if self._expiring is not None:
            self._expiring.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        for name in tuple(self._opened):
            await self._opened.pop(name).close()
        for kind in self._kinds.values():
            await kind.close()

    def _kind(self, limits: SandboxLimits, network: str) -> SandboxKind:
        key = (*asdict(limits).values(), network)
        if key not in self._kinds:
            self._kinds[key] = self._make(limits=limits, network=network)
        return self._kinds[key]

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not compare_digest(shown.encode(), self._token.encode()):
            return web.json_response({"error": "the token is missing or wrong"}, status=401)
        try:
            return await handler(request)
        except FileNotFoundError as error:
            return web.json_response({"error": str(error)}, status=404)
        except RowError as error:
            return web.json_response({"error": str(error)}, status=422)
        except (AgentError, ValueError, TypeError, KeyError) as error:
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=400)

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"report": self._report})

    async def _open(self, request: web.Request) -> web.Response:
        given: dict[str, Any] = await request.json()
        limits = _least(self._limits, SandboxLimits(**given["limits"]))
        async with AsyncExitStack() as stack:
            folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="rl-agent-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            service = None
            if given["proxy"] is not None:
                service = await stack.enter_async_context(_relayed(given["proxy"], folder / "service"))
            has_folder = given["has_folder"] or given["image"] is None
            if has_folder:
                (folder / "work").mkdir()
            spec = SandboxSpec(
                folder=folder / "work" if has_folder else None,
                workdir=given["workdir"],
                extra=tuple(given["extra"]),
                image=given["image"],
                service=service,
                num_cpus=given.get("num_cpus", 0),
                storage_bytes=given.get("storage_bytes", 0),
            )
            sandbox = await stack.enter_async_context(self._kind(limits, given["network"]).open(spec))
            name = secrets.token_hex(16)
            now = asyncio.get_running_loop().time()
            self._opened[name] = _Opened(sandbox=sandbox, folder=folder / "work", stack=stack.pop_all(), last_s=now)
        return web.json_response({"id": name, "workdir": sandbox.workdir})

    async def _run(self, request: web.Request) -> web.Response:
        given: Mapping[str, Any] = await request.json()
        opened = self._of(request)
        timeout_s = min(given["timeout_s"], self._limits.timeout_s)
        running = opened.sandbox.run(given["command"], timeout_s=timeout_s, variables=given["variables"])
        opened.running.add(task := asyncio.create_task(running))
        try:
            await asyncio.wait([task])
            if task.cancelled():
                raise SandboxError("the sandbox was ended while the command ran")
            result = task.result()
        finally:
            opened.running.discard(task)
            opened.last_s = asyncio.get_running_loop().time()
        return web.json_response(asdict(result))

    async def _write(self, request: web.Request) -> web.Response:
        await self._of(request).sandbox.write(request.query["path"], await request.read())
        return web.json_response({})

    async def _read(self, request: web.Request) -> web.Response:
        return web.Response(body=await self._of(request).sandbox.read(request.query["path"]))

    async def _fill(self, request: web.Request) -> web.Response:
        opened = self._of(request)
        await asyncio.to_thread(unpack_into, await request.read(), opened.folder)
        await opened.sandbox.load()
        return web.json_response({})

    async def _pack(self, request: web.Request) -> web.Response:
        opened = self._of(request)
        await opened.sandbox.sync()
        return web.Response(body=await asyncio.to_thread(pack, opened.folder))

    async def _end(self, request: web.Request) -> web.Response:
        self._of(request)
        await self._opened.pop(request.match_info["id"]).close()
        return web.json_response({})

    def _of(self, request: web.Request) -> _Opened:
        name = request.match_info["id"]
        if name not in self._opened:
            raise SandboxError(f"there is no sandbox {name}; it may have expired")
        self._opened[name].last_s = asyncio.get_running_loop().time()
        return self._opened[name]

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(self._expiry_s / 4, 30.0))
            now = asyncio.get_running_loop().time()
            for name, opened in tuple(self._opened.items()):
                if not opened.running and now - opened.last_s > self._expiry_s:
                    del self._opened[name]
                    await opened.close()


@dataclass(slots=True, kw_only=True)
class _Opened:
    sandbox: Sandbox
    folder: Path
    stack: AsyncExitStack
    last_s: float
    running: set[asyncio.Task[CodeResult]] = field(default_factory=set)

    async def close(self) -> None:
        """End the sandbox, with the commands that run in it."""
        for task in (running := [*self.running]):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.stack.aclose()


def _least(most: SandboxLimits, asked: SandboxLimits) -> SandboxLimits:
    """Asked limits; the server's where they are above."""
    above = {
        name: value
        for name, value in asdict(most).items()
        if value is not None and (getattr(asked, name) is None or getattr(asked, name) > value)
    }
    return replace(asked, **above)


@asynccontextmanager
async def _relayed(address: str, folder: Path) -> AsyncGenerator[Service]:
    """A UNIX socket in a new folder, whose connections go to an address elsewhere."""
    host, _, port = address.rpartition(":")

    async def pass_on(near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        try:
            far, forth = await asyncio.open_connection(host, int(port))
        except OSError:
            back.close()
            return
        await asyncio.gather(_copy(near, forth), _copy(far, back))

    await asyncio.to_thread(folder.mkdir)
    server = await asyncio.start_unix_server(pass_on, folder / "socket")
    try:
        yield Service(port=int(port), socket=folder / "socket")
    finally:
        server.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
    target.close()
