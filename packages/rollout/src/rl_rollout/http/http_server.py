"""HTTP clients: `HttpServer` of a running server, `LaunchedServer` of one that is started as a subprocess."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from contextlib import aclosing
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

import aiohttp

from rl_rollout.base import RolloutServer
from rl_rollout.errors import (
    ConfigError,
    GenerationError,
    RequestError,
    RequestTimeoutError,
    RolloutError,
    ServerLostError,
)
from rl_rollout.http import messages as wire
from rl_rollout.http.body import json_object, read_body, read_lines
from rl_rollout.process import STOP_TIMEOUT_S, ChildProcess
from rl_rollout.types import Capabilities, FinishReason, ServerAddress, TokenChunk, TokenOutput
from rl_rollout.validation import check_answer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence

    from rl_rollout.base import PauseMode, WeightReceiver
    from rl_rollout.types import GenerateRequest, ServerConfig, TensorPart


CONNECT_TIMEOUT_S = 10.0
"""Deadline of opening a connection, seconds."""
GRACE_S = 5.0
"""Seconds that the client waits beyond the server's own deadline, for the server's answer about it."""

MOST_TOGETHER, MOST_BYTES_TOGETHER = 1024, 2**24
"""Most requests, and bytes, in one HTTP request; below the servers' `max_completions` and `max_body_bytes`."""

Pending = tuple["GenerateRequest", bytes, "asyncio.Future[TokenOutput]"]
"""Request, its JSON, and the future of its output."""


