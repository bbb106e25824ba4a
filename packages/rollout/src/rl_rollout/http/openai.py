"""OpenAI-compatible endpoints: `/v1/models`, `/v1/completions`, `/v1/chat/completions`, whole or streamed.

Tools need a parser (option `tool_parser`); a turn that may call them is sent whole, in a stream too. Beyond OpenAI's
fields: `top_k`, `stop_token_ids`, `ignore_eos`; `return_token_ids`, which adds `token_ids` to every choice and
`prompt_token_ids`; and, for completions, `prompt_logprobs` (0), in the format of vLLM. With `n` above 1 and a seed,
choice i is drawn with seed + i. A field that is not honoured is refused.
Format: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web

from rl_rollout.errors import RequestError, UnsupportedError
from rl_rollout.http import messages as wire
from rl_rollout.http.text import LazyTokenizer, TextStream, check_tools, plain_messages, read_calls
from rl_rollout.types import FinishReason, GenerateRequest, SamplingParams, structure_of
from rl_rollout.validation import TOOL_PARSERS, check_count, find_plugin

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from rl_rollout.base import RolloutServer
    from rl_rollout.types import ServerConfig, TokenOutput


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's `stream_options`."""

    include_usage: bool = False


class _Common(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of both endpoints; null means the default."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    seed: int | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Any = None
    echo: Any = None
    best_of: Any = None
    suffix: Any = None
    response_format: Any = None
    structured_outputs: Any = None


class CompletionMessage(_Common, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/completions`."""

    prompt: str | list[int | str | tuple[int, ...]] | None = None
    """Text, token ids, or a list of either."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class ChatCompletionMessage(_Common, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/chat/completions`."""

    messages: list[Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
"""OpenAI's fields that are not supported, with the values at which they are accepted since they change nothing."""

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("ignore_eos", "seed"),
)
"""Fields of `SamplingParams` that a request may set."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Parsed HTTP request of either endpoint."""

    is_chat: bool
    prompts: tuple[tuple[int, ...], ...]
    """Token ids of P prompts."""
    params: SamplingParams
    num_choices: int
    """Completions per prompt."""
    is_streaming: bool
    includes_usage: bool
    """Whether the last event of the stream has token counts."""
    stops: tuple[str, ...]
    has_logprobs: bool
    num_top_logprobs: int
    """Number of top log-probs per token."""
    returns_token_ids: bool
    returns_prompt_logprobs: bool
    images: tuple[str, ...] = ()
    """Data URLs of the prompt's images; there is one prompt then."""
    may_call_tools: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Piece of one choice: a chunk of a stream, or the whole."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: str | None = None
    prompt_logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    tool_calls: tuple[dict[str, Any], ...] = ()


class OpenAIRoutes:
    """OpenAI-compatible endpoints of a `RolloutServer`."""

    def __init__(self, server: RolloutServer, config: ServerConfig, *, model_name: str) -> None:
        self._server = server
        self._model_name = model_name
        self._names = {model_name, config.model_path}
        self._config = config
        self._tokenizer = LazyTokenizer(config.model_path)
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="rl-rollout-tokenizer")
        """Thread for tokenising, so that a long text delays other texts and nothing else."""
        self._created = int(time.time())
        parser = config.options.get("tool_parser")
        self._parse_calls = None if parser is None else find_plugin(TOOL_PARSERS, parser, "tool parser").load()

    def routes(self) -> list[web.RouteDef]:
        """Routes for the application."""
        return [
            web.get("/v1/models", self._models),
            web.post("/v1/completions", self._completions),
            web.post("/v1/chat/completions", self._chat_completions),
        ]

    def close(self) -> None:
        """End the tokenizer's thread. Idempotent."""
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    @property
    def _max_model_len(self) -> int:
        """Context length of the server, tokens; known after its start."""
        return getattr(self._server, "max_model_len", self._config.max_model_len)

    async def _tokenized(self, encode: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, encode, *given)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        del request
        model = {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "rl-rollout",
            "max_model_len": self._max_model_len,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        message = await self._read(request, CompletionMessage)
        if "prompt" not in message:
            raise RequestError("the request has no field 'prompt'")
        prompt = message["prompt"]
        is_ids = isinstance(prompt, list) and all(isinstance(each, int) for each in prompt)
        given: list[str | Sequence[int]] = prompt if isinstance(prompt, list) and not is_ids else [prompt]
        if any(isinstance(each, int) for each in given):
            raise RequestError("prompt must be a text, a list of token ids (integers), or a list of these")
        check_count(len(given) * max(message.get("n", 1), 1), self._config)
        prompts = await self._tokenized(lambda: tuple(map(self._prompt, given)))
        return await self._answer(request, self._call(message, prompts, is_chat=False, default_tokens=16))

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        message = await self._read(request, ChatCompletionMessage)
        messages, images = plain_messages(message.get("messages"))
        if images and not self._server.capabilities.takes_images:
            raise UnsupportedError("the model that is served here takes no images; leave the image_url parts out")
        tools = self._tools(message)
        prompts = (await self._tokenized(self._tokenizer.encode_chat, messages, tools, self._max_model_len),)
        call = self._call(message, prompts, is_chat=True, default_tokens=self._max_model_len)
        return await self._answer(request, replace(call, images=images, may_call_tools=bool(tools)))

    def _tools(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Validated tools that a request offers to the model."""
        choice = message.get("tool_choice", "auto")
        if choice not in ("auto", "none"):
            raise RequestError(f"tool_choice={choice!r} is not supported by this server; it must be 'auto' or 'none'")
        tools = [] if choice == "none" else check_tools(message.get("tools", []))
        if tools and not message.get("parallel_tool_calls", True):
            raise RequestError("parallel_tool_calls=false is not supported by this server; leave it out")
        if tools and message.get("stop"):
            raise RequestError("tools go without stop strings; leave one of them out")
        if tools and self._parse_calls is None:
            raise UnsupportedError(
                "this server has no parser for the calls that its model writes; start it with the option "
                "tool_parser=NAME (rl-agent brings hermes, llama, mistral and others)"
            )
        return tools

    # ---- parsing

    async def _read(self, request: web.Request, kind: type[_Common]) -> dict[str, Any]:
        """Fields of a request that are not null, validated."""
        found = wire.read_body(await request.read(), kind, request.path)
        message = {name: value for name in kind.__struct_fields__ if (value := getattr(found, name)) is not None}
        for name in NEUTRAL.keys() & message.keys():
            if (value := message.pop(name)) not in NEUTRAL[name]:
                raise RequestError(f"{name}={value!r} is not supported by this server; leave it out")
        if message.get("model", self._model_name) not in self._names:
            raise RequestError(f"model {message['model']!r} is not served here; this server has {self._model_name!r}")
        return message

    def _prompt(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        return self._tokenizer.encode(prompt, self._max_model_len) if isinstance(prompt, str) else tuple(prompt)

    def _call(
        self, message: dict[str, Any], prompts: tuple[tuple[int, ...], ...], *, is_chat: bool, default_tokens: int
    ) -> Call:
        stop = message.get("stop", [])
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stops:
            raise RequestError("stop strings must not be empty")
        if len(stops) > self._config.max_stops:
            raise RequestError(
                f"there are {len(stops)} stop strings, and max_stops={self._config.max_stops}; give fewer"
            )
        num_choices = message.get("n", 1)
        if num_choices < 1:
            raise RequestError(f"n={num_choices} must be at least 1")
        check_count(len(prompts) * num_choices, self._config)
        if "prompt_logprobs" in message and (message["prompt_logprobs"] or message.get("stream") or stops):
            raise RequestError("prompt_logprobs must be 0 (the prompt's own tokens), and goes without stream and stop")
        asked = message.get("logprobs", False)
        num_top_logprobs = message.get("top_logprobs", 0) if is_chat else int(asked)
        if num_top_logprobs and (message.get("stream") or stops):
            raise RequestError("alternatives (top_logprobs, or logprobs above 0) go without stream and stop")
        if num_top_logprobs and asked is False:
            raise RequestError("top_logprobs needs logprobs=true")
        if "stream_options" in message and not message.get("stream"):
            raise RequestError("stream_options go with stream=true")
        if "max_tokens" in message and "max_completion_tokens" in message:
            raise RequestError("max_tokens and max_completion_tokens are one setting; leave one of them out")
        limit = message.get("max_completion_tokens", message.get("max_tokens", default_tokens))
        if limit > max(self._max_model_len, default_tokens):
            raise RequestError(
                f"max_tokens={limit} is above max_model_len={self._max_model_len}, which prompt and completion share"
            )
        known = {name: message[name] for name in _SAMPLING if name in message}
        known |= structure_of(message.get("response_format"), message.get("structured_outputs"))
        return Call(
            is_chat=is_chat,
            prompts=prompts,
            params=SamplingParams(
                max_new_tokens=limit,
                stop_token_ids=message.get("stop_token_ids", ()),
                **known,
            ),
            num_choices=num_choices,
            is_streaming=message.get("stream", False),
            includes_usage=message.get("stream_options", StreamOptions()).include_usage,
            stops=stops,
            has_logprobs=asked is not False,
            num_top_logprobs=num_top_logprobs,
            returns_token_ids=message.get("return_token_ids", False),
            returns_prompt_logprobs="prompt_logprobs" in message,
        )

    # ---- generating

    async def _answer(self, request: web.Request, call: Call) -> web.StreamResponse:
        if call.is_streaming:
            return await self._stream(request, call)
        num_choices = len(call.prompts) * call.num_choices
        choices = await asyncio.gather(*(self._collect(call, index) for index in range(num_choices)))
        body = self._envelope(call, [self._choice(call, index, each) for index, each in enumerate(choices)])
        body["usage"] = _usage(call, sum(len(each.token_ids) for each in choices))
        return web.json_response(body)

    async def _collect(self, call: Call, index: int) -> Piece:
        pieces = [piece async for piece in self._pieces(call, index)]
        return Piece(
            text="".join(piece.text for piece in pieces),
            token_ids=tuple(i for piece in pieces for i in piece.token_ids),
            logprobs=tuple(x for piece in pieces for x in piece.logprobs),
            finish_reason=pieces[-1].finish_reason,
            prompt_logprobs=pieces[-1].prompt_logprobs,
            top_logprobs=pieces[-1].top_logprobs,
            tool_calls=pieces[-1].tool_calls,
        )

    async def _pieces(self, call: Call, index: int) -> AsyncIterator[Piece]:
        """Pieces of one choice: one, unless it is streamed or has stop strings."""
        request = self._request(call, index)
        text = TextStream(self._tokenizer.get(), call.stops)
        if call.may_call_tools or not (call.is_streaming or call.stops):
            yield self._whole(call, text, await self._server.generate(request))
            return
        async with aclosing(self._server.generate_stream(request)) as chunks:
            async for chunk in chunks:
                new_text = text.push(chunk.token_ids) if chunk.token_ids else ""
                reason = None
                if chunk.finish_reason is not None:
                    new_text += text.finish(drop_last=chunk.finish_reason is FinishReason.STOP)
                    reason = str(chunk.finish_reason)
                if text.is_stopped:
                    reason = "stop"
                yield Piece(text=new_text, token_ids=chunk.token_ids, logprobs=chunk.logprobs, finish_reason=reason)
                if text.is_stopped:
                    return

    def _whole(self, call: Call, text: TextStream, output: TokenOutput) -> Piece:
        is_stop = output.finish_reason is FinishReason.STOP
        full_text = text.push(output.token_ids) + text.finish(drop_last=is_stop)
        reason, calls = str(output.finish_reason), ()
        if call.may_call_tools and self._parse_calls is not None:
            written = output.token_ids[:-1] if is_stop else output.token_ids
            content, calls = read_calls(self._parse_calls, self._tokenizer.get().decode(written))
            if calls:
                full_text = content
                reason = "tool_calls" if is_stop else reason
        return Piece(
            text=full_text,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            finish_reason=reason,
            prompt_logprobs=output.prompt_logprobs,
            top_logprobs=output.top_logprobs,
            tool_calls=calls,
        )

    def _request(self, call: Call, index: int) -> GenerateRequest:
        prompt_index, choice_index = divmod(index, call.num_choices)
        params = call.params
        if params.seed is not None:
            params = replace(params, seed=params.seed + choice_index)
        return GenerateRequest(
            request_id=f"{call.id}-{index}",
            prompt_token_ids=call.prompts[prompt_index],
            sampling_params=params,
            num_top_logprobs=call.num_top_logprobs,
            returns_prompt_logprobs=call.returns_prompt_logprobs,
            images=call.images,
        )

    async def _stream(self, request: web.Request, call: Call) -> web.StreamResponse:
        """Server-sent events: a chunk per piece of any choice, then `[DONE]`."""
        queue: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()
        num_left = len(call.prompts) * call.num_choices
        tasks = [asyncio.create_task(self._feed(call, index, queue)) for index in range(num_left)]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        num_tokens = 0
        try:
            index, piece = await queue.get()
            if isinstance(piece, Exception):
                raise piece  # before the first token: an error response with its HTTP status
            await response.prepare(request)
            while not isinstance(piece, Exception):
                num_tokens += len(piece.token_ids)
                await _send(response, self._envelope(call, [self._choice(call, index, piece)]))
                num_left -= piece.finish_reason is not None
                if not num_left:
                    break
                index, piece = await queue.get()
            else:
                await response.write(b"data: " + wire.error_to_body(piece) + b"\n\n")
            if call.includes_usage:
                await _send(response, {**self._envelope(call, []), "usage": _usage(call, num_tokens)})
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        finally:
            for task in tasks:
                task.cancel()
        return response

    async def _feed(self, call: Call, index: int, queue: asyncio.Queue[tuple[int, Piece | Exception]]) -> None:
        try:
            async for piece in self._pieces(call, index):
                queue.put_nowait((index, piece))
        except Exception as error:  # noqa: BLE001  sent as an event of the stream
            queue.put_nowait((index, error))

    # ---- formatting

    def _envelope(self, call: Call, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion" if call.is_chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if call.is_chat else 'cmpl'}-{call.id}",
            "object": f"{kind}.chunk" if call.is_chat and call.is_streaming else kind,
            "created": call.created,
            "model": self._model_name,
            "choices": list(choices),
        }

    def _choice(self, call: Call, index: int, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": piece.finish_reason, "logprobs": None}
        if call.is_chat:
            said: dict[str, Any] = {"role": "assistant", "content": piece.text}
            if piece.tool_calls:
                said["content"] = piece.text or None
                numbered = ({"index": index, **each} for index, each in enumerate(piece.tool_calls))
                said["tool_calls"] = list(numbered if call.is_streaming else piece.tool_calls)
            choice["delta" if call.is_streaming else "message"] = said
        else:
            choice["text"] = piece.text
        if call.has_logprobs:
            choice["logprobs"] = self._logprobs(call, piece)
        if call.returns_token_ids:
            choice["token_ids"] = piece.token_ids
            choice["prompt_token_ids"] = call.prompts[index // call.num_choices]
        if call.returns_prompt_logprobs:
            scored = zip(call.prompts[index // call.num_choices][1:], piece.prompt_logprobs, strict=True)
            choice["prompt_logprobs"] = [None, *({str(token): {"logprob": logprob}} for token, logprob in scored)]
        return choice

    def _logprobs(self, call: Call, piece: Piece) -> dict[str, Any]:
        """Log-probs of the sampled tokens and of the alternatives, in OpenAI's format."""
        decode = self._tokenizer.get().decode
        tokens = [decode([i]) for i in piece.token_ids]
        tops = [[(decode([i]), logprob) for i, logprob in top] for top in piece.top_logprobs]
        if not call.is_chat:
            top_logprobs = [dict(top) for top in tops] if call.num_top_logprobs else None
            return {"tokens": tokens, "token_logprobs": piece.logprobs, "top_logprobs": top_logprobs, "text_offset": []}
        content = [
            {**_token(token, logprob), "top_logprobs": [_token(*each) for each in top]}
            for token, logprob, top in zip(tokens, piece.logprobs, tops or [[]] * len(tokens), strict=True)
        ]
        return {"content": content}


def _token(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def _usage(call: Call, num_completion_tokens: int) -> dict[str, int]:
    num_prompt_tokens = sum(map(len, call.prompts))
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
