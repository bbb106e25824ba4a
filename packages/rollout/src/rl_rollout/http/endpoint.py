"""HTTP endpoint of a server in this process.

`POST /generate`, `/generate_batch` and `/generate_stream` take and return token ids; `/abort /pause /resume
/weight_layout /update_weights /sleep /wake` are the methods of `RolloutServer`; `/health` reports the status,
`/metrics` the same for Prometheus; `openai.py` adds the OpenAI-compatible endpoints. An error is
`{"error": {"type", "message", "code"}}`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
import os
import socket
from collections import Counter
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from aiohttp import web

from rl_rollout.base import HttpEndpoint
from rl_rollout.errors import RequestError, RolloutError, ServerStartError
from rl_rollout.http import messages as wire
from rl_rollout.http.openai import OpenAIRoutes
from rl_rollout.receiver import CkptReceiver
from rl_rollout.validation import check_count

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from rl_rollout.base import RolloutServer
    from rl_rollout.types import GenerateRequest, ServerConfig, TokenChunk, TokenOutput

PROGRESS = b"+"
"""Prefix of a progress line, which has new tokens and is not the final answer."""

HEARTBEAT_S = 2.0
"""Heartbeat interval, seconds: empty lines show a waiting client that the server is alive, however long it waits."""

NOT_ALLOWED = {
    "error": {
        "type": "AuthorizationError",
        "message": "this server asks for a bearer token in the Authorization header",
    }
}

_log = logging.getLogger(__name__)


@runtime_checkable
class TellsProgress(Protocol):
    """Server that reports new tokens before the end of a request."""

    tells_progress: bool

    async def generate(
        self, request: GenerateRequest, on_progress: Callable[[TokenChunk], None] | None = None
    ) -> TokenOutput:
        """See `RolloutServer.generate`."""
        ...


def progress_line(request_id: str, lines: asyncio.Queue[bytes]) -> Callable[[TokenChunk], None]:
    """Callback that writes a progress line for every chunk."""

    def report(chunk: TokenChunk) -> None:
        lines.put_nowait(PROGRESS + wire.chunk_to_body(chunk, request_id) + b"\n")

    return report


def json_body(body: bytes, status: int = 200) -> web.Response:
    """JSON response with an encoded message."""
    return web.Response(body=body, status=status, content_type="application/json")


def not_bound(config: ServerConfig, error: OSError) -> ServerStartError:
    """Error for a port that cannot be bound."""
    return ServerStartError(
        f"port {config.port} of {config.host} cannot be bound ({error.strerror or error}); choose another port, or 0 "
        "for a free one"
    )


def url_of(host: str, port: int) -> str:
    """Base URL of a bound port; with the host's name where it is bound on all interfaces."""
    host = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_allowed(request: web.Request, api_token: str | None) -> bool:
    """Whether a request has the bearer token, if the server has one; `/health` needs none."""
    if not api_token or request.path == "/health":
        return True
    shown = request.headers.get("Authorization", "").encode(errors="surrogateescape")
    return hmac.compare_digest(shown, f"Bearer {api_token}".encode())


def http_error(request: web.Request, error: web.HTTPException, max_body_bytes: int) -> web.Response:
    """JSON response for an error of aiohttp."""
    reason = error.reason
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        reason = f"the body is larger than max_body_bytes={max_body_bytes}; ask for less at a time, or raise it"
    body = {"error": {"type": "HttpError", "message": f"{request.method} {request.path}: {reason}"}}
    return web.json_response(body, status=error.status)