class Connection:
    """Connection to one server by aiohttp.

    Args:
        url: Its URL, without a slash at the end.
        api_token: Bearer token; None sends none.
        timeout_s: The server's own deadline.
    """

    def __init__(self, url: str, *, api_token: str | None, timeout_s: float) -> None:
        self.url, self.timeout_s = url, timeout_s
        self._api_token = api_token
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close it. Idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def open(self) -> aiohttp.ClientSession:
        """Session, opened when it is first needed."""
        if self._session is None:
            headers = {"Authorization": f"Bearer {self._api_token}"} if self._api_token else {}
            self._session = aiohttp.ClientSession(
                headers=headers,
                auto_decompress=False,
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            )
        return self._session

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request that is answered at once; returns the JSON object of the answer.

        Raises:
            RolloutError: of the server, or the server is lost, or did not answer.
        """
        try:
            async with (
                asyncio.timeout(self.timeout_s + GRACE_S),
                self.open().request(method, self.url + path, json=body) as response,
            ):
                if response.status != 200:
                    raise await self.failure(response)
                return json_object(await read_body(response), self.url + path)
        except TimeoutError as error:
            if isinstance(error, RolloutError):
                raise
            message = f"{self.url}{path} did not answer within {self.timeout_s + GRACE_S} s"
            raise RequestTimeoutError(message) from error
        except aiohttp.ClientError as error:
            raise self.lost(error) from error

    @property
    def until_silent(self) -> aiohttp.ClientTimeout:
        """Timeouts of generation: no total, but the server writes something every few seconds."""
        return aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=self.timeout_s + GRACE_S)

    def lost(self, cause: Exception) -> ServerLostError:
        """Error for a connection that failed."""
        what = f"is not there or closed the connection: {cause or type(cause).__name__}"
        if isinstance(cause, aiohttp.SocketTimeoutError):
            what = f"wrote nothing for {self.timeout_s + GRACE_S} s, and it writes every few seconds while it is well"
        lost = ServerLostError(f"{self.url} {what}")
        lost.__cause__ = cause
        return lost

    async def failure(self, response: aiohttp.ClientResponse) -> RolloutError:
        """Error in a response."""
        return wire.error_from_body(await read_body(response), f"{response.url}, status {response.status},")[1]


class HttpServer(RolloutServer):
    """HTTP client of one rollout server.

    Requests made in the same turn of the event loop are sent in one HTTP request, and their answers come back in one
    stream as they end: a thousand short requests do not cost a thousand round trips.
    """

    def __init__(self, url: str, *, api_token: str | None = None, timeout_s: float = 120.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"server address {url!r} is not an http:// URL")
        self.connection = Connection(url.rstrip("/"), api_token=api_token, timeout_s=timeout_s)
        self._outbox: list[Pending] = []
        self._in_flight: set[str] = set()
        self._left: list[str] = []
        """Ids of requests whose callers have left, to be aborted together."""
        self._leaving: dict[str, asyncio.Task[None]] = {}
        """Aborts under way, by request id: the next request with that id is sent after it."""
        self.received: dict[str, list[TokenChunk]] = {}
        """Chunks received so far, by request in flight."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._capabilities = Capabilities()

    @property
    def url(self) -> str:
        """URL of the server."""
        return self.connection.url

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities that the server reported."""
        return self._capabilities

    async def start(self) -> ServerAddress:
        """Connect to the server, which is running already; returns its address."""
        health = await self.connection.call("GET", "/health")
        model, pid = health.get("model"), health.get("pid")
        if not isinstance(model, str) or type(pid) is not int:
            raise RolloutError(
                f"{self.url}/health answered without model and pid, as a rollout server does: {health!r:.300}"
            )
        self._capabilities = wire.capabilities_from_json(health.get("capabilities"), self.url)
        return ServerAddress(url=self.url, model=model, pid=pid)

    async def stop(self) -> None:
        """Close the connections; the server keeps running. Idempotent."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.connection.close()

    async def health(self) -> dict[str, Any]:
        """Health of the server: status, weight version, numbers of requests."""
        return await self.connection.call("GET", "/health")

    async def check_health(self) -> None:
        """See `RolloutServer.check_health`. A server that does not answer in time counts as lost."""
        try:
            await self.health()
        except RequestTimeoutError as error:
            raise ServerLostError(str(error)) from error

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """See `RolloutServer.generate`."""
        if (leaving := self._leaving.get(request.request_id)) is not None:
            await asyncio.wait([leaving])
        body = wire.request_to_body(request)
        self._enter(request)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[TokenOutput] = loop.create_future()
        if not self._outbox:
            loop.call_soon(self._flush)
        self._outbox.append((request, body, future))
        # A request without a deadline has none here: the server applies its own, and sends heartbeats meanwhile.
        timeout_s = None if request.timeout_s is None else request.timeout_s + GRACE_S
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            if future.done() and not future.cancelled():
                raise  # the server's own error, which says more
            self._give_up(request)
            raise _late(self.url, request, timeout_s) from error
        except asyncio.CancelledError:
            self._give_up(request)
            raise
        finally:
            self._in_flight.discard(request.request_id)
            self.received.pop(request.request_id, None)

    async def generate_stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `RolloutServer.generate_stream`. Leaving early closes the connection, which aborts the request."""
        self._enter(request)
        timeout_s = None if request.timeout_s is None else request.timeout_s + GRACE_S
        # The deadline applies to every wait for a chunk, but not to the time that the caller takes over one.
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        body = wire.request_to_body(request)
        try:
            async with asyncio.timeout_at(deadline):
                response = await self.connection.open().post(
                    f"{self.url}/generate_stream", data=body, timeout=self.connection.until_silent
                )
            async with response:
                if response.status != 200:
                    raise await self.connection.failure(response)
                lines = read_lines(response)
                reason, count = None, 0
                while reason is None:
                    async with asyncio.timeout_at(deadline):
                        chunk = self._read_chunk(await anext(lines, None))
                    count += len(chunk.token_ids)
                    self._check_chunk(request, chunk, count)
                    reason = chunk.finish_reason
                    yield chunk
        except aiohttp.ClientError as error:
            raise self.connection.lost(error) from error
        except TimeoutError as error:
            if isinstance(error, RolloutError):
                raise
            raise _late(self.url, request, timeout_s) from error
        finally:
            self._in_flight.discard(request.request_id)

    def _read_chunk(self, line: bytes | None) -> TokenChunk:
        if line is None:
            raise ServerLostError(f"{self.url} closed the connection before the end of a stream")
        try:
            return wire.chunk_from_body(line)[1]
        except wire.NO_MESSAGE:
            raise wire.error_from_body(line, self.url)[1] from None

    def _check_chunk(self, request: GenerateRequest, chunk: TokenChunk, count: int) -> None:
        """Check a chunk by `check_answer`, and the number of tokens up to its end."""
        if count > request.sampling_params.max_new_tokens:
            raise GenerationError(f"request {request.request_id!r}: {self.url} sent more tokens than were asked for")
        part = replace(TokenOutput.joined(request.request_id, [chunk]), finish_reason=FinishReason.ABORT)
        check_answer(request, part, self.url)

    def _enter(self, request: GenerateRequest) -> None:
        if request.request_id in self._in_flight:
            raise RequestError(f"request id {request.request_id!r} is in flight already")
        self._in_flight.add(request.request_id)

    def _flush(self) -> None:
        batch, self._outbox = self._outbox, []
        live: list[Pending] = []
        num_bytes = 0
        for each in batch:
            _, body, future = each
            if future.done():
                continue
            if live and (len(live) == MOST_TOGETHER or num_bytes + len(body) > MOST_BYTES_TOGETHER):
                self._spawn(self._send_batch(live))
                live, num_bytes = [], 0
            live.append(each)
            num_bytes += len(body)
        if live:
            self._spawn(self._send_batch(live))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _give_up(self, request: GenerateRequest) -> None:
        """Abort a request whose caller has left; one call per turn of the event loop."""
        if not self._left:
            self._leaving_now = self._spawn(self._abort_left())
        self._left.append(request.request_id)
        self._leaving[request.request_id] = self._leaving_now

    async def _send_batch(self, batch: Sequence[Pending]) -> None:
        """Send requests and settle their futures, all of them in any case."""
        waiting = {request.request_id: (request, future) for request, _, future in batch}
        error: Exception = ServerLostError(f"{self.url} closed the connection before it answered")
        try:
            body = b'{"progress": true, "requests": [' + b",".join(body for _, body, _ in batch) + b"]}"
            async with self.connection.open().post(
                f"{self.url}/generate_batch", data=body, timeout=self.connection.until_silent
            ) as response:
                if response.status != 200:
                    raise await self.connection.failure(response)
                await self._read_lines(response, waiting)
        except aiohttp.ClientError as cause:
            error = self.connection.lost(cause)
        except Exception as cause:  # noqa: BLE001  raised by every waiting caller's future
            error = cause
        finally:
            for request_id, (_, future) in waiting.items():
                if not future.done():
                    future.set_exception(_with_partial(error, request_id, self.received.get(request_id, [])))

    async def _read_lines(
        self,
        response: aiohttp.ClientResponse,
        waiting: dict[str, tuple[GenerateRequest, asyncio.Future[TokenOutput]]],
    ) -> None:
        counts: dict[str, int] = {}
        async for line in read_lines(response):
            try:
                if line.startswith(b"+"):
                    request_id, event = wire.chunk_from_body(line[1:])
                else:
                    event = wire.output_from_body(line)
                    request_id = event.request_id
            except wire.NO_MESSAGE:
                request_id, event = wire.error_from_body(line, self.url)
                if request_id not in waiting:
                    raise event from None
            if request_id not in waiting:
                raise GenerationError(f"{self.url} answered request {request_id!r:.100}, which it was not asked")
            request, future = waiting[request_id]
            if future.done():
                continue  # its caller gave up
            try:
                if isinstance(event, TokenChunk):
                    counts[request_id] = counts.get(request_id, 0) + len(event.token_ids)
                    self._check_chunk(request, event, counts[request_id])
                elif isinstance(event, TokenOutput):
                    check_answer(request, event, self.url)
            except GenerationError as error:
                event = error
            if isinstance(event, TokenChunk):
                self.received.setdefault(request_id, []).append(event)
            elif isinstance(event, TokenOutput):
                future.set_result(event)
            else:
                future.set_exception(_with_partial(event, request_id, self.received.get(request_id, [])))

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `RolloutServer.abort`."""
        await self.connection.call(
            "POST", "/abort", {"request_ids": None if request_ids is None else list(request_ids)}
        )

    async def _abort_left(self) -> None:
        """Abort the requests of callers that have left, whose own errors were raised already."""
        await asyncio.sleep(0)
        left, self._left = self._left, []
        with contextlib.suppress(RolloutError):
            await self.abort(left)
        for request_id in left:
            if self._leaving.get(request_id) is asyncio.current_task():
                del self._leaving[request_id]

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutServer.pause`."""
        await self.connection.call("POST", "/pause", {"mode": mode})

    async def resume(self) -> None:
        """See `RolloutServer.resume`."""
        await self.connection.call("POST", "/resume")

    async def weight_layout(self, weights: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[list[TensorPart]] | None:
        """See `RolloutServer.weight_layout`."""
        answer = await self.connection.call("POST", "/weight_layout", {"weights": dict(weights)})
        return wire.layout_from_json(answer.get("parts", ""), self.url)

    async def update_weights(self, receive: WeightReceiver, version: int) -> None:
        """See `RolloutServer.update_weights`. The server's process opens its own receiver by `receive.address`."""
        await self.connection.call("POST", "/update_weights", {"address": receive.address, "version": version})

    async def sleep(self, level: int = 1) -> None:
        """See `RolloutServer.sleep`."""
        await self.connection.call("POST", "/sleep", {"level": level})

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """See `RolloutServer.wake`."""
        await self.connection.call("POST", "/wake", {"tags": list(tags)})


def _late(url: str, request: GenerateRequest, timeout_s: float | None) -> RequestTimeoutError:
    return RequestTimeoutError(f"{url} did not answer request {request.request_id!r} within {timeout_s} s")


def _with_partial(error: Exception, request_id: str, chunks: Sequence[TokenChunk]) -> Exception:
    """Error of one request; a loss of the server gets the request's tokens so far."""
    if not isinstance(error, ServerLostError):
        return error
    lost = ServerLostError(str(error))
    lost.__cause__ = error.__cause__
    if chunks:
        lost.partial = TokenOutput.joined(request_id, chunks)
    return lost


API_TOKEN_VARIABLE = "RL_ROLLOUT_API_TOKEN"
"""Environment variable with the bearer token; a command line could be read by every user of the machine."""

READY = "rl-serve ready "
"""Prefix of the line with the address, as JSON, on the server's standard output."""

EXIT_TIMEOUT_S = 2.0
"""Seconds to wait for the end of a server whose connection was lost, to report its exit code and last output."""


def serve_command(backend: str, config: ServerConfig, task: str = "generate") -> list[str]:
    """Command line of `rl-serve` for a configuration."""
    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    del settings["api_token"]  # every user of the machine may read a command line
    model_path, options = settings.pop("model_path"), settings.pop("options")
    if task == "score":
        del settings["timeout_s"]  # of generating
    settings["parallel"] = ",".join(f"{name}={size}" for name, size in asdict(config.parallel).items())
    return [
        *(
            sys.executable,
            "-m",
            "rl_rollout.cli",
            model_path,
            "--backend",
            backend,
            "--task",
            task,
            "--exit-with-stdin",
        ),
        *(word for name, value in settings.items() for word in ("--" + name.replace("_", "-"), str(value))),
        *(word for name, value in options.items() for word in ("--option", f"{name}={json.dumps(value)}")),
    ]


class LaunchedServer(HttpServer):
    """Client of a server that it launches: `start` runs `rl-serve`, `stop` ends it.

    The server also ends when this process ends, however that happens: it waits for the end of its standard input, which
    this process holds open.
    """

    def __init__(self, backend: str, config: ServerConfig, task: str = "generate") -> None:
        super().__init__(f"http://{config.host}:{config.port}", api_token=config.api_token, timeout_s=config.timeout_s)
        self.config = config
        environment = {API_TOKEN_VARIABLE: config.api_token or ""}  # never the variable of this process
        self.process = ChildProcess(
            serve_command(backend, config, task), environment, name="rl-serve", on_line=self._take_line
        )
        self._address: ServerAddress | None = None
        self._ready = threading.Event()

    @property
    def last_lines(self) -> tuple[str, ...]:
        """Last lines of the server's output, at most 20."""
        return self.process.last_lines

    async def start(self) -> ServerAddress:
        """Start the process and wait until it answers. Idempotent."""
        if self._address is not None:
            return self._address
        self.process.start()

        async def is_ready() -> bool:
            return self._ready.is_set()

        try:
            await self.process.wait_until(is_ready, timeout_s=self.connection.timeout_s, check_s=0.02)
            self._address = await super().start()
        except BaseException:
            await self._end(grace_s=0.0)
            raise
        return self._address

    def _take_line(self, line: str) -> bool:
        """Find the line with the address; runs in the reading thread."""
        if not line.startswith(READY) or self._ready.is_set():
            return False
        self.connection.url = str(json.loads(line[len(READY) :])["url"])
        self._ready.set()
        return True

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """See `RolloutServer.generate`."""
        try:
            return await super().generate(request)
        except ServerLostError as error:
            await self._report_end(error)
            raise

    async def generate_stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `RolloutServer.generate_stream`."""
        try:
            async with aclosing(super().generate_stream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except ServerLostError as error:
            await self._report_end(error)
            raise

    async def _report_end(self, error: ServerLostError) -> None:
        """Raise the loss again with the process's exit code and last output, if it ends within `EXIT_TIMEOUT_S`."""
        if await self.process.has_ended(EXIT_TIMEOUT_S):
            lost = ServerLostError(self.process.why_ended())
            lost.partial = error.partial
            raise lost from error

    async def stop(self) -> None:
        """End the process and close the connections. Idempotent."""
        await self._end(grace_s=STOP_TIMEOUT_S)

    async def _end(self, *, grace_s: float) -> None:
        await super().stop()
        await self.process.end(grace_s=grace_s)
        self._address = None
