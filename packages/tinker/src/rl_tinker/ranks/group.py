"""Training processes on this machine, started by torch's elastic launcher, which ends all if one ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rl_rollout.errors import ServerStartError
from rl_rollout.registry import create_process
from rl_tinker.base import TrainingGroup
from rl_tinker.errors import CommandError, RanksLostError
from rl_tinker.types import Answer

if TYPE_CHECKING:
    from rl_rollout.base import Subprocess
    from rl_tinker.types import Command, ServeConfig

CHECK_S = 0.25
"""Seconds between two looks whether the launcher has ended."""


class ElasticGroup(TrainingGroup):
    """Training processes under torch's elastic launcher; rank 0 connects to a socket of this process.

    A command and its answer are frames: 8 bytes of length, then msgpack.
    """

    def __init__(self, config: ServeConfig, model_folder: str) -> None:
        self._config, self._model_folder = config, model_folder
        self._folder = tempfile.TemporaryDirectory(prefix="rl-tinker-")
        self._socket = str(Path(self._folder.name) / "ranks.sock")
        self._server: asyncio.Server | None = None
        self._launcher: Subprocess | None = None
        self._peer: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._joined = asyncio.Event()
        self._incarnation = 0
        self._lock = asyncio.Lock()

    @property
    def incarnation(self) -> int:
        """See `TrainingGroup`."""
        return self._incarnation

    @property
    def pid(self) -> int:
        """Process id of the launcher; 0 before the start."""
        return 0 if self._launcher is None else self._launcher.pid

    async def start(self) -> None:
        """See `TrainingGroup`."""
        if self._server is None:
            self._server = await asyncio.start_unix_server(self._join, self._socket)
        async with self._lock:
            await self._ready()

    async def call(self, command: Command) -> Answer:
        """See `TrainingGroup`."""
        async with self._lock:
            incarnation = self._incarnation
            reader, writer = await self._ready()
            if incarnation != self._incarnation:
                raise RanksLostError("the training processes were started again; their models have to be restored")
            body = msgspec.msgpack.encode(command)
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    writer.writelines([len(body).to_bytes(8), body])
                    await writer.drain()
                    size = int.from_bytes(await reader.readexactly(8))
                    answer = msgspec.msgpack.decode(await reader.readexactly(size), type=Answer)
            except TimeoutError as error:
                raise self._lost(f"a command took longer than timeout_s={self._config.timeout_s}") from error
            except (OSError, EOFError) as error:
                raise self._lost("rank 0 closed its connection") from error
            except BaseException:  # the answer of a cancelled call would be taken for that of the next
                self._end()
                raise
        if answer.error:
            raise CommandError(answer.error)
        return answer

    async def stop(self) -> None:
        """See `TrainingGroup`."""
        self._end()
        if self._server is not None:
            self._server.close()
            self._server = None
        self._folder.cleanup()

    # The processes

    def _start_launcher(self) -> None:
        config = self._config
        command = [
            sys.executable,
            "-m",
            "rl_tinker.ranks",
            str(os.getpid()),
            str(config.ranks),
            self._socket,
            self._model_folder,
        ]
        command.append(msgspec.json.encode(config).decode())
        self._launcher = create_process(command, name="the training processes", on_line=lambda _: False)
        self._incarnation += 1
        try:
            self._launcher.start()  # in this thread, whose end would end the process
        except ServerStartError as error:
            raise RanksLostError(str(error)) from error

    def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Rank 0 connects once the model is loaded."""
        self._peer = (reader, writer)
        self._joined.set()

    def _end(self) -> None:
        """End the processes: the ranks end with their launcher."""
        self._joined.clear()
        if self._peer is not None:
            self._peer[1].close()
            self._peer = None
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher = None

    async def _ready(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connection to rank 0, started if necessary.

        Raises:
            RanksLostError: it is not ready before the deadline.
        """
        has_left = self._peer is not None and self._peer[0].at_eof()
        if self._launcher is not None and (has_left or self._launcher.returncode is not None):
            self._end()
        if self._launcher is None:
            self._start_launcher()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.timeout_s
        while self._peer is None:
            assert self._launcher is not None, "it was started"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._joined.wait(), CHECK_S)
            if self._peer is None and self._launcher.returncode is not None:
                raise self._lost("the training processes ended while they started")
            if loop.time() > deadline:
                raise self._lost(f"the training processes were not ready within timeout_s={self._config.timeout_s}")
        return self._peer

    def _lost(self, what: str) -> RanksLostError:
        assert self._launcher is not None, "it was started"
        lost = RanksLostError(self._launcher.with_output(what))
        self._end()
        return lost
