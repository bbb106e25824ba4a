"""Reward servers that the run starts itself: `rl-serve FOLDER --task score`, each in its own process."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from rl_rollout.registry import create_process
from rl_trainer.errors import RewardError
from rl_trainer.runtime.base import Dispatch, WorkerContext, register
from rl_trainer.runtime.processes import describe, is_stopped

if TYPE_CHECKING:
    from collections.abc import Mapping

_READY = "rl-serve ready "
"""Text that `rl-serve` prints before the JSON of its address."""
_CHECK_S = 1.0
_READY_CHECK_S = 0.05


class RewardServers:
    """Supervisor of one server per reward model. `sleep` ends the servers, `wake` starts and loads them again.

    With `heartbeat_s`, the end of a server, or one that is stopped for so long, ends this process too: whoever needs
    its rewards hears of that at once.

    Rank 0 serves. `heartbeat_s` is None where this process is not this worker's alone.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        folders: Mapping[str, str],
        timeout_s: float,
        heartbeat_s: float | None = None,
    ) -> None:
        self._host, self._folders, self._timeout_s = context.host, folders, timeout_s
        self._processes: dict[str, _Server] = {}
        self._lock = threading.Lock()
        if heartbeat_s is not None:
            threading.Thread(target=self._watch, args=(heartbeat_s,), name="reward servers", daemon=True).start()

    def _watch(self, heartbeat_s: float) -> None:
        stopped: dict[_Server, float] = {}
        while True:
            time.sleep(_CHECK_S)
            with self._lock:
                servers = [server for server in self._processes.values() if server.is_ready]
                stopped = {each: stopped.get(each, 0.0) + _CHECK_S for each in servers if is_stopped(each.pid)}
                lost = [each for each in servers if not each.is_alive or stopped.get(each, 0.0) > heartbeat_s]
                if lost:
                    print(lost[0].with_output("is gone"), file=sys.stderr, flush=True)  # noqa: T201 - its last lines
                    for server in servers:
                        server.end()
                    os._exit(1)

    @register(Dispatch.RANK_ZERO)
    def wake(self) -> dict[str, str]:
        """Start the servers that do not run; returns the endpoint of each part.

        Raises:
            RewardError: one ended, or was not ready in time; carries its last lines. None runs then.
        """
        with self._lock:
            self._start()
        deadline = time.monotonic() + self._timeout_s
        try:
            return {name: server.url(deadline) for name, server in self._processes.items()}
        except RewardError:
            self.sleep()
            raise

    def _start(self) -> None:
        for name, folder in self._folders.items():
            if (server := self._processes.get(name)) is not None and not server.is_alive:
                self._processes.pop(name).end()
            if name not in self._processes:
                self._processes[name] = _Server(name, folder, self._host)

    @register(Dispatch.RANK_ZERO)
    def sleep(self) -> None:
        """End the servers."""
        with self._lock:
            while self._processes:
                _, server = self._processes.popitem()
                server.end()

    def close(self) -> None:
        """End the servers."""
        self.sleep()


class _Server:
    """Reward server under rl-rollout's supervisor. It ends with this process: it watches its standard input."""

    def __init__(self, name: str, folder: str, host: str) -> None:
        self._name = f"the server of reward.parts.{name} ({folder})"
        self._url: str | None = None
        self._has_told = threading.Event()
        command = [sys.executable, "-m", "rl_rollout.cli", folder, "--task", "score", "--host", host, "--port", "0"]
        self._process = create_process([*command, "--exit-with-stdin"], name=self._name, on_line=self._take_line)
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        return self._url is not None

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    def _take_line(self, line: str) -> bool:
        if not line.startswith(_READY):
            return False
        self._url = f"{json.loads(line.removeprefix(_READY))['url']}/pooling"
        self._has_told.set()
        return True

    def url(self, deadline: float) -> str:
        while not self._has_told.wait(_READY_CHECK_S):
            if not self.is_alive:
                raise RewardError(self.with_output("ended while it started"))
            if time.monotonic() > deadline:
                raise RewardError(self.with_output("was not ready in time"))
        assert self._url is not None, "it was set"
        return self._url

    def with_output(self, what: str) -> str:
        """Error text: a sentence, the server's state and its last lines."""
        return self._process.with_output(f"{self._name} {what}; {describe(self.pid, None)}")

    def end(self) -> None:
        self._process.kill()
