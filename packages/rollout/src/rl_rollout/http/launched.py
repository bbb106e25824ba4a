"""A server in a process of its own, and the client of it."""

from __future__ import annotations

import json
import sys
import threading
from contextlib import aclosing
from typing import TYPE_CHECKING

from rl_rollout.errors import ServerLostError
from rl_rollout.http.client import HttpServer
from rl_rollout.process import STOP_TIMEOUT_S, ServerProcess

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from rl_rollout.types import GenerateRequest, ServerAddress, ServerConfig, TokenChunk, TokenOutput

API_TOKEN_VARIABLE = "RL_ROLLOUT_API_TOKEN"
"""Environment variable that carries the bearer token: a command line can be read by everyone on the machine."""

READY = "rl-serve ready "
"""What the line begins with that tells the address, as JSON, on the server's standard output."""

EXIT_TIMEOUT_S = 2.0
"""How long to wait for the end of a server whose connection was lost, to tell its exit code and last lines, seconds."""


def serve_command(backend: str, config: ServerConfig) -> list[str]:
    """The command line that serves `config`."""
    return [
        *(sys.executable, "-m", "rl_rollout.cli", config.model_path, "--backend", backend, "--exit-with-stdin"),
        *("--host", config.host, "--port", str(config.port), "--device", config.device, "--dtype", config.dtype),
        *("--max-model-len", str(config.max_model_len), "--max-num-seqs", str(config.max_num_seqs)),
        *("--seed", str(config.seed), "--timeout-s", str(config.timeout_s), "--num-threads", str(config.num_threads)),
        *("--kv-cache-bytes", str(config.kv_cache_bytes), "--queue-timeout-s", str(config.queue_timeout_s)),
        *("--max-body-bytes", str(config.max_body_bytes), "--max-completions", str(config.max_completions)),
        *("--max-stops", str(config.max_stops), "--max-top-logprobs", str(config.max_top_logprobs)),
        *(word for name, value in config.options.items() for word in ("--option", f"{name}={json.dumps(value)}")),
    ]


class LaunchedServer(HttpServer):
    """`start` runs `rl-serve`; `stop` ends it.

    The process ends by itself when this process ends, however that happens: it waits for the end of its standard
    input, which this process holds open.
    """

    def __init__(self, backend: str, config: ServerConfig) -> None:
        super().__init__(f"http://{config.host}:{config.port}", api_token=config.api_token, timeout_s=config.timeout_s)
        self.config = config
        environment = {API_TOKEN_VARIABLE: config.api_token or ""}  # not one that this process happens to have
        self._process = ServerProcess(
            serve_command(backend, config), environment, name="rl-serve", on_line=self._take_line
        )
        self._address: ServerAddress | None = None
        self._ready = threading.Event()

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The newest lines that the server wrote, 20 at most."""
        return self._process.last_lines

    async def start(self) -> ServerAddress:
        """Start the process and wait until it answers. Idempotent."""
        if self._address is not None:
            return self._address
        self._process.start()

        async def is_ready() -> bool:
            return self._ready.is_set()

        try:
            await self._process.wait_until(is_ready, timeout_s=self.timeout_s, check_s=0.02)
            self._address = await super().start()
        except BaseException:
            await self._end(grace_s=0.0)
            raise
        return self._address

    def _take_line(self, line: str) -> bool:
        """In the reading thread: find the line that tells the address."""
        if not line.startswith(READY) or self._ready.is_set():
            return False
        self.url = str(json.loads(line[len(READY) :])["url"])
        self._ready.set()
        return True

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """See `RolloutServer.generate`."""
        try:
            return await super().generate(request)
        except ServerLostError as error:
            await self._tell_end(error)
            raise

    async def generate_stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `RolloutServer.generate_stream`."""
        try:
            async with aclosing(super().generate_stream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except ServerLostError as error:
            await self._tell_end(error)
            raise

    async def _tell_end(self, error: ServerLostError) -> None:
        """Raise the loss with how the process ended, if it did: a dying one closes its sockets before it is gone."""
        if await self._process.has_ended(EXIT_TIMEOUT_S):
            lost = ServerLostError(self._process.told_end())
            lost.partial = error.partial
            raise lost from error

    async def stop(self) -> None:
        """End the process and close the connections. Idempotent."""
        await self._end(grace_s=STOP_TIMEOUT_S)

    async def _end(self, *, grace_s: float) -> None:
        await super().stop()
        await self._process.end(grace_s=grace_s)
        self._address = None
