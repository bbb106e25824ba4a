"""A server in a process of its own, and the client of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from rl_rollout._client import HttpServer
from rl_rollout.errors import ServerLostError, ServerStartError
from rl_rollout.types import ServerAddress

if TYPE_CHECKING:
    from rl_rollout.types import GenerateRequest, ServerConfig, TokenOutput

API_TOKEN_VARIABLE = "RL_ROLLOUT_API_TOKEN"
"""Environment variable that carries the bearer token: a command line can be read by everyone on the machine."""

READY = "rl-serve ready "
"""What the line begins with that tells the address, as JSON, on the server's standard output."""

NUM_LAST_LINES = 20
STOP_TIMEOUT_S = 10.0
"""How long a server may take to end by itself before it is killed, seconds."""

EXIT_TIMEOUT_S = 2.0
"""How long to wait for the end of a server whose connection was lost, to tell its exit code and last lines, seconds."""


def serve_command(backend: str, config: ServerConfig) -> list[str]:
    """The command line that serves `config`."""
    return [
        *(sys.executable, "-m", "rl_rollout.cli", config.model_path, "--backend", backend, "--exit-with-stdin"),
        *("--host", config.host, "--port", str(config.port), "--device", config.device, "--dtype", config.dtype),
        *("--max-model-len", str(config.max_model_len), "--max-num-seqs", str(config.max_num_seqs)),
        *("--seed", str(config.seed), "--timeout-s", str(config.timeout_s), "--num-threads", str(config.num_threads)),
        *("--kv-cache-bytes", str(config.kv_cache_bytes)),
    ]


class LaunchedServer(HttpServer):
    """`start` runs `rl-serve`; `stop` ends it.

    The process is in a session of its own, so that a Ctrl-C in this terminal is this process's to handle. It ends by
    itself when this process ends, however that happens: it waits for the end of its standard input, which this
    process holds open.
    """

    def __init__(self, backend: str, config: ServerConfig) -> None:
        super().__init__(f"http://{config.host}:{config.port}", api_token=config.api_token, timeout_s=config.timeout_s)
        self.config = config
        self._command = serve_command(backend, config)
        self._process: subprocess.Popen[str] | None = None
        self._address: ServerAddress | None = None
        self._ready = threading.Event()
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._reader = threading.Thread(target=self._read_output, name="rl-rollout-log", daemon=True)

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The newest lines that the server wrote, 20 at most."""
        return tuple(self._last_lines)

    async def start(self) -> ServerAddress:
        """Start the process and wait until it answers. Idempotent."""
        if self._address is not None:
            return self._address
        if self._process is not None:
            raise ServerStartError("this server was started and stopped already; launch another")
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        if self.config.api_token:
            environment[API_TOKEN_VARIABLE] = self.config.api_token
        self._process = subprocess.Popen(  # noqa: ASYNC220  it returns at once; waiting is done without blocking
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )
        self._reader.start()
        try:
            self._address = await self._wait_until_ready(self._process)
            await super().start()
        except BaseException:
            await self._end(grace_s=0.0)
            raise
        return self._address

    async def _wait_until_ready(self, process: subprocess.Popen[str]) -> ServerAddress:
        deadline = time.monotonic() + self.timeout_s
        while not self._ready.is_set():
            if process.poll() is not None:
                self._reader.join(1.0)
                raise ServerStartError(self._told(f"rl-serve (pid {process.pid}) ended with code {process.returncode}"))
            if time.monotonic() > deadline:
                raise ServerStartError(
                    self._told(f"rl-serve (pid {process.pid}) was not ready within {self.timeout_s} s")
                )
            await asyncio.sleep(0.02)
        return ServerAddress(url=self.url, model=self._model, pid=process.pid)

    def _read_output(self) -> None:
        """In a thread: keep the last lines, and find the one that tells the address."""
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(READY) and not self._ready.is_set():
                told = json.loads(line[len(READY) :])
                self.url, self._model = str(told["url"]), str(told["model"])
                self._ready.set()
            else:
                self._last_lines.append(line.rstrip("\n"))

    def _told(self, what: str) -> str:
        lines = "\n".join(f"  | {line}" for line in self._last_lines)
        return f"{what}; its last lines:\n{lines}" if lines else f"{what}, and it wrote nothing"

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """See `RolloutServer.generate`."""
        try:
            return await super().generate(request)
        except ServerLostError as error:
            # A dying process closes its sockets before it can be waited for.
            if self._process is not None and await self._has_ended(self._process, EXIT_TIMEOUT_S):
                what = f"rl-serve (pid {self._process.pid}) ended with code {self._process.returncode}"
                raise ServerLostError(self._told(what)) from error
            raise

    async def stop(self) -> None:
        """End the process and close the connections. Idempotent."""
        await self._end(grace_s=STOP_TIMEOUT_S)

    async def _end(self, *, grace_s: float) -> None:
        await super().stop()
        process = self._process
        if process is None or process.stdin is None or process.stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        if not await self._has_ended(process, grace_s):
            # Its own session, so its own process group: whatever it started ends with it.
            os.killpg(process.pid, signal.SIGKILL)
            await self._has_ended(process, STOP_TIMEOUT_S)
        self._reader.join(1.0)
        if process.stdout is not None and not self._reader.is_alive():
            process.stdout.close()
        self._address = None

    async def _has_ended(self, process: subprocess.Popen[str], timeout_s: float) -> bool:
        try:
            await asyncio.to_thread(process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True
