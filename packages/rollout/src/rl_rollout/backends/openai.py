"""OpenAI backend: any OpenAI-compatible URL, for evaluation, judges and distillation teachers. Not for training.

`ServerConfig.model_path` is the name of the model at the URL. Token ids go in and out where the server supports
`return_token_ids` (vLLM does, and every server of this package); `start` finds out its capabilities. Log-probs are the
server's, and NaN where temperature, top-k or top-p leave their distribution unknown; weight versions are -1, as they
are unknown too. Text goes through `chat` and `complete`.
"""

from __future__ import annotations

import asyncio
import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import openai

from rl_rollout.base import RolloutServer
from rl_rollout.errors import (
    ConfigError,
    GenerationError,
    RequestError,
    RequestTimeoutError,
    RolloutError,
    ServerLostError,
    ServerStartError,
    UnsupportedError,
)
from rl_rollout.http.body import AnswerBody
from rl_rollout.http.endpoint import Endpoint
from rl_rollout.registry import check_options, check_unused
from rl_rollout.types import Capabilities, FinishReason, SamplingParams, ServerAddress, TokenOutput
from rl_rollout.validation import as_logprob, check_answer, check_extras, check_limits, check_request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rl_rollout.types import GenerateRequest, ServerConfig

OPTIONS = {
    "url": "base URL of the API, e.g. http://127.0.0.1:8000/v1",
    "api_key_variable": "environment variable that holds the key; OPENAI_API_KEY",
    "max_retries": "how often a call that was refused for load or lost is repeated; 2",
    "tokenizer": "a Hugging Face folder, for text at this server's own endpoint",
}
UNKNOWN_VERSION = -1
"""Weight version of tokens of a server whose weights are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOutput:
    """Result of `chat` and `complete`."""

    text: str
    """Text of the completion."""
    finish_reason: str
    """Finish reason as the server reports it: stop, length, content_filter, ..."""
    num_prompt_tokens: int
    """Number of prompt tokens, by the server's count."""
    num_completion_tokens: int
    """Number of completion tokens, by the server's count."""


def create_server(config: ServerConfig) -> OpenAIServer:
    """Client of the URL, with its own HTTP endpoint."""
    return OpenAIServer(config)


