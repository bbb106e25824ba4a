"""HTTP client of a third-party server that runs as a subprocess, and its failures as our errors."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import aiohttp

from rl_rollout.errors import GenerationError, RequestError, RequestTimeoutError, RolloutError, ServerLostError
from rl_rollout.http.body import read_body, read_lines

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from rl_rollout.process import ChildProcess

GRACE_S = 5.0
"""Seconds that the answer to a command is waited for beyond the server's deadline."""
EVENT = b"data:"
"""Prefix of a server-sent event's line."""
EXIT_TIMEOUT_S = 2.0
"""Seconds to wait for the end of a process whose connection was lost."""


class Upstream:
    """HTTP client of a third-party server.

    Args:
        process: Subprocess of the server.
        name: Name of the server in errors.
        url: Its base URL.
        connector: Makes what reaches it, in the event loop.
        timeout_s: Deadline of commands, seconds.
    """

    def __init__(
        self,
        process: ChildProcess,
        *,
        name: str,
        url: str,
        connector: Callable[[], aiohttp.BaseConnector],
        timeout_s: float,
    ) -> None:
        self.process = process
        self.name = name
        self._url = url
        self._connector = connector
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self.sign: Callable[[bytes], Mapping[str, str]] | None = None
        """Headers that vouch for a body, where the server asks for some."""

    @property
    def where(self) -> str:
        """Name of the server in errors."""
        return f"{self.name} (pid {self.process.pid})"

    async def is_ready(self) -> bool:
        """Whether the server answers `/health` with 200."""
        try:
            async with asyncio.timeout(GRACE_S), self.request("GET", "/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        if self._session is not None:
            await self._session.close()

    def request(self, method: str, path: str, body: Any = None, **query: str) -> Any:
        """Send one HTTP request; returns aiohttp's context manager of the response."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=GRACE_S)
            self._session = aiohttp.ClientSession(connector=self._connector(), timeout=timeout, auto_decompress=False)
        if self.sign is None or body is None:
            return self._session.request(method, self._url + path, json=body, params=query)
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self.sign(data)}
        return self._session.request(method, self._url + path, data=data, headers=headers, params=query)

    async def call(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None, **query: str
    ) -> dict[str, Any]:
        """Send one HTTP request; returns the JSON of the response.

        Args:
            method: GET or POST.
            path: Path of the endpoint.
            body: JSON.
            timeout_s: Deadline, seconds; None leaves it to the caller's.
            **query: In the URL.

        Raises:
            RequestError: it answered 4xx.
            GenerationError: it answered 5xx.
            ServerLostError: it is not there, closed the connection, or answered 5xx as it is no longer well.
            RequestTimeoutError: it did not answer in time.
        """
        try:
            async with asyncio.timeout(timeout_s), self.request(method, path, body, **query) as response:
                await self.check(response, path)
                return decode((await read_body(response)).decode(errors="replace"))
        except TimeoutError as error:
            if timeout_s is None:
                raise
            raise RequestTimeoutError(f"{self.where} did not answer {path} within {timeout_s} s") from error
        except aiohttp.ClientError as error:
            raise await self.lost(closed(error)) from error

    async def command(self, path: str, body: Any = None, **query: str) -> dict[str, Any]:
        """`call` by POST, with the deadline of commands."""
        return await self.call("POST", path, body, timeout_s=self._timeout_s + GRACE_S, **query)

    async def events(self, path: str, body: Any) -> AsyncGenerator[dict[str, Any]]:
        """Send a POST whose response is a stream of server-sent events; yields their JSON objects as they come.

        Raises:
            RequestError, GenerationError, ServerLostError: as `call`; also where an event reports the failure.
        """
        try:
            async with self.request("POST", path, body) as response:
                await self.check(response, path)
                async for line in read_lines(response):  # an event is one line; `[DONE]` is no object
                    event = decode(line[len(EVENT) :].decode(errors="replace")) if line.startswith(EVENT) else {}
                    if isinstance(error := event.get("error"), dict):
                        raise await self._failure(int(error.get("code") or 500), path, json.dumps(event))
                    if event:
                        yield event
        except aiohttp.ClientError as error:
            raise await self.lost(closed(error)) from error

    async def check(self, response: aiohttp.ClientResponse, path: str) -> None:
        """Raise the error of a response other than 200.

        Raises:
            RequestError: it is 4xx.
            ServerLostError: it is 5xx, and the server is no longer well: one of its processes is gone.
            GenerationError: it is anything else.
        """
        if response.status != 200:
            raise await self._failure(response.status, path, (await read_body(response)).decode(errors="replace"))

    async def _failure(self, status: int, path: str, text: str) -> RolloutError:
        """Error of a status and a message; see `check`."""
        what = f"{self.name} answered {status} to {path}: {error_text(text)}"
        if 400 <= status < 500:
            return RequestError(what)
        if await self._is_unwell():
            return await self.lost(what)
        errors = "".join(f"\n  | {line}" for line in self.process.first_errors)
        return GenerationError(what + (f"; the first errors in its log:{errors}" if errors else ""))

    async def _is_unwell(self) -> bool:
        """Whether the server is lost: it says so, or its port is closed. One that is too busy to answer may be well."""
        try:
            async with asyncio.timeout(GRACE_S), self.request("GET", "/health") as response:
                return response.status != 200
        except TimeoutError:
            return False
        except aiohttp.ClientError:
            return True

    async def lost(self, why: str) -> ServerLostError:
        """Error for a lost server, with how its process ended, if it did."""
        if await self.process.has_ended(EXIT_TIMEOUT_S):
            return ServerLostError(self.process.why_ended())
        return ServerLostError(f"{self.where} is lost: {why}")


def closed(error: aiohttp.ClientError) -> str:
    """Description of a failed connection."""
    return f"it closed the connection: {error or type(error).__name__}"


def decode(text: str) -> dict[str, Any]:
    """Decode a JSON object; an empty one for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def error_text(text: str) -> str:
    """Message of an error response, whatever its format."""
    found: Mapping[str, Any] = decode(text)
    message = found.get("error", found.get("detail", found.get("message")))
    if isinstance(message, dict):
        message = message.get("message")
    return str(message or text)[:1000]
