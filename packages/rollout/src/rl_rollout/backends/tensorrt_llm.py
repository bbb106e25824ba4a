"""TensorRT-LLM backend: a subprocess over HTTP. Never run: written from the sources of TensorRT-LLM 1.2 to 1.4.

Token ids go in and come out of `/v1/completions` (`detokenize: false`), streamed, so that an aborted request has its
tokens so far. Log-probs are of the raw logits: a request whose temperature, top-k or top-p samples from another
distribution is refused. Weights arrive by `/update_weights` and rl-ckpt's extension of its workers, which must be
installed next to TensorRT-LLM; slices land while it goes on. Before weights are installed, requests in flight are
finished, as there is no way to freeze them. So every token of a request is of one version, which is counted here:
TensorRT-LLM has none. `sleep(1)` and `wake` are `/release_memory` and `/resume_memory`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from rl_rollout.backends.external.external_server import ExternalServer
from rl_rollout.backends.external.options import (
    COMMON_OPTIONS,
    check_arguments,
    words,
)
from rl_rollout.backends.external.updates import new_files, wait_for_files
from rl_rollout.backends.external.upstream import closed, error_text
from rl_rollout.errors import (
    ConfigError,
    GenerationError,
    RolloutError,
    ServerLostError,
    ServerStartError,
    UnsupportedError,
)
from rl_rollout.http.body import json_object, read_lines
from rl_rollout.receiver import SLICES
from rl_rollout.registry import check_options
from rl_rollout.types import Capabilities, FinishReason, ServerParallel, TokenChunk, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_rollout.backends.external.calls import InFlightRequest
    from rl_rollout.base import PauseMode, RolloutServer
    from rl_rollout.multimodal import PreparedImages
    from rl_rollout.types import GenerateRequest, ServerConfig

LAUNCHER = "rl_ckpt.adapters.tensorrt_llm"
"""Module that starts TensorRT-LLM's server over the engine that takes weights; `trtllm-serve` has another."""
KEY_VARIABLE = "RL_CKPT_CONTROL_KEY"
"""Environment variable with the key that requests are signed with, for that launcher."""
AUTH_HEADER = "x-trtllm-rl-control-auth"
OPTIONS = {
    **COMMON_OPTIONS,
    "command": f"what starts the server, a list or a line; default: this Python -m {LAUNCHER}; trtllm-serve takes no "
    "new weights",
    "sleeps": "whether it gives memory back; false",
}
LAYOUT_ARGUMENTS = {
    **dict.fromkeys(("--tp-size", "--tensor-parallel-size"), "tp"),
    **dict.fromkeys(("--pp-size", "--pipeline-parallel-size"), "pp"),
    **dict.fromkeys(("--ep-size", "--moe-expert-parallel-size"), "ep"),
}
"""Arguments that `ServerConfig.parallel` sets, or that it would have to."""


def create_server(config: ServerConfig) -> RolloutServer:
    """Server whose TensorRT-LLM is a subprocess, which ends with this process."""
    return TensorrtLlmServer(config)