class Endpoint(HttpEndpoint):
    """HTTP endpoint of one server, which it knows by its abstract interface (and by `status()`, if it has that)."""

    def __init__(self, server: RolloutServer, config: ServerConfig, *, model_name: str) -> None:
        self._server = server
        self._config = config
        self._model_name = model_name
        self._teller: TellsProgress | None = server if isinstance(server, TellsProgress) else None
        self._receivers: dict[str, CkptReceiver] = {}
        self._openai = OpenAIRoutes(server, config, model_name=model_name)
        self._counts: Counter[str] = Counter()
        """Number of responses by path and status."""
        self._runner: web.AppRunner | None = None

    async def check_port(self) -> None:
        """Check that the port is free, before a model is loaded for minutes.

        Raises:
            ServerStartError: it is taken, or the interface cannot be bound.
        """
        if not self._config.port:
            return
        try:
            server = await asyncio.get_running_loop().create_server(
                asyncio.Protocol, self._config.host, self._config.port
            )
        except OSError as error:
            raise not_bound(self._config, error) from error
        server.close()
        await server.wait_closed()

    async def start(self) -> str:
        """See `HttpEndpoint`."""
        app = web.Application(client_max_size=self._config.max_body_bytes, middlewares=[self._guard])
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/generate_batch", self._generate_batch),
                web.post("/generate_stream", self._generate_stream),
                web.post("/abort", self._abort),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.post("/weight_layout", self._weight_layout),
                web.post("/update_weights", self._update_weights),
                web.post("/sleep", self._sleep),
                web.post("/wake", self._wake),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                *self._openai.routes(),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._config.host, self._config.port)
        try:
            await site.start()
        except OSError as error:
            await self.stop()
            raise not_bound(self._config, error) from error
        return url_of(self._config.host, self._runner.addresses[0][1])

    async def stop(self) -> None:
        """See `HttpEndpoint`."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        self._openai.close()
        for receiver in self._receivers.values():
            await receiver.close()
        self._receivers.clear()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Middleware: check the token, turn errors into JSON, count responses."""
        if not is_allowed(request, self._config.api_token):
            return web.json_response(NOT_ALLOWED, status=401)
        response = await self._answer(request, handler)
        resource = request.match_info.route.resource  # None for unknown paths, which are counted as one
        path = "unknown" if resource is None else resource.canonical
        self._counts[f'path="{path}",status="{response.status}"'] += 1
        return response

    async def _answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            return await handler(request)
        except RolloutError as error:
            return json_body(wire.error_to_body(error), wire.status_of(error))
        except web.HTTPException as error:
            return http_error(request, error, self._config.max_body_bytes)
        except Exception as error:  # noqa: BLE001  logged, and sent to the caller; the server stays up
            _log.exception("%s %s failed", request.method, request.path)
            return json_body(wire.error_to_body(error), 500)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        output = await self._server.generate(wire.request_from_body(await request.read(), request.path))
        return json_body(wire.output_to_body(output))

    async def _generate_batch(self, request: web.Request) -> web.StreamResponse:
        """`/generate_batch`: `{"requests": [...]}` in; one JSON line per request out as it ends, an output or an error.

        With `"progress": true`, lines that begin with `+` have new tokens in between, where the server reports them:
        the client resumes from these if this process dies.
        """
        message = wire.read_body(await request.read(), wire.BatchMessage, request.path)
        check_count(len(message.requests), self._config)
        done: asyncio.Queue[bytes] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._generate_line(bytes(each), done, reports=message.progress))
            for each in message.requests
        ]
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        try:
            await response.prepare(request)
            num_left = len(tasks)
            while num_left:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        lines = [await done.get()]
                except TimeoutError:
                    await response.write(b"\n")
                    continue
                while not done.empty():
                    lines.append(done.get_nowait())
                num_left -= sum(not line.startswith(PROGRESS) for line in lines)
                await response.write(b"".join(lines))
            await response.write_eof()
        finally:
            for task in tasks:  # requests of a client that has disconnected
                task.cancel()
        return response

    async def _generate_stream(self, request: web.Request) -> web.StreamResponse:
        """`/generate_stream`: a request in; a JSON line per chunk out, the last with a `finish_reason`, or an error."""
        asked = wire.request_from_body(await request.read(), request.path)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        async with aclosing(self._server.generate_stream(asked)) as chunks:
            try:
                async for chunk in _with_beats(chunks):
                    if not response.prepared:  # so that an error before the first heartbeat has its own HTTP status
                        await response.prepare(request)
                    await response.write((b"" if chunk is None else wire.chunk_to_body(chunk)) + b"\n")
            except RolloutError as error:
                if not response.prepared:
                    raise
                await response.write(wire.error_to_body(error) + b"\n")
        await response.write_eof()
        return response

    async def _generate_line(self, body: bytes, done: asyncio.Queue[bytes], *, reports: bool) -> None:
        request: GenerateRequest | None = None
        try:
            request = wire.request_from_body(body)
            if reports and self._teller is not None and not request.has_extras:
                output = await self._teller.generate(request, progress_line(request.request_id, done))
            else:
                output = await self._server.generate(request)
            answer = wire.output_to_body(output)
        except Exception as error:  # noqa: BLE001  the answer of this request; the others go on
            known_id = request.request_id if request else wire.request_id_of(body)
            answer = wire.error_to_body(error, known_id)
        done.put_nowait(answer + b"\n")

    async def _abort(self, request: web.Request) -> web.StreamResponse:
        message = wire.read_body(await request.read(), wire.AbortMessage, request.path)
        await self._server.abort(message.request_ids)
        return web.json_response({})

    async def _pause(self, request: web.Request) -> web.StreamResponse:
        mode = wire.read_body(await request.read(), wire.PauseMessage, request.path).mode
        if mode not in ("abort", "wait", "keep"):
            raise RequestError(f"pause mode {mode!r} is not one of abort, wait, keep")
        await self._server.pause(mode)
        return web.json_response({})

    async def _resume(self, request: web.Request) -> web.StreamResponse:
        del request
        await self._server.resume()
        return web.json_response({})

    async def _weight_layout(self, request: web.Request) -> web.StreamResponse:
        message = wire.read_body(await request.read(), wire.WeightsMessage, request.path)
        layout = await self._server.weight_layout(message.weights)
        parts = None if layout is None else [[dataclasses.asdict(part) for part in own] for own in layout]
        return web.json_response({"parts": parts})

    async def _update_weights(self, request: web.Request) -> web.StreamResponse:
        """`/update_weights`: this process opens the receiver, once per address."""
        message = wire.read_body(await request.read(), wire.UpdateMessage, request.path)
        if message.address not in self._receivers:
            self._receivers[message.address] = CkptReceiver(message.address, timeout_s=self._config.timeout_s)
        await self._server.update_weights(self._receivers[message.address], message.version)
        return web.json_response({"version": message.version})

    async def _sleep(self, request: web.Request) -> web.StreamResponse:
        await self._server.sleep(wire.read_body(await request.read(), wire.SleepMessage, request.path).level)
        return web.json_response({})

    async def _wake(self, request: web.Request) -> web.StreamResponse:
        await self._server.wake(wire.read_body(await request.read(), wire.WakeMessage, request.path).tags)
        return web.json_response({})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        """`/metrics` for Prometheus: numbers of the status as gauges, responses counted by path and status.

        Format: https://prometheus.io/docs/instrumenting/exposition_formats
        """
        del request
        status: Callable[[], dict[str, Any]] | None = getattr(self._server, "status", None)
        lines: list[str] = []
        for name, value in (status() if status else {}).items():
            if name != "pid" and isinstance(value, int | float):
                lines += [f"# TYPE rl_rollout_{name} gauge", f"rl_rollout_{name} {float(value)}"]
        lines.append("# TYPE rl_rollout_http_requests_total counter")
        lines += [f"rl_rollout_http_requests_total{{{labels}}} {count}" for labels, count in self._counts.items()]
        return web.Response(text="\n".join(lines) + "\n", headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        del request
        await self._server.check_health()
        status: Callable[[], dict[str, Any]] | None = getattr(self._server, "status", None)
        found = status() if status else {"status": "ok", "model": self._model_name, "pid": os.getpid()}
        return web.json_response({**found, "capabilities": dataclasses.asdict(self._server.capabilities)})


async def _with_beats(chunks: AsyncIterator[TokenChunk]) -> AsyncIterator[TokenChunk | None]:
    """Chunks as they arrive, and None whenever none has arrived for `HEARTBEAT_S`."""
    while True:
        coming = asyncio.ensure_future(anext(chunks, None))
        try:
            while not (await asyncio.wait([coming], timeout=HEARTBEAT_S))[0]:
                yield None
        finally:
            if not coming.done():  # the caller leaves: a generator can only be closed while it is not running
                coming.cancel()
                await asyncio.wait([coming])
        chunk = coming.result()
        if chunk is None:
            return
        yield chunk
