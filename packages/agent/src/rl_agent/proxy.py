"""An OpenAI-compatible endpoint that records what any agent framework does with it, as trainable tokens.

A framework needs no change but its base URL and its API key, which names the session. Where a request goes on with an
earlier one of its session, its prompt is the earlier ids with the new messages appended, so what the model emitted is
never re-tokenised; a request that goes on with none starts a trajectory of its own.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from aiohttp import web

from rl_agent._recording import Exchange, longest_match, message_key, plain_message, trajectories
from rl_agent._registry import load_plugin
from rl_agent._template import TurnTemplate
from rl_agent.errors import AgentError, RowError
from rl_rollout.errors import RequestError, RolloutError
from rl_rollout.types import FinishReason, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rl_agent.base import Generator
    from rl_agent.types import AgentLoopOutput, ParsedTurn, Tokenizer

_SAMPLING = {"temperature": (int, float), "top_p": (int, float), "seed": (int,)}
_HONOURED = {
    *_SAMPLING,
    "messages",
    "model",
    "tools",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
}
_WITHOUT_EFFECT = {"user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([], ""),
    "store": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tool_choice": ("auto",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
}
"""Fields that are accepted at the value that changes nothing."""


class RecordingProxy:
    """Serves `/v1/chat/completions`, whole or streamed, with tools, and records every exchange by session.

    A session's name is the bearer token (a client's API key), or stands in the path: `/sessions/NAME/v1`. A field that
    is not honoured is refused. Answers are streamed once they are whole. Format:
    https://platform.openai.com/docs/api-reference/chat.

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
            app.router.add_get(prefix + "/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
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
        """
        return trajectories(self._sessions.pop(session, []), reward)

    # ---- the endpoint

    async def _models(self, request: web.Request) -> web.StreamResponse:
        del request
        model = {"id": "policy", "object": "model", "created": int(time.time()), "owned_by": "rl-agent"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            session = _session_of(request)
            body = _checked(await request.read())
            exchange, turn = await self._exchange(session, body)
        except (RowError, RequestError) as error:
            return _error(400, "invalid_request_error", error)
        except (RolloutError, ConnectionError, TimeoutError) as error:
            return _error(503, "server_error", error)
        except AgentError as error:
            return _error(500, "server_error", error)
        message, reason = _answer(exchange, turn)
        envelope = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": body.get("model", "policy")}
        num_prompt, num_completion = len(exchange.prompt_token_ids), len(exchange.output.token_ids)
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        }
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
            return web.json_response({**envelope, "object": "chat.completion", "choices": [choice], "usage": usage})
        has_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return await _stream(request, envelope, message, reason, usage if has_usage else None)

    async def _exchange(self, session: str, body: Mapping[str, Any]) -> tuple[Exchange, ParsedTurn]:
        messages = [plain_message(each) for each in body["messages"]]
        tools = json.dumps(body.get("tools") or [], sort_keys=True)
        if tools not in self._templates:
            schemas = json.loads(tools)
            self._templates[tools] = TurnTemplate(self._tokenizer, schemas, self._template_kwargs)
        template, exchanges = self._templates[tools], self._sessions.setdefault(session, [])
        conversation = tuple(message_key(each) for each in messages)
        parent = longest_match(exchanges, conversation, tools)
        if parent is None:
            prompt = template.prompt(messages)
        else:
            before = exchanges[parent]
            added = template.continuation(
                messages[len(before.conversation) :],
                last_token_id=before.output.token_ids[-1],
                is_stopped=before.output.finish_reason is FinishReason.STOP,
            )
            prompt = (*before.prompt_token_ids, *before.output.token_ids, *added)
        output = await self._server.generate(
            GenerateRequest(
                request_id=uuid4().hex,
                prompt_token_ids=prompt,
                sampling_params=self._sampling(body),
                session_id=session,
            )
        )
        if not output.token_ids:
            raise ConnectionError(f"the generation ended with reason {output.finish_reason.value!r} before a token")
        is_stopped = output.finish_reason is FinishReason.STOP
        raw = self._tokenizer.decode(output.token_ids[: -1 if is_stopped else None], skip_special_tokens=False)
        turn = self._parse(raw)
        if any(call.error for call in turn.calls):  # a framework knows no broken calls: it sees the text
            turn = type(turn)(content=raw.strip(), calls=())
        text = self._tokenizer.decode(output.token_ids, skip_special_tokens=True)
        calls = [{"function": {"name": call.name, "arguments": dict(call.arguments)}} for call in turn.calls]
        key = message_key({"role": "assistant", "content": turn.content, "tool_calls": calls})
        exchange = Exchange(
            parent=parent,
            prompt_token_ids=prompt,
            output=output,
            conversation=(*conversation, key),
            tools=tools,
            text=text,
        )
        exchanges.append(exchange)
        return exchange, turn

    def _sampling(self, body: Mapping[str, Any]) -> SamplingParams:
        given = {name: body[name] for name in _SAMPLING if name in body}
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        if limit is not None:
            given["max_new_tokens"] = limit
        fields = {name: getattr(self._params, name) for name in SamplingParams.__slots__}
        return SamplingParams(**{**fields, **given})


def _session_of(request: web.Request) -> str:
    name = request.match_info.get("session") or request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    if not name:
        raise RowError("the request names no session; give one as API key, or in the path: /sessions/NAME/v1")
    return name


def _checked(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise RowError(f"the request is not JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("messages"), list) or not found["messages"]:
        raise RowError("the request needs 'messages', a list of at least one message")
    body = {name: value for name, value in found.items() if value is not None}
    for name, value in body.items():
        if name in _HONOURED or name in _WITHOUT_EFFECT or value in _NEUTRAL.get(name, ()):
            continue
        raise RowError(f"{name}={value!r} is not supported here; leave it out")
    for name, types in (*_SAMPLING.items(), ("max_tokens", (int,)), ("max_completion_tokens", (int,))):
        if name in body and (not isinstance(body[name], types) or isinstance(body[name], bool)):
            raise RowError(f"{name} is {body[name]!r}; a number is needed")
    return body


def _answer(exchange: Exchange, turn: ParsedTurn) -> tuple[dict[str, Any], str]:
    """The assistant's message, and why it ended."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.content or (None if turn.calls else "")}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": uuid4().hex[:9],  # nine letters and digits: some chat templates accept no other
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in turn.calls
        ]
    reason = "length" if exchange.output.finish_reason is not FinishReason.STOP else "stop"
    return message, "tool_calls" if turn.calls and reason == "stop" else reason


async def _stream(
    request: web.Request,
    envelope: Mapping[str, Any],
    message: Mapping[str, Any],
    reason: str,
    usage: Mapping[str, int] | None,
) -> web.StreamResponse:
    """Server-sent events: what is said, each call, the reason, `[DONE]`."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": message["content"]}]
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls", ())
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(calls)]
    choices: list[list[dict[str, Any]]] = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
    choices.append([{"index": 0, "delta": {}, "finish_reason": reason}])
    events: list[dict[str, Any]] = [{"choices": each} for each in choices]
    if usage is not None:
        events.append({"choices": [], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for event in events:
        line = json.dumps({**envelope, "object": "chat.completion.chunk", **event})
        await response.write(f"data: {line}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _error(status: int, kind: str, error: Exception) -> web.Response:
    return web.json_response({"error": {"type": kind, "message": str(error), "code": status}}, status=status)
