"""Reward models that the run serves itself: `rl-serve FOLDER --task score`, each in a process of its own."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from rl_trainer.base import Dispatch, WorkerContext, register
from rl_trainer.errors import RewardError

if TYPE_CHECKING:
    from collections.abc import Mapping

_READY = "rl-serve ready "
"""What `rl-serve` prints before the JSON of its address."""
_NUM_LINES = 20


class RewardServers:
    """Keeps a server for each reward model. Asleep it has none: all of its memory is the engine's, and waking loads it.

    Args:
        context: Rank 0 serves; the other ranks of a pool that is shared have nothing to do.
        folders: By part of the reward, the model's folder.
        timeout_s: Of a start, seconds.
    """

    def __init__(self, context: WorkerContext, *, folders: Mapping[str, str], timeout_s: float) -> None:
        self._host, self._folders, self._timeout_s = context.host, folders, timeout_s
        self._processes: dict[str, _Server] = {}

    @register(Dispatch.RANK_ZERO)
    def wake(self) -> dict[str, str]:
        """Start the servers that do not run; returns the endpoint of each part.

        Raises:
            RewardError: one ended, or was not ready in time; carries its last lines. None runs then.
        """
        for name, folder in self._folders.items():
            if (server := self._processes.get(name)) is not None and not server.is_alive:
                self._processes.pop(name).end()
            if name not in self._processes:
                self._processes[name] = _Server(name, folder, self._host)
        deadline = time.monotonic() + self._timeout_s
        try:
            return {name: server.url(deadline) for name, server in self._processes.items()}
        except RewardError:
            self.sleep()
            raise

    @register(Dispatch.RANK_ZERO)
    def sleep(self) -> None:
        """End the servers."""
        while self._processes:
            _, server = self._processes.popitem()
            server.end()

    def close(self) -> None:
        """End the servers."""
        self.sleep()


class _Server:
    """One process. It ends with this one: it watches its standard input."""

    def __init__(self, name: str, folder: str, host: str) -> None:
        self._name, self._folder = name, folder
        self._lines: deque[str] = deque(maxlen=_NUM_LINES)
        self._ready: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._url: str | None = None
        command = [sys.executable, "-m", "rl_rollout.cli", folder, "--task", "score", "--host", host, "--port", "0"]
        self._process = subprocess.Popen(
            [*command, "--exit-with-stdin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reading = threading.Thread(target=self._read, name=f"reward {name}", daemon=True)
        self._reading.start()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _read(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:
            if line.startswith(_READY):
                self._ready.put(json.loads(line.removeprefix(_READY))["url"])
            else:
                self._lines.append(line)
        self._ready.put(None)

    def url(self, deadline: float) -> str:
        if self._url is None:
            try:
                found = self._ready.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                raise self._error("was not ready in time") from None
            if found is None:
                raise self._error("ended while it started")
            self._url = f"{found}/pooling"
        return self._url

    def _error(self, what: str) -> RewardError:
        told = "".join(self._lines) or "it wrote nothing"
        return RewardError(f"the server of reward.parts.{self._name} ({self._folder}) {what}; its last lines:\n{told}")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reading.join(10.0)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "they are pipes"
            pipe.close()
