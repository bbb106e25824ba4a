"""HTTP application: authentication, errors, and the routes of all parts of the API."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web

from rl_tinker.errors import JournalError, NotAllowedError, QuotaError, RanksLostError, RequestError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from rl_tinker.service.tenants import Tenant, Tenants

MAX_BODY_BYTES = 2**27
"""Largest body of a request."""

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Authenticated request."""

    tenant: Tenant
    body: bytes
    """Body."""
    path: Mapping[str, str]
    """Variable parts of the path."""
    query: Mapping[str, str]
    origin: str
    """Scheme and host by which the client reached the server."""

    def json(self, kind: type[T]) -> T:
        """Body as an object of the API.

        Raises:
            RequestError: it is not; says where.
        """
        try:
            return msgspec.json.decode(self.body, type=kind)
        except msgspec.DecodeError as error:
            raise RequestError(f"the body is no {kind.__name__}: {error}") from error

    def number(self, name: str, default: int) -> int:
        """Whole number of the query, 0 or more.

        Raises:
            RequestError: it is something else.
        """
        text = self.query.get(name, str(default))
        if not text.isdecimal():
            raise RequestError(f"{name}={text!r} must be a whole number")
        return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer that is no JSON, or whose status is not 200."""

    body: bytes = b""
    content_type: str = "application/json"
    status: int = 200


class Application:
    """Application with the routes of several parts, under `/api/v1`.

    Args:
        tenants: Tenants by key.
        routes: Method, path and handler of each route.
        open_routes: Routes that need no key: their handlers get a request of aiohttp.
    """

    def __init__(
        self,
        tenants: Tenants,
        routes: Iterable[tuple[str, str, Callable[[Call], Awaitable[Any]]]],
        open_routes: Iterable[tuple[str, str, Callable[[web.Request], Awaitable[web.StreamResponse]]]] = (),
    ) -> None:
        self._tenants = tenants
        self._app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guarded])
        for method, path, handler in routes:
            self._app.router.add_route(method, f"/api/v1{path}", self._adapted(handler))
        for method, path, plain in open_routes:
            self._app.router.add_route(method, path, plain)
        self._app.router.add_route("*", "/api/v1/{rest:.*}", self._adapted(_absent))
        self._runner = web.AppRunner(self._app, access_log=None, shutdown_timeout=2.0)

    async def start(self, host: str, port: int) -> int:
        """Bind the port; returns it.

        Raises:
            OSError: it cannot be bound.
        """
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        return self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close the port, and end open requests. Idempotent."""
        await self._runner.cleanup()

    def _adapted(self, handler: Callable[[Call], Awaitable[Any]]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            tenant = self._tenants.of(request.headers.get("X-API-Key", ""))
            call = Call(
                tenant=tenant,
                body=await request.read(),
                path=request.match_info,
                query=request.query,
                origin=str(request.url.origin()),
            )
            answer = await handler(call)
            if isinstance(answer, Reply):
                return web.Response(body=answer.body, content_type=answer.content_type, status=answer.status)
            return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

        return handle

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer errors by their status and a sentence."""
        try:
            return await handler(request)
        except RequestError as error:
            return _error(error, error.status)
        except (JournalError, RanksLostError) as error:
            return _error(error, 503)
        except (web.HTTPException, asyncio.CancelledError):
            raise
        except Exception as error:  # noqa: BLE001 - logged, and the server goes on
            _log.exception("%s %s", request.method, request.path)
            return _error(error, 500)


async def _absent(call: Call) -> Any:
    raise UnsupportedError(f"rl-tinker has no endpoint /api/v1/{call.path['rest']} with this method")


def _error(error: Exception, status: int) -> web.Response:
    headers = {"x-should-retry": "false"} if status == UnsupportedError.status else {}
    if isinstance(error, QuotaError):
        headers["Retry-After"] = "1"
    if isinstance(error, NotAllowedError):
        headers["WWW-Authenticate"] = "X-API-Key"
    body = {"error": str(error), "type": type(error).__name__}
    return web.json_response(body, status=status, headers=headers)
