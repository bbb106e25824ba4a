"""The endpoint: finds the session of a request, lets the model answer it, and records what was said.

A framework needs no change but its base URL and its API key, which names the session. Where a request goes on with an
earlier one of its session, its prompt is the earlier ids with the new messages appended, so what the model emitted is
never re-tokenised; a request that goes on with none starts a trajectory of its own.
"""

from __future__ import annotations

import json
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from aiohttp import ClientConnectionResetError, web

from rl_agent._registry import load_plugin
from rl_agent._template import TurnTemplate
from rl_agent.base import StreamingGenerator
from rl_agent.errors import AgentError, RowError
from rl_agent.proxy import _chat, _responses
from rl_agent.proxy._call import Answer, new_call_id
from rl_agent.proxy._recording import Exchange, find_parent, message_key, trajectories
from rl_agent.proxy._text import LiveText, opens_thinking
from rl_agent.types import ParsedTurn
from rl_rollout.errors import RequestError, RolloutError
from rl_rollout.types import FinishReason, GenerateRequest, SamplingParams, TokenChunk, TokenOutput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Mapping

    from rl_agent.base import Generator
    from rl_agent.proxy._call import Call, Writer
    from rl_agent.types import AgentLoopOutput, Tokenizer

_FAILURES = (AgentError, RolloutError, ConnectionError, TimeoutError)
"""What a request may fail on; the client is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A call that can be generated."""

    exchanges: list[Exchange]
    """Of its session."""
    parent: int | None
    """Which of them it goes on with."""
    conversation: tuple[Any, ...]
    """Keys of all of its messages."""
    tools: str
    """Its tools, as JSON."""
    request: GenerateRequest
    """For the server."""


