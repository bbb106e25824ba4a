"""HTTP endpoint of the recording proxy: finds a request's session, generates the answer, and records the exchange.

A client needs no change but its base URL and its API key, which names the session. Where a request goes on with an
earlier one of its session, its prompt is the earlier ids with the new messages appended, so what the model emitted is
never re-tokenised; a request that goes on with none starts a trajectory.

A request whose client leaves (it timed out, say, and asks again) is ended at the server, counted as `num_abandoned` in
the metrics of the session's trajectories, and is part of none of them: nobody has acted on its answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web

from rl_agent.errors import AgentError, RowError, described, is_foreign
from rl_agent.proxy import chat_completions as _chat
from rl_agent.proxy import messages as _messages
from rl_agent.proxy import responses as _responses
from rl_agent.proxy.recorder import Recorder
from rl_agent.proxy.recording import Reward, trajectories
from rl_agent.proxy.requests import DEFAULT_MODEL, read_body
from rl_agent.proxy.sessions import Sessions, begins_with
from rl_agent.registry import load_plugin
from rl_agent.types import LARGEST_REWARD, ParsedTurn, well_formed
from rl_rollout.errors import ConfigError, RequestError, RolloutError, UnsupportedError
from rl_rollout.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from rl_agent.base import Generator
    from rl_agent.proxy.live_text import LiveText
    from rl_agent.proxy.recorder import Prepared
    from rl_agent.proxy.requests import Call, Writer
    from rl_agent.proxy.sessions import ProxySession
    from rl_agent.types import AgentLoopOutput, Tokenizer


_FAILURES = (AgentError, RolloutError, ConnectionError, TimeoutError, RecursionError)
"""Exceptions that are sent to the client as an error of its request."""

_TURNS = 3
"""Turns of the event loop from the end of a connection to the end of its handler: read, close, cancel."""

_LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")

_log = logging.getLogger(__name__)


class RecordingProxy:
    """Recording proxy: serves `/v1/chat/completions`, `/v1/responses` and `/v1/messages`, and records every exchange.

    A session's name is in the path (`/sessions/NAME/v1`), in the header `X-Session-ID`, or the API key of its client.
    With an `api_token`, the API key is that token, and the session's name may follow it: `TOKEN:NAME`, as `api_key` has
    it. `create_session` gives a session a key, which opens nothing else. A streamed answer is passed on token by token
    where the server is a `StreamingGenerator`, up to where a call of a tool may start; the call comes in one piece.

    Args:
        server: Generator of tokens, such as a rollout server.
        tokenizer: Tokenizer of the served model.
        parser: Tool-call parser; see `ToolLoop`.
        sampling_params: Fields of `SamplingParams`, for what requests leave open.
        host: Interface to bind.
        port: 0 picks a free one.
        template_kwargs: Further variables of the chat template.
        api_token: Token that callers must show; needed where `host` is not loopback.
        max_body_bytes: Largest request, bytes.
        strict: Refuse requests with fields that are not known. Else they are ignored, with one warning per session.
        expiry_s: Seconds without a request after which a session is dropped; None: never.

    Raises:
        ConfigError: the interface is open to others and there is no token.
    """

    def __init__(
        self,
        server: Generator,
        tokenizer: Tokenizer,
        *,
        parser: str | Callable[[str], ParsedTurn] = "hermes",
        sampling_params: Mapping[str, Any] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        template_kwargs: Mapping[str, Any] | None = None,
        api_token: str | None = None,
        max_body_bytes: int = 64 << 20,
        strict: bool = False,
        expiry_s: float | None = None,
    ) -> None:
        if host not in _LOOPBACK_HOSTS and not api_token:
            raise ConfigError(
                f"host {host!r} is reachable from outside, and any client writes training data; set api_token, "
                "or use 127.0.0.1"
            )
        parse: Callable[[str], ParsedTurn] = load_plugin("parsers", parser) if isinstance(parser, str) else parser
        self._rest = parse, template_kwargs
        self._recorders = {"": Recorder(server, tokenizer, *self._rest)}
        self._host, self._port, self._api_token = host, port, api_token
        self._max_body_bytes, self._strict = max_body_bytes, strict
        self._sessions = Sessions(SamplingParams(**(sampling_params or {})), expiry_s)
        self._runner: web.AppRunner | None = None
        self.url = ""
        """Base URL for clients of OpenAI's API, `/v1` included; set by `start`. Anthropic's leave `/v1` out."""

    def add_policy(self, name: str, server: Generator, tokenizer: Tokenizer) -> None:
        """Serve a policy to requests whose `model` is its name; those that name no model have the default one.

        Raises:
            TemplateError: its chat template cannot continue a conversation.
            ValueError: the name is that of requests that name no model.
        """
        if name == DEFAULT_MODEL:
            raise ValueError(f"a policy cannot be called {name!r}, as requests that name no model; choose another name")
        self._recorders[name] = Recorder(server, tokenizer, *self._rest, policy=name)

    async def start(self) -> str:
        """Bind the endpoint; returns its base URL."""
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._guard])
        for prefix in ("", "/sessions/{session}"):
            app.router.add_post(prefix + "/v1/chat/completions", self._chat)
            app.router.add_post(prefix + "/v1/responses", self._respond)
            app.router.add_post(prefix + "/v1/messages", self._message)
            app.router.add_post(prefix + "/v1/messages/count_tokens", self._count)
            app.router.add_get(prefix + "/v1/models", self._models)
        app.router.add_post("/sessions", self._create)
        app.router.add_post("/sessions/{session}/reward", self._reward)
        app.router.add_post("/sessions/{session}/finish", self._finish)
        app.router.add_get("/sessions/{session}/export", self._export)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=4096)
        await site.start()
        self._port = self._runner.addresses[0][1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http://{host}:{self._port}/v1"
        return self.url

    def api_key(self, session: str) -> str:
        """API key for the client of a session."""
        return f"{self._api_token}:{session}" if self._api_token else session

    async def stop(self) -> None:
        """Close the endpoint. Sessions stay until they are finished."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def create_session(
        self, name: str | None = None, *, sampling_params: Mapping[str, Any] | None = None, has_key: bool = True
    ) -> tuple[str, str]:
        """Create a session; returns its name and its key, which is the API key of its client and opens nothing else.

        Args:
            name: Its name; None: a random one.
            sampling_params: Fields of `SamplingParams` that its requests cannot change: they may ask for fewer tokens.
            has_key: Whether it has a key; without, the key is empty, and callers of the proxy give its name.

        Raises:
            RowError: there is a session of this name.
        """
        session = self._sessions.create(name, sampling_params, has_key=has_key)
        return session.name, session.key or ""

    async def listen(self, path: Path) -> None:
        """Serve at a UNIX socket too, once the endpoint is bound: for clients in a network namespace."""
        assert self._runner is not None, "start binds the endpoint"
        await web.UnixSite(self._runner, path).start()

    @property
    def port(self) -> int:
        """Port of the endpoint; set by `start`."""
        return self._port

    def failure(self, session: str) -> Exception | None:
        """Error of the server that the last answered request of a session ended with."""
        return self._sessions.named(session, may_create=False).failure

    def finish(self, session: str, *, reward: float | None = None) -> list[AgentLoopOutput]:
        """End a session; returns its trajectories, one per leaf of its exchanges, each with the session's reward.

        Tokens that trajectories share are marked as the model's in one of them only. None if nothing was generated.
        A request of the session that is still being answered then fails, and is not recorded.
        """
        return trajectories(self._sessions.pop(session), reward)

    # ---- the endpoint

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Middleware: check the caller's key, and turn errors into JSON."""
        try:
            if (refusal := self._refusal(request)) is not None:
                return _failure(401, "authentication_error", refusal)
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            message = f"the request is larger than max_body_bytes={self._max_body_bytes}"
            return _failure(413, "invalid_request_error", message)
        except web.HTTPException as error:
            return _failure(error.status, "invalid_request_error", f"{request.method} {request.path}: {error.reason}")
        except ConnectionResetError:
            raise  # the client has left
        except _FAILURES as error:
            return _failure(*_status(error), str(error))
        except BaseException as error:  # a tokenizer or a template of others may raise anything
            if not is_foreign(error):
                raise
            _log.warning("a request failed: %s", described(error), exc_info=error)
            return _failure(500, "server_error", described(error))

    def _refusal(self, request: web.Request) -> str | None:
        """Reason for which a caller may not do what it asks for; None if it may."""
        key, name = _key_of(request), request.match_info.get("session")
        is_proxy = not self._api_token or begins_with(key, self._api_token)
        session = self._sessions.with_key(key)
        if session is not None:
            is_model = "/v1/" in request.path and name in (None, session.name)
            return None if is_model else "the key of a session opens the model of this session only"
        return None if is_proxy else "this proxy asks for its api_token as the API key, or for the key of a session"

    def _session_of(self, request: web.Request) -> ProxySession:
        key = _key_of(request)
        if (session := self._sessions.with_key(key)) is not None:
            return session
        if self._api_token:
            key = key[len(self._api_token) :].removeprefix(":")
        name = request.match_info.get("session") or request.headers.get("X-Session-ID") or key
        if not name:
            wanted = "TOKEN:NAME as API key" if self._api_token else "one as API key"
            raise RowError(f"the request names no session; give {wanted}, or in the path: /sessions/NAME/v1")
        session = self._sessions.named(name)
        if session.key is not None and not self._api_token:
            raise RowError(f"session {name!r} has a key of its own; give it as API key")
        return session

    async def _models(self, request: web.Request) -> web.StreamResponse:
        del request
        about = {"object": "model", "created": int(time.time()), "owned_by": "rl-agent"}
        data = [{"id": name, **about} for name in _models_of(self._recorders)]
        return web.json_response({"object": "list", "data": data})

    def _recorder_of(self, call: Call) -> Recorder:
        """Recorder of the policy that a call names.

        Raises:
            RowError: there are several, and none of its name.
        """
        if len(self._recorders) == 1 or call.model == DEFAULT_MODEL:
            return self._recorders[""]
        if call.model not in self._recorders:
            served = ", ".join(_models_of(self._recorders))
            raise RowError(f"model {call.model!r} is not served here; choose one of {served}")
        return self._recorders[call.model]

    # ---- sessions over HTTP

    async def _create(self, request: web.Request) -> web.StreamResponse:
        """`POST /sessions`: `{"session": NAME, "sampling_params": {...}}`, both optional."""
        body = await _fields(request, "session", "sampling_params")
        params = body.get("sampling_params")
        try:
            name, key = self.create_session(body.get("session"), sampling_params=params)
        except TypeError as error:
            raise RowError(f"sampling_params are {params!r:.200}, and not fields of SamplingParams: {error}") from error
        return web.json_response({"session": name, "api_key": key, "base_url": self.url})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        """`POST /sessions/NAME/reward`: `{"reward": NUMBER}`, and perhaps `name`, and one of `turn`, `trajectory`."""
        body = await _fields(request, "reward", "name", "turn", "trajectory")
        if (value := _number(body)) is None:
            raise RowError("the request needs 'reward', a number")
        names = {name: body[name] for name in ("name", "turn", "trajectory") if name in body}
        if wrong := [name for name, given in names.items() if not isinstance(given, str)]:
            raise RowError(f"{wrong[0]} is {names[wrong[0]]!r:.80}; text is needed")
        if "turn" in names and "trajectory" in names:
            raise RowError("a reward is for a turn or for a trajectory; leave one of them out")
        session = self._sessions.named(request.match_info["session"], may_create=False)
        session.recording.reward(Reward(value=value, **names))
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.StreamResponse:
        """`POST /sessions/NAME/finish`: ends the session; `{"reward": NUMBER}` is optional."""
        reward = _number(await _fields(request, "reward"))
        session = self._sessions.named(request.match_info["session"], may_create=False)
        return web.json_response({"trajectories": [asdict(each) for each in self.finish(session.name, reward=reward)]})

    async def _export(self, request: web.Request) -> web.StreamResponse:
        """`GET /sessions/NAME/export`: the trajectories so far; the session goes on."""
        session = self._sessions.named(request.match_info["session"], may_create=False)
        return web.json_response({"trajectories": [asdict(each) for each in trajectories(session.recording, None)]})

    # ---- the model

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, _chat.read, _chat.Writer)

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, _responses.read, _responses.Writer)

    async def _message(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, _messages.read, _messages.Writer)

    async def _count(self, request: web.Request) -> web.StreamResponse:
        session, call = self._session_of(request), _read(_messages.read, await request.read())
        prepared = self._recorder_of(call).prepare(session, call)
        return web.json_response({"input_tokens": len(prepared.requests[0].prompt_token_ids)})

    async def _serve(
        self, request: web.Request, read: Callable[[bytes], Call], make_writer: Callable[[Call], Writer]
    ) -> web.StreamResponse:
        session, call = self._session_of(request), _read(read, await request.read())
        if call.ignored and self._strict:
            raise RowError(f"{', '.join(call.ignored)} not known here; leave it out, or start the proxy without strict")
        session.warn(call.ignored)
        prepared = self._recorder_of(call).prepare(session, call)
        session.num_running += 1
        try:
            return await self._answer(request, call, prepared, make_writer(call))
        finally:
            session.num_running -= 1

    async def _answer(self, request: web.Request, call: Call, prepared: Prepared, writer: Writer) -> web.StreamResponse:
        """Generate and send the answer; a failure after the first event of a stream is an event as well."""
        recorder = self._recorder_of(call)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

        async def show(index: int, text: LiveText, token_ids: Sequence[int]) -> None:
            new = text.push(token_ids)
            if call.is_streaming and not stream.prepared:  # no event before the server has accepted the request
                await stream.prepare(request)
                await _send(stream, writer.start(len(prepared.requests[0].prompt_token_ids)))
            if call.is_streaming and (events := list(writer.delta(*new, index))):
                await _send(stream, events)

        with _Heard(request, prepared, writer.id) as heard:
            try:
                made = await recorder.generate(call, prepared, show)
                await heard.check_caller()
                if not self._sessions.has(prepared.session):
                    name = prepared.session.name
                    raise RowError(f"session {name!r} was finished while this request was answered; it is not recorded")
                answers = recorder.record(call, prepared, made, writer)
                prepared.session.failure = None
                if not call.is_streaming:
                    response = web.json_response(writer.whole(answers))
                    await response.prepare(request)
                    await response.write_eof()
                    return response
                rest = (
                    writer.delta(
                        answer.turn.reasoning[len(text.reasoning) :], answer.turn.content[len(text.content) :], i
                    )
                    for i, (answer, (text, _)) in enumerate(zip(answers, made, strict=True))
                )
                await _send(stream, [*(event for events in rest for event in events), *writer.end(answers)])
            except ConnectionResetError:
                raise  # the client has left
            except _FAILURES as error:
                status, kind = _status(error)
                if status >= 500:
                    prepared.session.failure = error
                if not stream.prepared:
                    raise
                message = {"type": kind, "message": str(error), "code": status}
                await _send(stream, [{**message, "type": "error", "error": message}])
            await stream.write_eof(writer.last_line)
        return stream