class OpenAIServer(RolloutServer):
    """Rollout server over an OpenAI-compatible URL: it generates, but cannot be paused or updated."""

    def __init__(self, config: ServerConfig) -> None:
        check_options(config.options, OPTIONS, "openai")
        foreign = (
            "max_num_seqs",
            "seed",
            "num_threads",
            "device",
            "dtype",
            "kv_cache_bytes",
            "parallel",
            "quantization",
        )
        check_unused(config, foreign, "the model at a URL is started outside of this run, which has this setting")
        url = config.options.get("url")
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ConfigError(f"backend 'openai' needs the option url, e.g. http://127.0.0.1:8000/v1; it is {url!r}")
        variable = config.options.get("api_key_variable", "OPENAI_API_KEY")
        self.config = config
        self.url = url.rstrip("/")
        self._client = openai.AsyncOpenAI(
            base_url=self.url,
            api_key=os.environ.get(variable) or "none",
            max_retries=config.options.get("max_retries", 2),
            timeout=config.timeout_s,
            http_client=openai.DefaultAsyncHttpxClient(event_hooks={"response": [_bound]}),
        )
        local = replace(config, model_path=config.options.get("tokenizer", config.model_path))
        self._endpoint = Endpoint(self, local, model_name=config.model_path)
        self._address: ServerAddress | None = None
        self._is_stopped = False
        self._takes_ids = self._scores = False
        self._max_model_len = config.max_model_len
        self._in_flight: dict[str, asyncio.Event] = {}

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities that `start` has found out."""
        return Capabilities(
            takes_token_ids=self._takes_ids,
            has_logprobs=False,
            updates_weights=False,
            pauses=False,
            sleep_levels=(),
            gives_top_logprobs=False,
            gives_prompt_logprobs=self._scores,
        )

    async def start(self) -> ServerAddress:
        """Check that the URL serves the model, and find out its capabilities. Idempotent.

        Raises:
            ServerStartError: nobody answers, the key is refused, or it has no such model.
        """
        if self._address is not None:
            return self._address
        if self._is_stopped:
            raise ServerLostError("this server was stopped; create another")
        try:
            await self._look()
            url = await self._endpoint.start()
        except BaseException:
            await self.stop()
            raise
        self._address = ServerAddress(url=url, model=self.config.model_path, pid=os.getpid())
        return self._address

    async def _look(self) -> None:
        """Probe the URL's capabilities."""
        try:
            models = {model.id: model async for model in self._client.models.list()}
        except (openai.OpenAIError, *_MALFORMED) as error:
            raise ServerStartError(f"{self.url} does not list its models: {error.__cause__ or error}") from error
        if self.config.model_path not in models:
            some = ", ".join(sorted(models)[:10])
            raise ServerStartError(f"{self.url} has no model {self.config.model_path!r}; it has: {some}")
        max_model_len = getattr(models[self.config.model_path], "max_model_len", None)
        if max_model_len is not None and (type(max_model_len) is not int or max_model_len < 1):
            raise ServerStartError(f"{self.url} says max_model_len={max_model_len!r:.40}; a number of tokens is needed")
        self._max_model_len = min(self.config.max_model_len, max_model_len or self.config.max_model_len)
        self._takes_ids = await self._gives("token_ids", return_token_ids=True)
        self._scores = self._takes_ids and await self._gives("prompt_logprobs", prompt_logprobs=0)

    async def _gives(self, field: str, **asked: Any) -> bool:
        """Request one token; returns whether the response has a field."""
        try:
            answer = await self._client.completions.create(
                model=self.config.model_path, prompt=[[1, 1]], max_tokens=1, extra_body=asked
            )
            return getattr(answer.choices[0], field, None) is not None
        except (openai.BadRequestError, openai.NotFoundError, openai.UnprocessableEntityError):
            return False
        except (openai.OpenAIError, *_MALFORMED) as error:
            why = error.__cause__ or error
            raise ServerStartError(f"{self.url} did not complete a prompt of two tokens: {why}") from error

    async def stop(self) -> None:
        """Close the connections and the endpoint; the URL's server keeps running. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        await self.abort()
        await self._endpoint.stop()
        await self._client.close()

    # ---- token ids

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """See `RolloutServer.generate`.

        Raises:
            UnsupportedError: the server takes no token ids, or does not give them back.
        """
        self._check(request)
        aborted = self._in_flight[request.request_id] = asyncio.Event()
        gathered = Gathered(request)
        timeout_s = request.timeout_s or self.config.timeout_s
        work = asyncio.ensure_future(self._gather(request, gathered))
        waiting = asyncio.ensure_future(aborted.wait())
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait((work, waiting), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
            output = gathered.output(is_aborted=not work.done())
            check_answer(request, output, self.url)
            return output
        except TimeoutError as error:
            if isinstance(error, RolloutError):
                raise
            if gathered.token_ids:
                return replace(gathered.output(is_aborted=True), finish_reason=FinishReason.TIMEOUT)
            raise RequestTimeoutError(
                f"request {request.request_id!r} got no token within {timeout_s} s on {self.url}; raise timeout_s"
            ) from error
        finally:
            work.cancel()
            waiting.cancel()
            del self._in_flight[request.request_id]

    def _check(self, request: GenerateRequest) -> None:
        self._need_running()
        if not self._takes_ids:
            raise UnsupportedError(
                f"{self.url} does not give token ids, so that nothing of it can be trained on; "
                "use chat or complete, for text"
            )
        check_request(request, vocab_size=2**31, max_model_len=self._max_model_len)
        check_limits(request, self.config)
        check_extras(request, self.capabilities)
        if request.request_id in self._in_flight:
            raise RequestError(f"request id {request.request_id!r} is in flight already")

    async def _gather(self, request: GenerateRequest, gathered: Gathered) -> None:
        params = request.sampling_params
        extras: dict[str, Any] = {"return_token_ids": True}
        if params.top_k:
            extras["top_k"] = params.top_k
        shaping = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
        extras |= {name: value for name in shaping if (value := getattr(params, name)) != shaping[name]}
        if params.stop_token_ids:
            extras["stop_token_ids"] = list(params.stop_token_ids)
        if params.ignore_eos:
            extras["ignore_eos"] = True
        if request.returns_prompt_logprobs:
            extras["prompt_logprobs"] = 0
        room = self._max_model_len - len(request.prompt_token_ids)
        settings: dict[str, Any] = {
            "model": self.config.model_path,
            "prompt": [list(request.prompt_token_ids)],
            "max_tokens": min(params.max_new_tokens, room),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "logprobs": 0,
            "extra_body": extras,
            **({} if params.seed is None else {"seed": params.seed}),
        }
        try:
            if request.returns_prompt_logprobs:  # nobody streams these
                answer = await self._client.completions.create(**settings)
                gathered.add(answer.choices[0])
                return
            async for event in await self._client.completions.create(**settings, stream=True):
                if event.choices:
                    gathered.add(event.choices[0])
        except (openai.OpenAIError, *_MALFORMED) as error:
            raise self._translated(error) from error

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Abort these requests (None: all): they return the tokens so far, and their connections are closed."""
        for request_id in list(self._in_flight) if request_ids is None else request_ids:
            if request_id in self._in_flight:
                self._in_flight[request_id].set()

    # ---- text

    async def chat(self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None) -> TextOutput:
        """Chat completion of a conversation in OpenAI's format.

        Raises:
            RequestError, ServerLostError, RequestTimeoutError, GenerationError: see their names.
        """
        return await self._text(self._client.chat.completions, messages=list(messages), params=params)

    async def complete(self, text: str, params: SamplingParams | None = None) -> TextOutput:
        """Completion of a text."""
        return await self._text(self._client.completions, prompt=text, params=params)

    async def _text(self, resource: Any, *, params: SamplingParams | None, **asked: Any) -> TextOutput:
        self._need_running()
        chosen = params or SamplingParams()
        settings: dict[str, Any] = {"temperature": chosen.temperature, "top_p": chosen.top_p}
        if chosen.seed is not None:
            settings["seed"] = chosen.seed
        if chosen.top_k or chosen.stop_token_ids or chosen.ignore_eos:
            raise UnsupportedError("top_k, stop_token_ids and ignore_eos are not for text; leave them out")
        try:
            answer = await resource.create(
                model=self.config.model_path, max_tokens=chosen.max_new_tokens, **settings, **asked
            )
            choice = answer.choices[0]
            text = choice.message.content or "" if hasattr(choice, "message") else choice.text
            if not isinstance(text, str):
                raise TypeError(f"the text is {text!r:.100}")
            return TextOutput(
                text=text,
                finish_reason=str(choice.finish_reason),
                num_prompt_tokens=answer.usage.prompt_tokens if answer.usage else 0,
                num_completion_tokens=answer.usage.completion_tokens if answer.usage else 0,
            )
        except (openai.OpenAIError, *_MALFORMED) as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> RolloutError:
        """Convert an error response of OpenAI's format, or an answer that is none."""
        if isinstance(error, RolloutError):
            return error
        if isinstance(error.__cause__, RolloutError):  # of `_bound`: the client wraps it
            return error.__cause__
        if not isinstance(error, openai.OpenAIError):
            return GenerationError(
                f"{self.url} sent an answer that is not an OpenAI completion: {type(error).__name__}: {error}"
            )
        what = f"{self.url}: {error}"
        if isinstance(error, openai.APITimeoutError):
            return RequestTimeoutError(f"{self.url} did not answer within {self.config.timeout_s} s")
        if isinstance(error, openai.APIStatusError):
            if error.status_code in (429, 502, 503):
                return ServerLostError(what)
            return RequestError(what) if error.status_code < 500 else GenerationError(what)
        return ServerLostError(what) if isinstance(error, openai.APIConnectionError) else GenerationError(what)

    # ---- what it is not for

    async def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Not supported.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"the model at {self.url} is not ours to control; train with the backend embedded, vllm or sglang"
        )

    pause = resume = update_weights = sleep = wake = _refuse

    def _need_running(self) -> None:
        if self._address is None or self._is_stopped:
            raise ServerLostError(f"the client of {self.url} is not running; call start()")