class RecordingProxy:
    """Serves `/v1/chat/completions` and `/v1/responses`, whole or streamed, with tools, and records every exchange.

    A session's name is the bearer token (a client's API key), or stands in the path: `/sessions/NAME/v1`. A field that
    is not honoured is refused. A streamed answer is passed on token by token where the server is a
    `StreamingGenerator`, up to where a call of a tool may start; the call itself comes in one piece.

    Args:
        server: What generates.
        tokenizer: Of the model that is served.
        parser: How the model writes tool calls; see `ToolLoop`.
        sampling_params: Fields of `SamplingParams`, for what requests leave open.
        host: Interface to bind; there is no authentication, so leave it on loopback or a private network.
        port: 0 picks a free one.
        template_kwargs: Further variables of the chat template.
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
    ) -> None:
        self._server = server
        self._tokenizer = tokenizer
        self._parse: Callable[[str], ParsedTurn] = load_plugin("parsers", parser) if isinstance(parser, str) else parser
        self._params = SamplingParams(**(sampling_params or {}))
        self._host, self._port = host, port
        self._template_kwargs = template_kwargs
        self._templates: dict[str, TurnTemplate] = {"[]": TurnTemplate(tokenizer, template_kwargs=template_kwargs)}
        self._sessions: dict[str, list[Exchange]] = {}
        self._runner: web.AppRunner | None = None
        self.url = ""
        """Base URL for clients, `/v1` included; set by `start`."""

    async def start(self) -> str:
        """Bind the endpoint and return its base URL."""
        app = web.Application(client_max_size=64 << 20)
        for prefix in ("", "/sessions/{session}"):
            app.router.add_post(prefix + "/v1/chat/completions", self._chat)
            app.router.add_post(prefix + "/v1/responses", self._respond)
            app.router.add_get(prefix + "/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=4096)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://{self._host}:{self._port}/v1"
        return self.url

    async def stop(self) -> None:
        """Close the endpoint. Sessions stay until they are finished."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def finish(self, session: str, *, reward: float | None = None) -> list[AgentLoopOutput]:
        """End a session: its trajectories, one per leaf of the tree of its exchanges, each with the session's reward.

        Tokens that trajectories share are marked as the model's in one of them only. None if nothing was generated.
        A request of the session that is still being answered then is told so, and is not recorded.
        """
        return trajectories(self._sessions.pop(session, []), reward)

    # ---- the endpoint

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
            session = _session_of(request)
            call = _read(read, await request.read())
            prepared = self._prepare(session, call)
            writer = make_writer(call)
            if call.is_streaming:
                return await self._stream(request, call, session, prepared, writer)
            answer = await self._whole(session, prepared, writer)
        except _FAILURES as error:
            status, kind = _status(error)
            return web.json_response({"error": {"type": kind, "message": str(error), "code": status}}, status=status)
        return web.json_response(writer.whole(answer))

    async def _whole(self, session: str, prepared: _Prepared, writer: Writer) -> Answer:
        output = await self._server.generate(prepared.request)
        text = self._live_text(prepared)
        text.push(output.token_ids)
        return self._record(session, prepared, output, text, writer)

    async def _stream(
        self,
        request: web.Request,
        call: Call,
        session: str,
        prepared: _Prepared,
        writer: Writer,
    ) -> web.StreamResponse:
        """Server-sent events. A failure after the first of them is an event as well."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        text, chunks = self._live_text(prepared), list[TokenChunk]()
        try:
            async with aclosing(self._chunks(prepared.request)) as stream:
                async for chunk in stream:
                    if not chunks:  # nothing is said before the server has taken the request
                        await response.prepare(request)
                        await _send(response, writer.start())
                    chunks.append(chunk)
                    if events := list(writer.delta(*text.push(chunk.token_ids))):
                        await _send(response, events)
            output = _joined(prepared.request, chunks)
            answer = self._record(session, prepared, output, text, writer)
            reasoning, content = answer.turn.reasoning[len(text.reasoning) :], answer.turn.content[len(text.content) :]
            await _send(response, [*writer.delta(reasoning, content), *writer.end(answer)])
        except ClientConnectionResetError:
            return response  # the client has left; the generation was ended, and what it did not see is not recorded
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
        """The ids to go on from: those of the exchange that the call extends, with what is new appended."""
        messages = list(call.messages)
        tools = json.dumps(call.tools, sort_keys=True)
        if tools not in self._templates:
            self._templates[tools] = TurnTemplate(self._tokenizer, json.loads(tools), self._template_kwargs)
        template, exchanges = self._templates[tools], self._sessions.setdefault(session, [])
        conversation = tuple(message_key(each) for each in messages)
        parent, num_known = find_parent(exchanges, conversation, tools, call.previous)
        spans: tuple[tuple[int, int], ...] = ()
        if parent is None:
            prompt = template.prompt(messages)
        else:
            before = exchanges[parent]
            added = template.continuation(
                messages[num_known:],
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
        return _Prepared(exchanges=exchanges, parent=parent, conversation=conversation, tools=tools, request=request)

    async def _chunks(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """The answer as it is generated, or in one piece where the server cannot stream."""
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
        """Take the turn apart and keep it. What was shown of it already stands."""
        if not output.token_ids:
            raise ConnectionError(f"the generation ended with reason {output.finish_reason.value!r} before a token")
        if self._sessions.get(session) is not prepared.exchanges:
            raise RowError(f"session {session!r} was finished while this request was answered; it is not recorded")
        is_stopped = output.finish_reason is FinishReason.STOP
        raw = self._tokenizer.decode(output.token_ids[: -1 if is_stopped else None], skip_special_tokens=False)
        turn = self._parse(raw)
        is_other = not (turn.content.startswith(text.content) and turn.reasoning.startswith(text.reasoning))
        if is_other or any(call.error for call in turn.calls):  # a framework knows no broken calls: it sees the text
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
        prepared.exchanges.append(exchange)
        return Answer(exchange=exchange, turn=turn, call_ids=tuple(new_call_id() for _ in turn.calls))


def _read(read: Callable[[bytes], Call], body: bytes) -> Call:
    try:
        return read(body)
    except RowError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RowError(f"the request is not of the format of this endpoint: {type(error).__name__}: {error}") from error


def _session_of(request: web.Request) -> str:
    name = request.match_info.get("session") or request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    if not name:
        raise RowError("the request names no session; give one as API key, or in the path: /sessions/NAME/v1")
    return name


def _status(error: Exception) -> tuple[int, str]:
    if isinstance(error, (RowError, RequestError)):
        return 400, "invalid_request_error"
    return 500 if isinstance(error, AgentError) else 503, "server_error"


async def _send(response: web.StreamResponse, events: Iterable[Mapping[str, Any]]) -> None:
    """Write events at once; the responses endpoint's have names."""
    lines = (
        (f"event: {event['type']}\n" if "type" in event else "") + f"data: {json.dumps(event)}\n\n" for event in events
    )
    await response.write("".join(lines).encode())


def _joined(request: GenerateRequest, chunks: list[TokenChunk]) -> TokenOutput:
    if not chunks or chunks[-1].finish_reason is None:
        raise ConnectionError(f"the stream of request {request.request_id!r} ended without a reason")
    return TokenOutput(
        request_id=request.request_id,
        token_ids=tuple(i for chunk in chunks for i in chunk.token_ids),
        logprobs=tuple(i for chunk in chunks for i in chunk.logprobs),
        weight_versions=tuple(i for chunk in chunks for i in chunk.weight_versions),
        finish_reason=chunks[-1].finish_reason,
    )