class _Heard:
    """Caller of a request: if it leaves before the answer is sent, the session notes it and the answer is dropped."""

    def __init__(self, request: web.Request, prepared: Prepared, response_id: str) -> None:
        self._request, self._session, self._response_id = request, prepared.session, response_id

    async def check_caller(self) -> None:
        """Check that the caller is still connected, by its socket.

        Raises:
            ConnectionResetError: it has left.
        """
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        if self._request.transport is None or self._request.transport.is_closing():
            raise ConnectionResetError("the client has left")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (ConnectionResetError, asyncio.CancelledError)):
            self._session.recording.abandon(self._response_id)
            _log.info("session %r: a caller left before its answer", self._session.name)


def _models_of(recorders: Iterable[str]) -> list[str]:
    """Names of the models that requests may name."""
    return [name for name in recorders if name] or [DEFAULT_MODEL]


def _read(read: Callable[[bytes], Call], body: bytes) -> Call:
    try:
        call = read(body)
        return replace(call, messages=well_formed(call.messages), tools=well_formed(call.tools))
    except RowError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RowError(f"the request is not of the format of this endpoint: {type(error).__name__}: {error}") from error


async def _fields(request: web.Request, *names: str) -> dict[str, Any]:
    body, unknown = read_body(await request.read() or b"{}", known=names, refused={})
    if unknown:
        raise RowError(f"{unknown[0]} is not known here; the fields are: {', '.join(names)}")
    return body