_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, RecursionError, GenerationError)
"""Exceptions of answers that are not what was asked for; the client takes any JSON for its own types."""


async def _bound(response: Any) -> None:
    """Bound the body of an answer, decompressed too."""
    is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
    body = AnswerBody(response.headers.pop("content-encoding", None), url=str(response.url), is_stream=is_stream)
    response.stream = _bounded(response.stream, body)


def _bounded(stream: Any, body: AnswerBody) -> Any:
    """Stream of the client's own kind (of httpx or its successor), whose pieces `body` reads."""
    base: Any = next(kind for kind in type(stream).__mro__ if kind.__name__ == "AsyncByteStream")

    class Bounded(base):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for piece in stream:
                yield body.feed(piece)

        async def aclose(self) -> None:
            await stream.aclose()

    return Bounded()


class Gathered:
    """Tokens of one request received so far."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_logprobs: tuple[float, ...] = ()
        self.finish_reason: str | None = None
        self._is_finite = True

    def add(self, choice: Any) -> None:
        """Append a chunk of the stream, or the whole response."""
        ids = list(getattr(choice, "token_ids", None) or ())
        if len(self.token_ids) + len(ids) > self.request.sampling_params.max_new_tokens:
            raise ValueError(f"more than {self.request.sampling_params.max_new_tokens} tokens, as were asked for")
        logprobs = [as_logprob(value) for value in choice.logprobs.token_logprobs or ()] if choice.logprobs else []
        self._is_finite &= all(map(math.isfinite, logprobs))
        if len(logprobs) != len(ids):
            raise ValueError(f"{len(logprobs)} log-probs of {len(ids)} tokens")
        self.token_ids += ids
        self.logprobs += logprobs
        self.finish_reason = choice.finish_reason or self.finish_reason
        if self.request.returns_prompt_logprobs:
            rows = zip(choice.prompt_logprobs[1:], self.request.prompt_token_ids[1:], strict=True)
            self.prompt_logprobs = tuple(as_logprob(row[str(token)]["logprob"]) for row, token in rows)
            self._is_finite &= all(map(math.isfinite, self.prompt_logprobs))

    def output(self, *, is_aborted: bool) -> TokenOutput:
        """Output of the request.

        Raises:
            GenerationError: the server ended it for a reason of its own, or for none; or it reported log-probs that are
                no numbers.
        """
        if not self._is_finite:
            raise GenerationError(f"request {self.request.request_id!r}: the model's logits are not finite")
        params = self.request.sampling_params
        is_plain = params.temperature in (0, 1) and params.top_p == 1 and params.top_k == 0 and not params.shapes_logits
        count = len(self.token_ids)
        if not is_aborted and self.finish_reason not in ("stop", "length", "abort"):
            raise GenerationError(
                f"request {self.request.request_id!r}: the server ended it with {self.finish_reason!r}, and not with "
                "stop or length"
            )
        return TokenOutput(
            request_id=self.request.request_id,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs) if is_plain else (float("nan"),) * count,
            weight_versions=(UNKNOWN_VERSION,) * count,
            finish_reason=FinishReason.ABORT if is_aborted else FinishReason(str(self.finish_reason)),
            prompt_logprobs=self.prompt_logprobs,
        )
