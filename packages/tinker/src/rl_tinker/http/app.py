"""HTTP application: authentication, quotas of waiting requests, errors, and the routes of all parts of the API."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web

from rl_tinker.errors import (
    JournalError,
    NotAllowedError,
    NotFoundError,
    QuotaError,
    RanksLostError,
    RequestError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from rl_tinker.service.samplers import Samplers
    from rl_tinker.service.scheduler import Scheduler
    from rl_tinker.service.store import Store
    from rl_tinker.service.tenants import Tenant, Tenants
    from rl_tinker.types import Checkpoint, Model, Session

    Handler = Callable[["Call"], Awaitable[Any]]
    OpenHandler = Callable[["Service", web.Request], Awaitable[web.StreamResponse]]
    Owned = TypeVar("Owned", Session, Model, Checkpoint)

MAX_BODY_BYTES = 2**27
"""Largest body of a request."""
_MAX_PAGE = 500

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What the handlers work on."""

    store: Store
    scheduler: Scheduler
    samplers: Samplers
    tenants: Tenants
    model_name: str
    """Name by which clients ask for the base model."""
    model_folder: str
    vocab_size: int
    is_tied: bool
    """Whether its output layer is its embedding, which no adapter goes on."""
    max_len: int
    """Longest row, tokens."""
    max_rank: int
    is_full: bool
    """Whether all weights are trained."""
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    """Signs download URLs, which end with this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Authenticated request."""

    service: Service
    tenant: Tenant
    body: bytes
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
            raise RequestError(f"the body is no {getattr(kind, '__name__', kind)}: {error}") from error

    def text(self, name: str) -> str:
        """Text of this name in the body, which is an object.

        Raises:
            RequestError: there is none.
        """
        found = self.json(dict[str, Any]).get(name)
        if not isinstance(found, str):
            raise RequestError(f"the body has {name}={found!r}; give a text")
        return found

    def page(self, records: Mapping[str, Owned]) -> tuple[list[Owned], dict[str, int]]:
        """The tenant's own of these records, the newest first, from `offset` on up to `limit`; and the cursor.

        Raises:
            RequestError: `offset` or `limit` of the query is no whole number.
        """
        own = [each for each in records.values() if each.tenant == self.tenant.name]
        own.sort(key=lambda each: -each.created)
        offset, limit = self._number("offset", 0), min(self._number("limit", 20), _MAX_PAGE)
        return own[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(own)}

    def _number(self, name: str, default: int) -> int:
        text = self.query.get(name, str(default))
        if not text.isdecimal():
            raise RequestError(f"{name}={text!r} must be a whole number")
        return int(text)

    def check_base(self, name: str | None) -> None:
        """Check the name of a base model, if one is given; raises NotFoundError."""
        if name not in (None, self.service.model_name):
            raise NotFoundError(f"base_model={name!r} is not served here; this server has {self.service.model_name!r}")

    def check_pending(self, *, count: int = 1, num_bytes: int = 0) -> None:
        """Check the quotas of requests that wait or run, before `count` more with `num_bytes` are accepted.

        Raises:
            QuotaError: one is reached; a request that is larger than a quota is accepted alone, and one without rows
                whatever waits, as the optim_step that makes room.
        """
        tenant, store = self.tenant, self.service.store
        pending = store.pending[tenant.name] + self.service.samplers.pending_of(tenant)
        if pending and pending + count > tenant.max_pending:
            raise QuotaError(
                f"{tenant.name} has {pending} requests and sequences that wait or run; its quota is "
                f"{tenant.max_pending}"
            )
        held = store.body_bytes[tenant.name]
        if held and num_bytes and held + num_bytes > tenant.max_pending_mib * 2**20:
            raise QuotaError(
                f"{tenant.name} has {held / 2**20:.1f} MiB of requests that wait or run, or whose gradient no "
                f"optim_step has used; its quota is {tenant.max_pending_mib} MiB"
            )

    def check_samplers(self) -> None:
        """Check the quota of sampling sessions, before one more is made; raises QuotaError."""
        store, tenant = self.service.store, self.tenant
        own = (each for each in store.samplers.values() if each.tenant == tenant.name)
        live = sum(not store.sessions[each.session].finished for each in own)
        if live >= tenant.max_samplers:
            raise QuotaError(
                f"{tenant.name} has {live} sampling sessions; its quota is {tenant.max_samplers}. They end with their "
                "session: finish one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer that is no JSON, or whose status is not 200."""

    body: bytes = b""
    content_type: str = "application/json"
    status: int = 200


class Application:
    """Application with the routes of several parts.

    Args:
        service: What the handlers work on.
        routes: Method, path under `/api/v1` and handler of each route.
        open_routes: Routes that need no key: their handlers get a request of aiohttp.
    """

    def __init__(
        self,
        service: Service,
        routes: Iterable[tuple[str, str, Handler]],
        open_routes: Iterable[tuple[str, str, OpenHandler]],
    ) -> None:
        self._service = service
        self._app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_guarded])
        for method, path, handler in [*routes, ("*", "/{rest:.*}", _absent)]:
            self._app.router.add_route(method, f"/api/v1{path}", self._adapted(handler))
        for method, path, plain in open_routes:
            self._app.router.add_route(method, path, self._opened(plain))
        self._runner = web.AppRunner(self._app, access_log=None, shutdown_timeout=2.0)

    async def start(self, host: str, port: int) -> int:
        """Bind the port; returns it.

        Raises:
            OSError: it cannot be bound.
        """
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        return self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close the port, and end open requests. Idempotent."""
        await self._runner.cleanup()

    def _adapted(self, handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            call = Call(
                service=self._service,
                tenant=self._service.tenants.of(request.headers.get("X-API-Key", "")),
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

    def _opened(self, handler: OpenHandler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await handler(self._service, request)

        return handle


@web.middleware
async def _guarded(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
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
    headers: dict[str, str] = {}
    if isinstance(error, QuotaError):
        headers["Retry-After"] = "1"
    if isinstance(error, NotAllowedError):
        headers["WWW-Authenticate"] = "X-API-Key"
    body = {"error": str(error), "type": type(error).__name__}
    return web.json_response(body, status=status, headers=headers)
