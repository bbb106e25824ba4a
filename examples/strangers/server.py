"""Rollout server of a stranger: samples from a table of logits, in which a token depends on the one before it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rl_engine.registry import describe_model
from rl_rollout.base import RolloutServer
from rl_rollout.errors import RequestError, ServerLostError, UnsupportedError, WeightUpdateError
from rl_rollout.registry import create_endpoint
from rl_rollout.types import Capabilities, FinishReason, GenerateRequest, ServerAddress, ServerConfig, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_rollout.base import PauseMode, WeightReceiver

WEIGHTS = "bigram.pt"


def create_server(config: ServerConfig) -> BigramServer:
    return BigramServer(config)


class BigramServer(RolloutServer):
    """Samples at once: no request is ever half done."""

    def __init__(self, config: ServerConfig) -> None:
        self._config, self._model = config, describe_model(config.model_path).config
        self._endpoint = create_endpoint(self, config, model_name=Path(config.model_path).name)
        self._address: ServerAddress | None = None
        self._table: torch.Tensor | None = None
        self._version, self._may_run, self._is_stopped = 0, asyncio.Event(), False
        self._may_run.set()
        self._stream = torch.Generator().manual_seed(config.seed)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(gives_top_logprobs=False, gives_prompt_logprobs=False, attests_weights=False)

    async def start(self) -> ServerAddress:
        if self._address is None:
            size, saved = self._model["vocab_size"], Path(self._config.model_path) / WEIGHTS
            self._table = torch.load(saved) if saved.is_file() else torch.zeros(size, size)
            url = await self._endpoint.start()
            self._address = ServerAddress(url=url, model="bigram", pid=os.getpid())
        return self._address

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        params, prompt = request.sampling_params, request.prompt_token_ids
        if not prompt or len(prompt) >= self._config.max_model_len or max(prompt) >= self._model["vocab_size"]:
            raise RequestError(f"request {request.request_id!r}: the prompt is empty, too long or has an unknown id")
        if request.has_extras or request.images or request.adapter or params.top_k or params.top_p < 1:
            raise UnsupportedError(f"request {request.request_id!r} asks for more than tokens at a temperature")
        await self._may_run.wait()
        if self._is_stopped:
            raise ServerLostError("the server was stopped")
        if self._table is None:
            raise WeightUpdateError("the server has no weights; update them")
        ends = {self._model.get("eos_token_id"), *params.stop_token_ids} if not params.ignore_eos else set()
        draw = self._stream if params.seed is None else torch.Generator().manual_seed(params.seed)
        ids, logprobs = [prompt[-1]], list[float]()
        limit = min(params.max_new_tokens, self._config.max_model_len - len(prompt))
        while len(logprobs) < limit and (not logprobs or ids[-1] not in ends):
            scores = torch.log_softmax(self._table[ids[-1]] / (params.temperature or 1.0), -1)
            chosen = torch.multinomial(scores.exp(), 1, generator=draw) if params.temperature else scores.argmax()
            ids.append(int(chosen))
            logprobs.append(float(scores[ids[-1]]))
        return TokenOutput(
            request_id=request.request_id,
            token_ids=tuple(ids[1:]),
            logprobs=tuple(logprobs),
            weight_versions=(self._version,) * len(logprobs),
            finish_reason=FinishReason.STOP if ids[-1] in ends else FinishReason.LENGTH,
        )

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Nothing is in flight."""

    async def pause(self, mode: PauseMode) -> None:
        self._may_run.clear()

    async def resume(self) -> None:
        self._may_run.set()

    async def update_weights(self, receive: WeightReceiver, version: int) -> None:
        try:
            weights = {name: tensor.clone() async for name, tensor in receive.receive_weights()}
            self._table, self._version = weights["bigram.weight"], version
        except Exception as error:
            raise WeightUpdateError(
                f"version {version} was not installed: {error}; {self._version} still serves"
            ) from error

    async def sleep(self, level: int = 1) -> None:
        self._may_run.clear()
        self._table = self._table if level == 1 else None

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        self._may_run.set()

    async def stop(self) -> None:
        self._is_stopped = True
        self._may_run.set()
        await self._endpoint.stop()
