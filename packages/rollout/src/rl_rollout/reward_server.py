"""Reward-model server: a score for every token-id sequence, text or conversation. `rl-serve MODEL --task score`.

The model is a Hugging Face sequence classifier with one label, as rl-engine's `rl-rm` writes; a sequence's score is
that of its last token. `POST /pooling` takes and gives what vLLM's endpoint of that name does. In: `input` (a text,
token ids, or a list of either), or `messages`, which end with the answer to score. Out: `{"data": [{"index", "object":
"pooling", "data": [score]}], "usage"}`. `POST /sleep` moves the model from the GPU to host memory, where requests wait
for `POST /wake`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from aiohttp import web

from rl_rollout.errors import (
    ConfigError,
    GenerationError,
    ModelFolderError,
    RequestError,
    RolloutError,
    ServerLostError,
)
from rl_rollout.http import messages as wire
from rl_rollout.http.endpoint import NOT_ALLOWED, http_error, is_allowed, json_body, not_bound, url_of
from rl_rollout.http.text import LazyTokenizer, plain_messages
from rl_rollout.registry import LOOPBACK_HOSTS, check_unused
from rl_rollout.types import Capabilities, ServerAddress
from rl_rollout.validation import check_count, check_device, check_positions, folder_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_rollout.types import ServerConfig

MAX_TOKENS_TOGETHER = 16384
"""Most tokens of one forward pass, padding included."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    token_ids: tuple[int, ...]
    score: asyncio.Future[float]


class RewardModel:
    """Reward model: a Hugging Face sequence classifier with one label.

    Args:
        config: `model_path`, `device`, `dtype`, `max_model_len` and `num_threads` are used.

    Raises:
        ModelFolderError: the folder holds no such model.
    """

    def __init__(self, config: ServerConfig) -> None:
        from transformers import AutoConfig, AutoModelForSequenceClassification

        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        dtype = config.dtype if config.dtype != "auto" else "float32" if self._device.type == "cpu" else "bfloat16"
        load: Any = AutoModelForSequenceClassification.from_pretrained
        try:
            settings: Any = AutoConfig.from_pretrained(
                config.model_path, local_files_only=True, trust_remote_code=False
            )
            model, loading_info = load(
                config.model_path,
                dtype=getattr(torch, dtype),
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelFolderError(f"no reward model can be loaded from {config.model_path!r}: {error}") from error
        missing = sorted(loading_info["missing_keys"])
        if settings.num_labels != 1 or missing or not hasattr(model, "score"):
            why = f"it has no {missing[0]}" if missing else f"it has {settings.num_labels} labels"
            raise ModelFolderError(
                f"{config.model_path!r} is not a reward model: {why}; a sequence classifier with one label, as rl-rm "
                "writes, is needed"
            )
        self.model = model.to(self._device).eval()
        text = settings.get_text_config()
        self.vocab_size: int = text.vocab_size
        """Size of the vocabulary."""
        self.max_model_len = min(config.max_model_len, getattr(text, "max_position_embeddings", config.max_model_len))
        """Most tokens of a sequence."""
        check_positions(text, self.max_model_len)

    def move(self, device: torch.device | str | None = None) -> None:
        """Move the weights to a device; None: the one that computes."""
        self.model.to(device or self._device)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # another process cannot use what torch's allocator keeps

    @torch.inference_mode()
    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Scores of rows of token ids, each that of the row's last token; one forward pass, padded to the longest."""
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        width = int(lengths.max())
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self._device)
        mask = torch.arange(width, device=self._device) < lengths[:, None]
        hidden = self.model.base_model(input_ids=ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(rows), device=self._device), lengths - 1]
        return self.model.score(last)[:, 0].float().tolist()


