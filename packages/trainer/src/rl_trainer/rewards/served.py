"""Rewards by models that are served somewhere: judges that write, and classifiers that give a number.

Asked by aiohttp and not by the `openai` client: a classifier's endpoint is not OpenAI's, an answer without a score has
to be asked for again as well, and each attempt has to pass the rate limit, which the client's own retries go past. The
limit is ours and not aiolimiter's: that lets 39 requests through in one second of a limit of 20 (measured, 1.3.0),
refuses an amount above the limit, and takes no correction once the server has reported how many tokens there were.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import time
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import aiohttp

from rl_trainer.errors import RewardError
from rl_trainer.rewards.process_pool import FunctionPool
from rl_trainer.runtime.network import server_token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_rollout.types import ServerAddress
    from rl_trainer.config.schema import RewardPart

_CHARACTERS_PER_TOKEN = 4
"""A guess, until the server's answer has the count."""
_OWN_SCORE_AT = "data.0.data.0"
"""Path of the score in an answer of `rl-serve --task score`."""
_MOST_BYTES, _MOST_TOKENS = 1 << 24, 1 << 24
"""Bytes of an answer that are read, decompressed, and tokens that a server may say it took."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 30.0
_PLACE = re.compile(r"\{(prompt|completion|ground_truth)\}")


class _NoScoreError(Exception):
    """Error of an answer without a score: the request is retried, after the pause that the server asks for."""

    def __init__(self, message: str, pause_s: float = 0.0) -> None:
        super().__init__(message)
        self.pause_s = pause_s


class ServedReward:
    """Served reward: asks a judge or a classifier for the score of a completion.

    `kind=judge` asks an OpenAI-compatible server in words (`POST url/chat/completions`) and reads the number that
    `pattern` finds last in what it writes, or that `parser` gives. `kind=classifier` gives the conversation, or the
    filled `prompt`, to `POST url` as vLLM's `/classify` and `/pooling` take it, and reads the number at `score_at` of
    the JSON answer.

    Of a model that the run serves, each request goes to the replica with the fewest in flight. Each of the
    `num_sharing` processes keeps its part of the limits. Functions run in `num_processes` processes each.
    """

    def __init__(
        self, name: str, part: RewardPart, *, num_sharing: int = 1, timeout_s: float = 60.0, num_processes: int = 1
    ) -> None:
        self._name, self._part, self._timeout_s = name, part, timeout_s
        self._served = None if part.model is None or isinstance(part.model, str) else part.model
        self._model = None if self._served else part.model
        self._loads = Counter[str]()
        """Requests in flight by endpoint."""
        if part.url is not None:
            self._loads[part.url.rstrip("/") + "/chat/completions" if part.kind == "judge" else part.url] = 0
        self._score_at = _OWN_SCORE_AT if self._served else part.score_at
        make = partial(FunctionPool, num_processes=num_processes, timeout_s=timeout_s)
        self._prompt = None if (path := part.prompt_function) is None else make(path, gives="prompt")
        self._parser = None if part.parser is None else make(part.parser, gives="score")
        self._pattern = re.compile(part.pattern)
        self._running = asyncio.Semaphore(max(part.max_concurrent // num_sharing, 1))
        self._limit = RateLimit(
            requests_per_minute=part.requests_per_minute / num_sharing,
            tokens_per_minute=part.tokens_per_minute / num_sharing,
        )
        self._session: aiohttp.ClientSession | None = None

    def use(self, addresses: Sequence[ServerAddress]) -> None:
        """Set the replicas of the model that the run serves."""
        path = "/v1/chat/completions" if self._part.kind == "judge" else "/pooling"
        self._loads = Counter({(url := f"{each.url}{path}"): self._loads[url] for each in addresses})
        self._model = addresses[0].model if self._part.kind == "judge" else None

    async def start(self) -> None:
        """Load the functions.

        Raises:
            RewardError: one cannot be loaded.
        """
        for pool in (self._prompt, self._parser):
            if pool is not None:
                await pool.start()

    async def call(self, text: str, row: Mapping[str, Any]) -> float:
        """Score a completion.

        Raises:
            RewardError: none came in `max_attempts` attempts, or the server refuses the request.
        """
        if self._served is not None and not self._loads:
            task = " --task score" if self._part.kind == "classifier" else ""
            raise RewardError(
                f"reward {self._name!r} is of a model that rl-train serves; serve it here (rl-serve {self._served.path}"
                f"{task}), and give its url"
            )
        body = await self._body(text, row)
        url = ""
        num_tokens = len(str(body)) / _CHARACTERS_PER_TOKEN + (
            self._part.max_tokens if self._part.kind == "judge" else 0
        )
        async with self._running:
            pause_s, asked_s, last = _FIRST_PAUSE_S, 0.0, ""
            for attempt in range(self._part.max_attempts):
                if attempt:
                    await asyncio.sleep(max(pause_s, asked_s))
                    pause_s, asked_s = min(2 * pause_s, _LAST_PAUSE_S), 0.0
                await self._limit.wait(num_tokens)
                url = min(self._loads, key=self._loads.__getitem__)
                self._loads[url] += 1
                try:
                    async with asyncio.timeout(self._timeout_s):
                        answer = await self._post(url, body)
                    self._count(answer, num_tokens)
                    return await self._read(answer, row)
                except TimeoutError:
                    last = f"no answer within {self._timeout_s:g} s"
                except (aiohttp.ClientError, _NoScoreError) as error:
                    last = str(error) or type(error).__name__
                    asked_s = error.pause_s if isinstance(error, _NoScoreError) else 0.0
                finally:
                    if url in self._loads:
                        self._loads[url] -= 1
        raise RewardError(
            f"reward {self._name!r} got no score from {url} in {self._part.max_attempts} attempts; the last: {last}"
        )

    async def close(self) -> None:
        """Close the connections, and end the functions' processes. Idempotent."""
        for pool in (self._prompt, self._parser):
            if pool is not None:
                await pool.close()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(self, url: str, body: Mapping[str, Any]) -> Any:
        if self._session is None:
            key = server_token() if self._served else os.environ.get(self._part.api_key_env or "")
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            self._session = aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0))
        async with self._session.post(url, json=body) as response:
            said = (await self._body_of(response)).decode(errors="replace")
            if response.status == 429 or response.status >= 500:
                raise _NoScoreError(f"HTTP {response.status}: {said[:300]}", _asked_pause_s(response))
            if response.status >= 400:
                raise RewardError(
                    f"reward {self._name!r}: {url} refuses the request, HTTP {response.status}: {said[:300]}"
                )
            try:
                return json.loads(said)
            except (ValueError, RecursionError):
                raise _NoScoreError(f"the answer is not JSON: {said[:300]}") from None

    async def _body_of(self, response: aiohttp.ClientResponse) -> bytes:
        """Body of an answer, decompressed piece by piece: a megabyte of gzip may hold a gigabyte."""
        body = bytearray()
        async for piece in response.content.iter_any():
            body += piece
            if len(body) > _MOST_BYTES:
                raise _NoScoreError(f"{response.url} sent more than {_MOST_BYTES} bytes in one answer")
        return bytes(body)

    async def _body(self, text: str, row: Mapping[str, Any]) -> dict[str, Any]:
        part = self._part
        model = {"model": self._model} if self._model is not None else {}
        if part.prompt is None:
            return {**model, "messages": [*row["prompt"], {"role": "assistant", "content": text}]}
        if self._prompt is None:
            filled: Any = self._filled(part.prompt, text, row)
        else:
            filled = await self._prompt.value(text, row)
        if part.kind == "classifier":
            return {**model, "input" if isinstance(filled, str) else "messages": filled}
        messages = [{"role": "user", "content": filled}] if isinstance(filled, str) else filled
        return {**model, "messages": messages, "temperature": 0.0, "max_tokens": part.max_tokens}

    def _filled(self, template: str, text: str, row: Mapping[str, Any]) -> str:
        def fill(place: re.Match[str]) -> str:
            if place[1] == "completion":
                return text
            if place[1] == "prompt":
                return conversation(row["prompt"])
            truth = (row.get("reward_model") or {}).get("ground_truth")
            if truth is None:
                raise RewardError(f"the prompt of reward {self._name!r} has {{ground_truth}}, which the row has not")
            return str(truth)

        return _PLACE.sub(fill, template)  # once: what a completion spells out is not filled in

    def _count(self, answer: Any, num_guessed: float) -> None:
        usage: Any = answer.get("usage") if isinstance(answer, dict) else None
        total: Any = usage.get("total_tokens") if isinstance(usage, dict) else None
        if type(total) is int and 0 <= total <= _MOST_TOKENS:
            self._limit.correct(total - num_guessed)

    async def _read(self, answer: Any, row: Mapping[str, Any]) -> float:
        path = "choices.0.message.content" if self._part.kind == "judge" else self._score_at
        value = at(answer, path)
        if value is None:
            raise _NoScoreError(f"the answer has no {path}: {str(answer)[:300]}")
        if self._part.kind == "judge":
            if not isinstance(value, str):
                raise _NoScoreError(f"what the judge writes at {path} is not text: {value!r:.100}")
            if self._parser is not None:
                if (score := await self._parser.value(value, row)) is None:
                    raise _NoScoreError(f"{self._part.parser} finds no score in {value[-300:]!r}")
                return score
            found: list[Any] = self._pattern.findall(value)
            if not found:
                raise _NoScoreError(f"{self._part.pattern!r} finds no score in {str(value)[-300:]!r}")
            value = found[-1]
        try:
            if isinstance(value, bool):
                raise TypeError
            score = float(value)
        except (TypeError, ValueError, OverflowError):
            raise _NoScoreError(f"{value!r:.100} is not a number") from None
        if not math.isfinite(score):
            raise _NoScoreError(f"the score is {score}")
        return score