def _number(body: Mapping[str, Any]) -> float | None:
    """Reward of a request.

    Raises:
        RowError: it is no finite number.
    """
    value = body.get("reward")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RowError(f"reward is {value!r:.80}; a finite number is needed")
    if abs(value) > LARGEST_REWARD:
        raise RowError(f"reward is {value}; a number of at most {LARGEST_REWARD:g} is needed")
    return float(value)


def _key_of(request: web.Request) -> str:
    """API key of a client, in the header of either API."""
    shown = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    return shown or request.headers.get("x-api-key", "").strip()


def _failure(status: int, kind: str, message: str) -> web.Response:
    """Error in the formats of both APIs."""
    error = {"type": kind, "message": message, "code": status}
    return web.json_response({"type": "error", "error": error}, status=status)


def _status(error: Exception) -> tuple[int, str]:
    if isinstance(error, (RowError, RequestError, UnsupportedError, RecursionError)):
        return 400, "invalid_request_error"
    return 500 if isinstance(error, AgentError) else 503, "server_error"


async def _send(response: web.StreamResponse, events: Iterable[Mapping[str, Any]]) -> None:
    """Write events to the stream; those of responses and messages have names."""
    lines = (
        (f"event: {event['type']}\n" if "type" in event else "") + f"data: {json.dumps(event)}\n\n" for event in events
    )
    await response.write("".join(lines).encode())