class ScoreServer:
    """HTTP server of one reward model; waiting sequences are scored in one batch."""

    def __init__(self, config: ServerConfig) -> None:
        if config.host not in LOOPBACK_HOSTS and not config.api_token:
            raise ConfigError(f"host {config.host!r} is reachable from outside; set api_token, or use 127.0.0.1")
        if config.options:
            raise ConfigError(f"options {sorted(config.options)} do nothing with a reward model; leave them out")
        unused = ("max_num_seqs", "seed", "timeout_s", "queue_timeout_s", "quantization", "kv_cache_bytes")
        check_unused(config, unused, "it does nothing with a reward model")
        check_device(config.device)
        self._config = config
        self._tokenizer = LazyTokenizer(config.model_path)
        self._tokens = folder_tokens(config.model_path)
        self.model: RewardModel | None = None
        self._waiting: asyncio.Queue[_Asked] = asyncio.Queue()
        self._runner: web.AppRunner | None = None
        self._scoring: asyncio.Task[None] | None = None
        self._computing = asyncio.Lock()
        """Locked while a batch is scored, and during sleep."""
        self._is_asleep = False
        self.capabilities = Capabilities()
        """Those of a server that generates nothing."""

    async def start(self) -> ServerAddress:
        """Load the model and bind the port; returns the address.

        Raises:
            ModelFolderError: see `RewardModel`.
            ServerStartError: the port cannot be bound.
        """
        config = self._config
        self.model = await asyncio.to_thread(RewardModel, config)
        self._scoring = asyncio.create_task(self._score_waiting(self.model))
        app = web.Application(client_max_size=config.max_body_bytes, middlewares=[self._guard])
        app.add_routes([web.post("/pooling", self._pooling), web.get("/health", self._health)])
        app.add_routes([web.post("/sleep", self._post_sleep), web.post("/wake", self._post_wake)])
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, config.host, config.port).start()
        except OSError as error:
            await self.stop()
            raise not_bound(config, error) from error
        url = url_of(config.host, self._runner.addresses[0][1])
        return ServerAddress(url=url, model=Path(config.model_path).name, pid=os.getpid())

    async def stop(self) -> None:
        """Close the port and free the model. Idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._scoring is not None:
            self._scoring.cancel()
            await asyncio.wait([self._scoring])
            self._scoring = None
        self.model = None

    async def sleep(self, level: int = 1) -> None:
        """Move the model to host memory; requests wait for `wake`. Idempotent.

        Raises:
            RequestError: another level than 1: nothing would bring the weights back.
        """
        if level != 1:
            raise RequestError(
                f"sleep level {level!r} of a reward model must be 1, which keeps the weights on the host"
            )
        if not self._is_asleep and self.model is not None:
            self._is_asleep = True
            await self._computing.acquire()
            await asyncio.to_thread(self.model.move, "cpu")

    async def wake(self, tags: Sequence[str] = ()) -> None:
        """Move the model back to its device. Idempotent; `tags` are those of rollout servers, and mean nothing here."""
        del tags
        if self._is_asleep and self.model is not None:
            self._is_asleep = False
            await asyncio.to_thread(self.model.move)
            self._computing.release()

    async def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Scores of rows of token ids.

        Raises:
            RequestError: a row is empty or too long, or an id is outside of the vocabulary.
            ServerLostError: the server was stopped.
        """
        model, scoring = self.model, self._scoring
        if model is None or scoring is None:
            raise ServerLostError("the server of the reward model is not running; call start()")
        for index, row in enumerate(rows):
            if not 0 < len(row) <= model.max_model_len:
                raise RequestError(f"sequence {index} has {len(row)} tokens; 1 to {model.max_model_len} are taken")
            if min(row) < 0 or max(row) >= model.vocab_size:
                raise RequestError(f"sequence {index} has an id outside of 0 to {model.vocab_size - 1}")
        loop = asyncio.get_running_loop()
        asked = [_Asked(tuple(row), loop.create_future()) for row in rows]
        for each in asked:
            self._waiting.put_nowait(each)
        scores = asyncio.gather(*(each.score for each in asked))
        try:
            await asyncio.wait([scores, scoring], return_when=asyncio.FIRST_COMPLETED)
            if not scores.done():
                raise ServerLostError("the server of the reward model was stopped")
            return scores.result()
        finally:
            scores.cancel()

    async def _score_waiting(self, model: RewardModel) -> None:
        while True:
            waiting = [await self._waiting.get()]
            while not self._waiting.empty():
                waiting.append(self._waiting.get_nowait())
            waiting = sorted((each for each in waiting if not each.score.done()), key=lambda each: len(each.token_ids))
            while waiting:
                count = min(max(MAX_TOKENS_TOGETHER // len(waiting[0].token_ids), 1), len(waiting))
                while count > 1 and count * len(waiting[count - 1].token_ids) > MAX_TOKENS_TOGETHER:
                    count -= 1
                together, waiting = waiting[:count], waiting[count:]
                await self._score_together(model, together)

    async def _score_together(self, model: RewardModel, asked: Sequence[_Asked]) -> None:
        try:
            async with self._computing:
                scores = await asyncio.to_thread(model.score, [each.token_ids for each in asked])
        except Exception as error:  # noqa: BLE001  raised for every caller; the server stays up
            _log.exception("scoring %d sequences failed", len(asked))
            for each in asked:
                if not each.score.done():
                    each.score.set_exception(RolloutError(f"scoring failed: {type(error).__name__}: {error}"))
            return
        for each, score in zip(asked, scores, strict=True):
            if each.score.done():
                continue
            if math.isfinite(score):
                each.score.set_result(score)
            else:
                each.score.set_exception(GenerationError(f"the reward model gave {score} for a score"))

    async def _pooling(self, request: web.Request) -> web.StreamResponse:
        message = wire.read_body(await request.read(), wire.PoolingMessage, request.path)
        rows = await asyncio.to_thread(self._rows_of, message)
        scores = await self.score(rows)
        data = [{"index": index, "object": "pooling", "data": [score]} for index, score in enumerate(scores)]
        num_tokens = sum(map(len, rows))
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return web.json_response({"object": "list", "data": data, "usage": usage})

    def _rows_of(self, message: wire.PoolingMessage) -> list[Sequence[int]]:
        if (message.input is None) == (message.messages is None):
            raise RequestError("the request needs one of 'input' and 'messages'")
        if message.messages is not None:
            return [self._conversation(message.messages)]
        given: Any = message.input
        if isinstance(given, str) or (given and all(_is_id(each) for each in given)):
            given = [given]
        check_count(len(given), self._config)
        rows: list[Sequence[int]] = []
        for each in given:
            if isinstance(each, str):
                rows.append(self._tokenizer.encode(each))
            elif isinstance(each, list) and all(_is_id(token) for token in cast("list[Any]", each)):
                rows.append(cast("list[int]", each))
            else:
                raise RequestError("'input' must be a text, a list of token ids, or a list of these")
        if not rows:
            raise RequestError("'input' is empty; give at least one sequence")
        return rows

    def _conversation(self, messages: Any) -> Sequence[int]:
        """Token ids of a conversation as rl-rm trains on them: prompt, answer, end of the turn."""
        plain, images = plain_messages(messages)
        if images:
            raise RequestError("a reward model here takes no images; leave the image_url parts out")
        last = plain[-1]
        if last["role"] != "assistant" or not isinstance(last["content"], str) or len(plain) < 2:
            raise RequestError("'messages' must be a prompt and an assistant's answer in text, which is what is scored")
        self._tokenizer.encode_chat(plain[:-1])
        prompt, answer = self._tokens.turn(self._tokenizer.get(), plain[:-1], last)
        return (*prompt, *answer)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        del request
        facts = {"status": "ok", "model": Path(self._config.model_path).name, "pid": os.getpid()}
        return web.json_response({**facts, "capabilities": asdict(self.capabilities)})

    async def _post_sleep(self, request: web.Request) -> web.StreamResponse:
        await self.sleep(wire.read_body(await request.read(), wire.SleepMessage, request.path).level)
        return web.json_response({})

    async def _post_wake(self, request: web.Request) -> web.StreamResponse:
        del request
        await self.wake()
        return web.json_response({})

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Middleware: check the token, turn errors into JSON."""
        if not is_allowed(request, self._config.api_token):
            return web.json_response(NOT_ALLOWED, status=401)
        try:
            return await handler(request)
        except RolloutError as error:
            return json_body(wire.error_to_body(error), wire.status_of(error))
        except web.HTTPException as error:
            return http_error(request, error, self._config.max_body_bytes)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
