"""HTTP endpoint of the recording proxy: finds a request's session, generates the answer, and records the exchange.

A framework needs no change but its base URL and its API key, which names the session. Where a request goes on with an
earlier one of its session, its prompt is the earlier ids with the new messages appended, so what the model emitted is
never re-tokenised; a request that goes on with none starts a trajectory of its own.

A request whose client leaves (it timed out, say, and asks again) is ended at the server, counted as `num_abandoned` in
the metrics of the session's trajectories, and is part of none of them: nobody has acted on its answer.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

from aiohttp import web

from rl_agent.base import StreamingGenerator
from rl_agent.chat_template import TurnTemplate, special_tokens
from rl_agent.errors import AgentError, RowError, described, is_foreign
from rl_agent.proxy import chat_completions as _chat
from rl_agent.proxy import responses as _responses
from rl_agent.proxy.recording import Exchange, Recording, find_parent, message_key, trajectories
from rl_agent.proxy.requests import Answer, new_call_id
from rl_agent.registry import load_plugin
from rl_agent.text import parse_turn
from rl_agent.types import ParsedTurn, well_formed
from rl_rollout.errors import ConfigError, RequestError, RolloutError
from rl_rollout.types import FinishReason, GenerateRequest, SamplingParams, TokenChunk, TokenOutput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence

    from rl_agent.base import Generator
    from rl_agent.proxy.requests import Call, Writer
    from rl_agent.types import AgentLoopOutput, Tokenizer


_FAILURES = (AgentError, RolloutError, ConnectionError, TimeoutError, RecursionError)
"""Exceptions that are sent to the client as an error of its request."""

_TURNS = 3
"""Turns of the event loop from the end of a connection to the end of its handler: read, close, cancel."""

_LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """Call that is ready to be generated."""

    recording: Recording
    """Session of the call."""
    parent: int | None
    """Index of the exchange that it continues."""
    conversation: tuple[Any, ...]
    """Keys of all its messages."""
    tools: str
    """Tools, as JSON."""
    request: GenerateRequest
    """Request for the rollout server."""


class RecordingProxy:
    """Recording proxy: serves `/v1/chat/completions` and `/v1/responses`, and records every exchange.

    A session's name is in the path (`/sessions/NAME/v1`), in the header `X-Session-ID`, or the bearer token. With an
    `api_token`, the API key is that token, and the session's name stands in the path or follows it: `TOKEN:NAME`, as
    `api_key` gives it. A field that is not honoured is refused. A streamed answer is passed on token by token where the
    server is a `StreamingGenerator`, up to where a call of a tool may start; the call itself comes in one piece.

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
    ) -> None:
        if host not in _LOOPBACK_HOSTS and not api_token:
            raise ConfigError(
                f"host {host!r} is reachable from outside, and any client writes training data; set api_token, "
                "or use 127.0.0.1"
            )
        self._server = server
        self._tokenizer = tokenizer
        self._parse: Callable[[str], ParsedTurn] = load_plugin("parsers", parser) if isinstance(parser, str) else parser
        self._params = SamplingParams(**(sampling_params or {}))
        self._host, self._port, self._api_token = host, port, api_token
        self._max_body_bytes = max_body_bytes
        self._template_kwargs = template_kwargs
        self._templates: dict[str, TurnTemplate] = {"[]": TurnTemplate(tokenizer, template_kwargs=template_kwargs)}
        self._sessions: dict[str, Recording] = {}
        self._runner: web.AppRunner | None = None
        self.url = ""
        """Base URL for clients, `/v1` included; set by `start`."""

    async def start(self) -> str:
        """Bind the endpoint; returns its base URL."""
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._guard])
        for prefix in ("", "/sessions/{session}"):
            app.router.add_post(prefix + "/v1/chat/completions", self._chat)
            app.router.add_post(prefix + "/v1/responses", self._respond)
            app.router.add_get(prefix + "/v1/models", self._models)
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

    def finish(self, session: str, *, reward: float | None = None) -> list[AgentLoopOutput]:
        """End a session; returns its trajectories, one per leaf of its exchanges, each with the session's reward.

        Tokens that trajectories share are marked as the model's in one of them only. None if nothing was generated.
        A request of the session that is still being answered then is told so, and is not recorded.
        """
        return trajectories(self._sessions.pop(session, Recording()), reward)

    # ---- the endpoint

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Middleware: check the token, and turn errors into JSON."""
        if self._api_token and not _begins_with(_key_of(request), self._api_token):
            return _failure(401, "authentication_error", "this proxy asks for its api_token as the API key")
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            message = f"the request is larger than max_body_bytes={self._max_body_bytes}"
            return _failure(413, "invalid_request_error", message)
        except web.HTTPException as error:
            return _failure(error.status, "invalid_request_error", f"{request.method} {request.path}: {error.reason}")
        except ConnectionResetError:
            raise  # the client has left
        except BaseException as error:  # a tokenizer or a template of others may raise anything
            if not is_foreign(error):
                raise
            _log.warning("a request failed: %s", described(error), exc_info=error)
            return _failure(500, "server_error", described(error))

    def _session_of(self, request: web.Request) -> str:
        key = _key_of(request)
        if self._api_token:
            key = key[len(self._api_token) :].removeprefix(":")
        name = request.match_info.get("session") or request.headers.get("X-Session-ID") or key
        if not name:
            wanted = "TOKEN:NAME as API key" if self._api_token else "one as API key"
            raise RowError(f"the request names no session; give {wanted}, or in the path: /sessions/NAME/v1")
        return name

    async def _models(self, request: web.Request) -> web.StreamResponse:
        del request
        model = {"id": "policy", "object": "model", "created": int(time.time()), "owned_by": "rl-agent"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, _chat.read, _chat.Writer)

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, _responses.read, _responses.Writer)

    async def _serve(
        self,
        request: web.Request,
        read: Callable[[bytes], Call],
        make_writer: Callable[[Call], Writer],
    ) -> web.StreamResponse:
        try:
            session = self._session_of(request)
            call = _read(read, await request.read())
            prepared = self._prepare(session, call)
            writer = make_writer(call)
            if call.is_streaming:
                return await self._stream(request, call, session, prepared, writer)
            return await self._whole(request, session, prepared, writer)
        except _FAILURES as error:
            return _failure(*_status(error), str(error))

    async def _whole(
        self, request: web.Request, session: str, prepared: _Prepared, writer: Writer
    ) -> web.StreamResponse:
        text = self._live_text(prepared)
        with _Heard(request, prepared) as heard:
            output = await self._server.generate(prepared.request)
            text.push(output.token_ids)
            await heard.check_caller()
            heard.answer = self._record(session, prepared, output, text, writer)
            response = web.json_response(writer.whole(heard.answer))
            await response.prepare(request)
            await response.write_eof()
        return response

    async def _stream(
        self,
        request: web.Request,
        call: Call,
        session: str,
        prepared: _Prepared,
        writer: Writer,
    ) -> web.StreamResponse:
        """Stream the answer as server-sent events. A failure after the first is an event as well."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        text, chunks = self._live_text(prepared), list[TokenChunk]()
        with _Heard(request, prepared) as heard:
            try:
                async with aclosing(self._chunks(prepared.request)) as stream:
                    async for chunk in stream:
                        if not chunks:  # no event before the server has accepted the request
                            await response.prepare(request)
                            await _send(response, writer.start())
                        chunks.append(chunk)
                        if events := list(writer.delta(*text.push(chunk.token_ids))):
                            await _send(response, events)
                output = _joined(prepared.request, chunks)
                await heard.check_caller()
                heard.answer = answer = self._record(session, prepared, output, text, writer)
                thought, content = (
                    answer.turn.reasoning[len(text.reasoning) :],
                    answer.turn.content[len(text.content) :],
                )
                await _send(response, [*writer.delta(thought, content), *writer.end(answer)])
            except ConnectionResetError:
                raise  # the client has left
            except _FAILURES as error:
                if not response.prepared:
                    raise
                status, kind = _status(error)
                message = {"type": kind, "message": str(error), "code": status}
                await _send(response, [{"type": "error", "error": message, **message}])
            await response.write_eof(writer.last_line)
        return response

    # ---- the model

    def _prepare(self, session: str, call: Call) -> _Prepared:
        """Prepare a call: its prompt is that of the exchange that it continues, with the new messages appended."""
        tools = json.dumps(call.tools, sort_keys=True)
        if tools not in self._templates:
            self._templates[tools] = TurnTemplate(self._tokenizer, json.loads(tools), self._template_kwargs)
        template, recording = self._templates[tools], self._sessions.setdefault(session, Recording())
        exchanges = recording.exchanges
        conversation = tuple(message_key(each) for each in call.messages)
        parent, num_known = find_parent(exchanges, conversation, tools, call.previous)
        messages, num_escaped = template.escaped(call.messages[num_known:])
        recording.num_escaped += num_escaped
        spans: tuple[tuple[int, int], ...] = ()
        if parent is None:
            prompt = template.prompt(messages)
        else:
            before = exchanges[parent]
            added = template.continuation(
                messages,
                last_token_id=before.output.token_ids[-1],
                is_stopped=before.output.finish_reason is FinishReason.STOP,
            )
            prompt = (*before.prompt_token_ids, *before.output.token_ids, *added)
            spans = before.sampled_spans
            conversation = (*before.conversation, *conversation[num_known:])
        request = GenerateRequest(
            request_id=uuid4().hex,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                **{name: getattr(self._params, name) for name in SamplingParams.__slots__} | dict(call.sampling)
            ),
            session_id=session,
            sampled_spans=spans,
        )
        return _Prepared(recording=recording, parent=parent, conversation=conversation, tools=tools, request=request)

    async def _chunks(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Generate the answer in chunks; one chunk if the server cannot stream."""
        if isinstance(self._server, StreamingGenerator):
            async with aclosing(self._server.generate_stream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        output = await self._server.generate(request)
        yield TokenChunk(
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            weight_versions=output.weight_versions,
            finish_reason=output.finish_reason,
        )

    def _live_text(self, prepared: _Prepared) -> LiveText:
        prompt_end = self._tokenizer.decode(prepared.request.prompt_token_ids[-16:], skip_special_tokens=False)
        marks = getattr(self._parse, "opened_by", None)
        return LiveText(self._tokenizer, marks, is_thinking=opens_thinking(prompt_end))

    def _record(
        self,
        session: str,
        prepared: _Prepared,
        output: TokenOutput,
        text: LiveText,
        writer: Writer,
    ) -> Answer:
        """Parse and record the turn; text that was streamed already stays as it is."""
        if not output.token_ids:
            raise ConnectionError(f"the generation ended with reason {output.finish_reason.value!r} before a token")
        if self._sessions.get(session) is not prepared.recording:
            raise RowError(f"session {session!r} was finished while this request was answered; it is not recorded")
        is_stopped = output.finish_reason is FinishReason.STOP
        raw = self._tokenizer.decode(output.token_ids[: -1 if is_stopped else None], skip_special_tokens=False)
        turn = parse_turn(self._parse, raw)
        is_other = not (turn.content.startswith(text.content) and turn.reasoning.startswith(text.reasoning))
        if is_other or any(
            call.error for call in turn.calls
        ):  # frameworks do not know malformed calls: they get the text
            turn = ParsedTurn(content=text.rest(raw), reasoning=text.reasoning)
        calls = [{"function": {"name": call.name, "arguments": dict(call.arguments)}} for call in turn.calls]
        key = message_key({"role": "assistant", "content": turn.content, "tool_calls": calls})
        prompt = prepared.request.prompt_token_ids
        exchange = Exchange(
            parent=prepared.parent,
            prompt_token_ids=prompt,
            sampled_spans=(*prepared.request.sampled_spans, (len(prompt), len(prompt) + len(output.token_ids))),
            output=output,
            conversation=(*prepared.conversation, key),
            tools=prepared.tools,
            text=self._tokenizer.decode(output.token_ids, skip_special_tokens=True),
            response_id=writer.id,
        )
        prepared.recording.exchanges.append(exchange)
        return Answer(exchange=exchange, turn=turn, call_ids=tuple(new_call_id() for _ in turn.calls))


class _Heard:
    """Caller of a request: if it leaves before the answer is sent, the session notes it and the answer is dropped."""

    def __init__(self, request: web.Request, prepared: _Prepared) -> None:
        self._request = request
        self._prepared = prepared
        self.answer: Answer | None = None
        """Recorded exchange, once there is one."""

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
            self._prepared.recording.abandon(None if self.answer is None else self.answer.exchange)
            _log.info("session %r: a caller left before its answer", self._prepared.request.session_id)


def _read(read: Callable[[bytes], Call], body: bytes) -> Call:
    try:
        call = read(body)
        return replace(call, messages=well_formed(call.messages), tools=well_formed(call.tools))
    except RowError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RowError(f"the request is not of the format of this endpoint: {type(error).__name__}: {error}") from error


def _key_of(request: web.Request) -> str:
    """API key of a client."""
    return request.headers.get("Authorization", "").removeprefix("Bearer ").strip()


def _begins_with(key: str, token: str) -> bool:
    """Whether a key is the token, or the token, a colon and a name; compared in constant time."""
    shown, wanted = key.encode(errors="surrogateescape"), token.encode()
    return hmac.compare_digest(shown[: len(wanted)], wanted) and shown[len(wanted) :][:1] in (b"", b":")


def _failure(status: int, kind: str, message: str) -> web.Response:
    return web.json_response({"error": {"type": kind, "message": message, "code": status}}, status=status)


def _status(error: Exception) -> tuple[int, str]:
    if isinstance(error, (RowError, RequestError, RecursionError)):
        return 400, "invalid_request_error"
    return 500 if isinstance(error, AgentError) else 503, "server_error"


async def _send(response: web.StreamResponse, events: Iterable[Mapping[str, Any]]) -> None:
    """Write events to the stream; those of the responses endpoint have names."""
    lines = (
        (f"event: {event['type']}\n" if "type" in event else "") + f"data: {json.dumps(event)}\n\n" for event in events
    )
    await response.write("".join(lines).encode())


def _joined(request: GenerateRequest, chunks: list[TokenChunk]) -> TokenOutput:
    if not chunks or chunks[-1].finish_reason is None:
        raise ConnectionError(f"the stream of request {request.request_id!r} ended without a reason")
    return TokenOutput.joined(request.request_id, chunks)


_OPEN, _CLOSE = "<think>", "</think>"


class LiveText:
    """Splits a turn's streamed tokens into reasoning and content, as soon as the text can no longer change.

    Where a call may start, nothing more is shown until the turn has ended and can be parsed.

    Args:
        tokenizer: Tokenizer of the served model.
        marks: Marks that calls start with, and `<think>` where the parser knows reasoning (see `opened_by`); None: they
            are unknown, and nothing is shown before the end.
        is_thinking: Whether the prompt has opened the reasoning.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Sequence[str] | None, *, is_thinking: bool) -> None:
        self._tokenizer = tokenizer
        self._marks = None if marks is None else (*marks, _CLOSE, *special_tokens(tokenizer))
        self._knows_thinking = marks is not None and _OPEN in marks
        self._is_thinking = is_thinking
        self._ids: list[int] = []
        self._start, self._end = 0, 0
        self._text = ""
        self.reasoning, self.content = "", ""
        """Text that was returned so far."""

    def push(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """Append tokens; returns the new reasoning and the new content."""
        self._ids += token_ids
        self._text += self._decoded()
        if self._marks is None:
            return "", ""
        thought, rest = self._split(self._text)
        is_closed = bool(thought) and _CLOSE in self._text
        reasoning, content = _certain(thought, self._marks, is_whole=is_closed), _certain(rest, self._marks)
        new = reasoning[len(self.reasoning) :], content[len(self.content) :]
        self.reasoning, self.content = reasoning, content
        return new

    def rest(self, text: str) -> str:
        """Whole turn without its reasoning, calls included."""
        return self._split(text)[1].rstrip()

    def _split(self, text: str) -> tuple[str, str]:
        text = text.lstrip()
        if not self._knows_thinking or not (self._is_thinking or text.startswith(_OPEN)):
            return "", text
        thought, _, rest = text.removeprefix(_OPEN).partition(_CLOSE)
        return thought.strip(), rest.lstrip()

    def _decoded(self) -> str:
        """Text of the new ids, decoded after earlier ones: some tokenizers decode a first token differently."""
        before = self._tokenizer.decode(self._ids[self._start : self._end], skip_special_tokens=False)
        after = self._tokenizer.decode(self._ids[self._start :], skip_special_tokens=False)
        if after.endswith("�"):  # an incomplete character
            return ""
        self._start, self._end = self._end, len(self._ids)
        return after[len(before) :]


def opens_thinking(prompt_end: str) -> bool:
    """Whether a prompt ends inside the reasoning, as the templates of some models do."""
    return prompt_end.rfind(_OPEN) > prompt_end.rfind(_CLOSE)


def _certain(text: str, marks: Sequence[str], *, is_whole: bool = False) -> str:
    """Text before a mark, or before what may be the start of one; trailing space is left out."""
    ends = [len(text)]
    for mark in marks:
        found = text.find(mark)
        if found >= 0:
            ends.append(found)
        if not is_whole:
            ends += [len(text) - n for n in range(1, len(mark)) if text.endswith(mark[:n])]
    return text[: min(ends)].rstrip()