class TensorrtLlmServer(ExternalServer):
    """Rollout server over TensorRT-LLM. A pause holds new requests on this side; mode `keep` is refused."""

    def __init__(self, config: ServerConfig) -> None:
        check_options(config.options, OPTIONS, "tensorrt_llm")
        for name, default in (
            ("device", "auto"),
            ("dtype", "auto"),
            ("kv_cache_bytes", 0),
            ("seed", 0),
            ("parallel", ServerParallel(tp=config.parallel.tp)),
        ):
            if getattr(config, name) != default:
                raise ConfigError(
                    f"{name}={getattr(config, name)!r}: TensorRT-LLM takes this from a file; leave it at {default!r}, "
                    "and name the file in the option args='--extra_llm_api_options FILE'"
                )
        if not isinstance(config.options.get("sleeps", False), bool):
            raise ConfigError(f"option sleeps={config.options['sleeps']!r} must be true or false")
        default = [sys.executable, "-m", LAUNCHER]
        self._program = words(config.options.get("command", default), "command")
        self._takes_weights = all(Path(word).name != "trtllm-serve" for word in self._program)
        if config.options.get("sleeps") and not self._takes_weights:
            raise ConfigError(f"option sleeps=true: trtllm-serve cannot; let the command be python -m {LAUNCHER}")
        super().__init__(config, engine_name="tensorrt_llm")
        check_arguments(self.arguments, LAYOUT_ARGUMENTS)
        self._folder = tempfile.mkdtemp(prefix="rl-rollout-")
        key = secrets.token_hex(16)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._reading: dict[str, asyncio.Task[None]] = {}
        # A connection per request: by closing it, a request is aborted.
        self.run_as(
            self._command(),
            f"http://127.0.0.1:{self._port}",
            lambda: aiohttp.TCPConnector(limit=0, force_close=True),
            **({KEY_VARIABLE: key} if self._takes_weights else {}),
        )
        self.upstream.sign = lambda body: signature(key, body)

    @property
    def capabilities(self) -> Capabilities:
        """See `RolloutServer.capabilities`: plain generation, and new weights."""
        return Capabilities(
            updates_weights=self._takes_weights,
            takes_slices=self._takes_weights,
            num_receivers=self.config.parallel.tp,
            sleep_levels=(1,) if self.config.options.get("sleeps") else (),
            gives_top_logprobs=False,
            gives_prompt_logprobs=False,
        )

    def _command(self) -> list[str]:
        config = self.config
        return [
            *self._program,
            *(config.model_path, "--backend", "pytorch", "--host", "127.0.0.1", "--port", str(self._port)),
            *("--max_seq_len", str(self.max_model_len), "--max_batch_size", str(config.max_num_seqs)),
            *(("--tp_size", str(config.parallel.tp)) if config.parallel.tp > 1 else ()),
            *(("--sleeps",) if config.options.get("sleeps") else ()),
            *self.arguments,
        ]

    async def after_start(self) -> None:
        """Check that the workers have the extension that takes weights.

        Raises:
            ServerStartError: they do not.
        """
        if self._takes_weights:
            try:
                await self.upstream.command("/update_weights", update_message())
            except RolloutError as error:
                raise ServerStartError(
                    f"TensorRT-LLM is up, and its workers do not take weights ({error}); have the option command start "
                    f"python -m {LAUNCHER} in an environment with rl-ckpt, or trtllm-serve to serve those on disk"
                ) from error

    async def stop(self) -> None:
        """See `RolloutServer.stop`."""
        await super().stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def post_generate(
        self, request: GenerateRequest, images: PreparedImages | None, flight: InFlightRequest
    ) -> TokenOutput:
        """See `ExternalServer`. Images are not supported."""
        del images
        check_distribution(request)
        reading = self._reading[flight.upstream_id] = asyncio.ensure_future(self._read(request, flight))
        try:
            await asyncio.wait([reading])
            if not reading.cancelled():
                reading.result()
        finally:
            reading.cancel()
            del self._reading[flight.upstream_id]
        return put_together(request, flight.chunks, is_aborted=reading.cancelled())

    async def _read(self, request: GenerateRequest, flight: InFlightRequest) -> None:
        params = request.sampling_params
        body = {
            "model": self.model_name,
            "prompt": request.prompt_token_ids,
            "max_tokens": self.limits.max_new_tokens(request),
            "temperature": params.temperature,
            "seed": params.seed,
            "stop_token_ids": self.limits.stop_ids(request),
            "ignore_eos": params.ignore_eos,
            "include_stop_str_in_output": True,
            "add_special_tokens": False,
            "detokenize": False,
            "logprobs": 1,
            "stream": True,
        }
        try:
            async with self.upstream.request("POST", "/v1/completions", body) as response:
                await self.upstream.check(response, "/v1/completions")
                async for line in read_lines(response):
                    event = json_object(line[6:], "TensorRT-LLM") if line.startswith(b"data: {") else {}
                    if event:
                        flight.add(read_event(event, self.weight_version))
        except aiohttp.ClientError as error:
            raise await self.upstream.lost(closed(error)) from error

    async def post_abort(self, upstream_ids: Sequence[str]) -> None:
        """See `ExternalServer`."""
        for upstream_id in upstream_ids:
            if upstream_id in self._reading:
                self._reading[upstream_id].cancel()

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutServer.pause`.

        Raises:
            UnsupportedError: `keep`.
        """
        if mode == "keep":
            raise UnsupportedError("TensorRT-LLM cannot freeze what is in flight; pause with abort or wait")
        await super().pause(mode)

    async def post_pause(self, mode: PauseMode) -> None:
        """See `ExternalServer`. An update's (`keep`) lets requests in flight finish; else there are none by now."""
        if mode == "keep":
            self.requests.hold()
            await self.requests.drain()

    async def post_resume(self) -> None:
        """See `ExternalServer`."""

    async def post_layout(self, url: str) -> None:
        """See `ExternalServer`."""
        await self._notify_workers(url=url)

    async def post_slices(self, address: str) -> None:
        """See `ExternalServer`. Slices land in threads of the workers, and a file of each reports when they have."""
        if address.startswith(SLICES):
            landed = new_files(self._folder, "landed", self.capabilities.num_receivers)
            await self._notify_workers(url=address, timeout_s=self.config.timeout_s)
            await wait_for_files(landed, self.check_health, timeout_s=self.config.timeout_s)

    async def post_update(self, address: str, version: int) -> None:
        """See `ExternalServer`. The extension installs and attests what has landed; after a failure it restores."""
        await self._notify_workers(url=address, timeout_s=self.config.timeout_s, version=version)

    async def _notify_workers(self, **fields: Any) -> None:
        """Have the extension of every worker answer a message.

        Raises:
            GenerationError: one failed; with what the workers have written.
        """
        failed = new_files(self._folder, "failed", self.capabilities.num_receivers)
        await self.upstream.command("/update_weights", update_message(folder=self._folder, **fields))
        if messages := [file.read_text() for file in failed if file.exists()]:
            raise GenerationError("; ".join(dict.fromkeys(messages)))  # one worker's is the cause of the others'

    async def post_sleep(self, level: int) -> None:
        """See `ExternalServer`. Requests in flight are finished first."""
        del level
        await self.requests.drain()
        await self.upstream.command("/release_memory", {"tags": ["kv_cache"]})

    async def post_wake(self, tags: Sequence[str]) -> None:
        """See `ExternalServer`."""
        if "kv_cache" in tags:
            await self.upstream.command("/resume_memory", {"tags": ["kv_cache"]})


def update_message(**fields: Any) -> dict[str, Any]:
    """Body of `/update_weights`: a message to rl-ckpt's extension. Without fields, it asks whether that is there."""
    return {"weights": {"rl_ckpt": json.dumps(fields)}}


def signature(key: str, body: bytes) -> dict[str, str]:
    """Header that TensorRT-LLM 1.3 and later ask for in requests that change weights or memory."""
    return {AUTH_HEADER: f"sha256={hmac.new(key.encode(), body, hashlib.sha256).hexdigest()}"}


def check_distribution(request: GenerateRequest) -> None:
    """Check that the reported log-probs would be of the distribution that is sampled from.

    Raises:
        UnsupportedError: says which fields may be what.
    """
    params = request.sampling_params
    if params.temperature not in (0, 1) or params.top_p < 1 or params.top_k > 0 or params.shapes_logits:
        raise UnsupportedError(
            f"request {request.request_id!r}: TensorRT-LLM returns log-probs of the raw logits, so that temperature="
            f"{params.temperature}, top_p={params.top_p}, top_k={params.top_k} must be 0 or 1, 1, and 0, "
            "without min_p and penalties"
        )


def read_event(event: Mapping[str, Any], version: int) -> TokenChunk:
    """Decode one event of the stream.

    Raises:
        GenerationError: it is an error, or has text in place of ids, or tokens without log-probs.
    """
    if "choices" not in event:
        raise GenerationError(f"TensorRT-LLM: {error_text(json.dumps(event))}")
    nothing: dict[str, Any] = {"token_ids": []}
    choice: Mapping[str, Any] = event["choices"][0] if event["choices"] else nothing
    ids = choice.get("token_ids")
    if ids is None:
        raise GenerationError("TensorRT-LLM returned no token ids; its version does not honour detokenize=false")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
    if len(logprobs) != len(ids):
        raise GenerationError(f"TensorRT-LLM returned {len(ids)} tokens and {len(logprobs)} log-probs")
    reason = choice.get("finish_reason")
    return TokenChunk(
        token_ids=tuple(ids),
        logprobs=tuple(logprobs),
        weight_versions=(version,) * len(ids),
        finish_reason=None if reason is None else FinishReason(reason),
    )


def put_together(request: GenerateRequest, chunks: Sequence[TokenChunk], *, is_aborted: bool) -> TokenOutput:
    """Output of a request.

    Raises:
        ServerLostError: the stream ended without a reason; with what had come.
    """
    output = TokenOutput.joined(request.request_id, chunks)
    if is_aborted or output.finish_reason is not FinishReason.ABORT:
        return output
    lost = ServerLostError(f"TensorRT-LLM ended the stream of {request.request_id!r} without a reason")
    lost.partial = output
    raise lost
