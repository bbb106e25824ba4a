"""Sandboxes of kind `http`: those of a server elsewhere, such as `rl-agent sandbox`, over HTTP.

| request | does |
|---|---|
| `GET /health` | `{"report": TEXT}` |
| `POST /sandboxes` | opens one: `image`, `workdir`, `extra`, `network`, `limits`, `num_cpus`, `proxy`; its `id` |
| `POST /sandboxes/ID/run` | runs `command` with `variables` until `timeout_s`; a `CodeResult` |
| `PUT`, `GET /sandboxes/ID/files?path=PATH` | writes or reads a file: the body |
| `PUT`, `GET /sandboxes/ID/folder` | replaces or reads the working folder's files: a tar file |
| `DELETE /sandboxes/ID` | ends it |

Every request has the token in `Authorization: Bearer`. An error is `{"error": TEXT}`: 400 for what the request asks for
and the server does not have, 404 for a file or a sandbox that is not there.
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote, urlsplit

import aiohttp

from rl_agent.errors import RowError, SandboxError
from rl_agent.sandbox.base import Sandbox, SandboxKind, SandboxSpec
from rl_agent.sandbox.folders import pack, unpack
from rl_agent.types import CodeResult

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping
    from pathlib import Path

    from rl_agent.sandbox.worker import Service

TOKEN = "RL_AGENT_SANDBOX_TOKEN"
"""Environment variable with the token of the server."""
_GRACE_S = 60.0
_LOCAL = ("127.0.0.1", "localhost", "::1")
_MOST_GIVEN_BYTES = 64 << 20


class HttpSandboxes(SandboxKind):
    """Sandboxes of a server, to which the files of a row are copied, and from which the working folder comes back.

    Args:
        url: URL of the server; its token is in `RL_AGENT_SANDBOX_TOKEN`.
        proxy_host: Address of this machine that the server can reach, for the recording proxy; None: loopback, for a
            server on this machine.
        **common: Arguments of every kind; see `SandboxKind`.

    Raises:
        SandboxError: there is no URL, or the server is on another machine and `proxy_host` is not given.
    """

    name = "http"

    def __init__(self, *, url: str = "", proxy_host: str | None = None, **common: Any) -> None:
        super().__init__(**common)
        if not url.startswith(("http://", "https://")):
            raise SandboxError(
                f"sandbox=http needs the URL of its server, and url is {url!r}: sandbox={{kind: http, url: URL}}"
            )
        self.url, self.proxy_host = url.rstrip("/"), proxy_host or "127.0.0.1"
        if proxy_host is None and self.network == "proxy" and urlsplit(url).hostname not in _LOCAL:
            raise SandboxError(
                f"sandbox=http is at {url}, on another machine, which has to reach the proxy: give proxy_host, an "
                "address of this machine, or network=none"
            )
        self._session: aiohttp.ClientSession | None = None

    async def check(self) -> str:
        """See `SandboxKind`."""
        report = (await self._ask("GET", "/health"))["report"]
        async with self._opened(SandboxSpec()) as sandbox:
            await sandbox.run("true")
        proxy = f"the proxy at {self.proxy_host}, which it has to reach" if self.network == "proxy" else self.network
        return f"at {self.url}: {report}; network: {proxy}"

    async def check_image(self, image: str) -> None:
        """Check that the server opens a sandbox of the image."""
        async with self._opened(SandboxSpec(image=image)):
            pass

    async def check_room(self, spec: SandboxSpec) -> None:
        """Nothing: the server checks it, when it opens a sandbox."""

    @asynccontextmanager
    async def _opened(self, spec: SandboxSpec) -> AsyncGenerator[_HttpSandbox]:
        given = {path: f"/given/{number}/{path.name}" for number, path in enumerate(spec.readable)}
        proxied = spec.service is not None and self.network == "proxy"
        request = {
            "image": spec.image or self.image,
            "workdir": spec.workdir,
            "extra": [*spec.extra, *(["/given"] if given else [])],
            "network": self.network,
            "limits": asdict(self.limits),
            "proxy": f"{self.proxy_host}:{spec.service.port}" if proxied and spec.service else None,
            "has_folder": spec.folder is not None,
            "num_cpus": spec.num_cpus,
            "storage_bytes": spec.storage_bytes,
        }
        made = await self._ask("POST", "/sandboxes", request)
        path = f"/sandboxes/{made['id']}"
        try:
            sandbox = _HttpSandbox(self, path, made["workdir"], spec, given)
            await sandbox.fill()
            yield sandbox
        finally:
            with suppress(SandboxError):
                await asyncio.shield(self._ask("DELETE", path))

    async def ask(self, method: str, path: str, body: Any = None, *, timeout_s: float = _GRACE_S) -> bytes:
        """Answer of the server.

        Raises:
            SandboxError: it does not answer, or refuses.
            FileNotFoundError: it has no such file.
            RowError: the path of a file is outside of the sandbox's folders.
        """
        if self._session is None:
            headers = {"Authorization": f"Bearer {os.environ.get(TOKEN, '')}"}
            self._session = aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0))
        given: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, self.url + path, timeout=timeout, **given) as answer:
                data = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise SandboxError(
                f"the sandbox server at {self.url} does not answer ({type(error).__name__}: {error}); start it with "
                "rl-agent sandbox, or correct the url"
            ) from error
        if answer.status < 300:
            return data
        said = data.decode(errors="replace")[:500]
        if answer.status == 404 and "/files" in path:
            raise FileNotFoundError(f"sandbox: {said}")
        if answer.status == 422:
            raise RowError(said)
        raise SandboxError(f"the sandbox server at {self.url} answers {answer.status}: {said}")

    async def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        return cast("dict[str, Any]", json.loads(await self.ask(method, path, body) or b"{}"))

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


class _HttpSandbox(Sandbox):
    def __init__(
        self, kind: HttpSandboxes, path: str, workdir: str, spec: SandboxSpec, given: Mapping[Path, str]
    ) -> None:
        self._kind, self._path, self.workdir, self._spec, self._given = kind, path, workdir, spec, given

    async def fill(self) -> None:
        """Copy the files of this machine to the sandbox.

        Raises:
            SandboxError: those that are to be read are too many.
        """
        if self._spec.folder is not None:
            packed = await asyncio.to_thread(pack, self._spec.folder)
            await self._kind.ask("PUT", f"{self._path}/folder", packed)
        for path, inside in self._given.items():
            files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
            if (size := sum(each.stat().st_size for each in files)) > _MOST_GIVEN_BYTES:
                raise SandboxError(
                    f"sandbox=http copies {path} to its server, which has {size >> 20} MiB; give what a harness needs "
                    f"a folder of its own, of at most {_MOST_GIVEN_BYTES >> 20} MiB"
                )
            for each in files:
                await self.write(str(PurePosixPath(inside) / each.relative_to(path)), each.read_bytes())

    async def sync(self) -> None:
        """See `Sandbox`."""
        if self._spec.folder is not None:
            packed = await self._kind.ask("GET", f"{self._path}/folder")
            await asyncio.to_thread(unpack, packed, self._spec.folder)

    async def run(
        self, command: str, *, timeout_s: float | None = None, variables: Mapping[str, str] | None = None
    ) -> CodeResult:
        """See `Sandbox`."""
        limit = timeout_s or self._kind.limits.timeout_s
        request = {"command": command, "timeout_s": limit, "variables": dict(variables or {})}
        async with self._kind.turns:
            data = await self._kind.ask("POST", f"{self._path}/run", request, timeout_s=limit + _GRACE_S)
        return CodeResult(**json.loads(data))

    async def write(self, path: str, data: bytes) -> None:
        """See `Sandbox`."""
        await self._kind.ask("PUT", self._files(path), data)

    async def read(self, path: str) -> bytes:
        """See `Sandbox`."""
        return await self._kind.ask("GET", self._files(path))

    def _files(self, path: str) -> str:
        return f"{self._path}/files?path={quote(path, safe='')}"

    def url_of(self, service: Service) -> str:
        """See `Sandbox`."""
        host = self._kind.proxy_host if self._kind.network == "open" else "127.0.0.1"
        return f"http://{host}:{service.port}"

    def path_of(self, path: Path) -> str:
        """See `Sandbox`."""
        return self._given[path]