def _asked_pause_s(response: aiohttp.ClientResponse) -> float:
    """Seconds that the server asks to wait (`Retry-After`, RFC 9110), within the longest pause of our own."""
    try:
        return min(max(float(response.headers.get("Retry-After", 0)), 0.0), _LAST_PAUSE_S)
    except ValueError:  # a date
        return 0.0


def conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    """Conversation as text: a single message alone, several with their roles; an image is `[image]`."""
    if len(messages) == 1:
        return _text_of(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {_text_of(message['content'])}" for message in messages)


def _text_of(content: Any) -> str:
    if not isinstance(content, list):
        return str(content)
    parts = cast("list[Mapping[str, Any]]", content)
    return "".join(str(part["text"]) if part["type"] == "text" else "[image]" for part in parts)


def at(value: Any, path: str) -> Any:
    """Value at a dotted path of a JSON value, where numbers index lists; None if there is none."""
    for step in path.split("."):
        if isinstance(value, list):
            items = cast("list[Any]", value)
            index = int(step) if step.removeprefix("-").isdigit() else len(items)
            value = items[index] if -len(items) <= index < len(items) else None
        else:
            value = cast("dict[str, Any]", value).get(step) if isinstance(value, dict) else None
    return value


class Window:
    """Sliding window of a rate limit: at most `limit` within `period_s` seconds; times are arguments."""

    def __init__(self, limit: float, period_s: float = 60.0) -> None:
        self._limit, self._period_s = limit, period_s
        self._taken: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def delay_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be taken; more than the limit may be taken from an empty window."""
        while self._taken and self._taken[0][0] <= now - self._period_s:
            self._sum -= self._taken.popleft()[1]
        left = self._sum - max(self._limit - amount, 0.0)
        for at, taken in self._taken:
            if left <= 0:
                break
            left -= taken
            if left <= 0:
                return at + self._period_s - now
        return 0.0

    def take(self, amount: float, now: float) -> None:
        """Take `amount`, whether or not the limit allows it."""
        self._taken.append((now, amount))
        self._sum += amount


class RateLimit:
    """Rate limit: requests wait, in order, until requests and tokens per minute allow one more.

    A limit of 0 is none.
    """

    def __init__(self, *, requests_per_minute: float = 0.0, tokens_per_minute: float = 0.0) -> None:
        self._requests = Window(requests_per_minute) if requests_per_minute else None
        self._tokens = Window(tokens_per_minute) if tokens_per_minute else None
        self._turn = asyncio.Lock()

    async def wait(self, num_tokens: float) -> None:
        """Wait for one request of about `num_tokens` tokens."""
        pairs = [(w, amount) for w, amount in ((self._requests, 1.0), (self._tokens, num_tokens)) if w is not None]
        async with self._turn:
            for window, amount in pairs:
                await asyncio.sleep(window.delay_s(amount, time.monotonic()))  # what waits behind us takes nothing
            for window, amount in pairs:
                window.take(amount, time.monotonic())

    def correct(self, num_tokens: float) -> None:
        """Correct an estimate: take missing tokens, or give spare ones back."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, time.monotonic())
