"""Heartbeats of worker processes: one that is stopped, or whose interpreter is stuck, is found, described and ended.

Every process answers a small call on a thread of its own for as long as its interpreter runs. A long call does not
stop that thread; SIGSTOP, or native code that never gives the interpreter lock back, does.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_trainer.runtime.processes import DUMP_WAIT_S, children, describe, end, has_ended, is_stopped

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray.util.placement_group import PlacementGroup

    from rl_trainer.runtime.base import ResourcePool

_REMOTE_TIMEOUT_S = 15.0
_GCS = "gcs_server"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLocation:
    """Location of a host process: node, process id, log files."""

    node_id: str
    """Ray's id of the node."""
    node_address: str = ""
    devices: tuple[str, ...] = ()
    """GPUs that Ray gave to the process, as CUDA_VISIBLE_DEVICES of the machine names them."""
    pid: int
    logs: tuple[str, ...]
    """Files of its standard output and error, on that machine."""
    dumps: str
    """File that it writes its stacks to, when it is asked by a signal."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedHost:
    """Host process with its node in the cluster."""

    pool: ResourcePool
    rank: int
    group: PlacementGroup
    bundle: int
    actor: Any
    watch: Any
    """A reference that is there when it closes, and an error when it dies."""
    where: WorkerLocation | None = None
    """Node and process; None until it has answered."""
    devices: tuple[str, ...] = ()
    """GPUs of the worker that it hosts alone: its own, or those of a group of ranks."""


def on_machine_of(where: WorkerLocation, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on the node of a process: here, or in a Ray task.

    Raises:
        RayError: that machine did not answer within 15 s.
    """
    if where.node_id == ray.get_runtime_context().get_node_id():
        return function(*arguments)
    there = NodeAffinitySchedulingStrategy(where.node_id, soft=False)
    task = ray.remote(function).options(num_cpus=0, scheduling_strategy=there).remote(*arguments)
    return ray.get(task, timeout=_REMOTE_TIMEOUT_S)


def description_of(where: WorkerLocation | None) -> str:
    """Describe a process on any node, as `processes.describe` does."""
    if where is None:
        return "it had not started"
    try:
        return on_machine_of(where, describe, where.pid, where.dumps)
    except RayError as error:
        return f"process {where.pid} cannot be looked at ({error})"


class Heartbeat:
    """Heartbeat thread: pings every watched process, and ends one that does not answer for `heartbeat_s`.

    Its end is then heard of by whoever waits for it, as every death is; `finding` says why.

    The Ray that this process has started is watched too. A raylet that is stopped is ended, and takes the workers
    along. Without its GCS nothing can be asked of Ray, which would end this process after a minute: it ends here, with
    one sentence.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._services: dict[int, str] = {}
        self._stopped_since: dict[int, float] = {}
        self._gcs_asked_at: float | None = None
        self._interval_s = min(heartbeat_s / 6, 5.0)
        self._lock = threading.Lock()
        self._hosts: dict[Any, PlacedHost] = {}
        self._findings: dict[Any, str] = {}
        self._in_flight: dict[Any, str] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def watch_ray(self) -> None:
        """Watch the Ray that this process has started."""
        self._services = children((_GCS, "raylet"))
        threading.Thread(target=self._ask_gcs, name="ask-gcs", daemon=True).start()

    def watch(self, host: PlacedHost) -> None:
        """Watch a process that has answered once, until it is forgotten or dies."""
        with self._lock:
            self._hosts[host.watch] = host
            if not self._thread.is_alive():
                self._thread.start()

    def forget(self, host: PlacedHost) -> None:
        """Stop watching a process that is about to be ended."""
        with self._lock:
            self._hosts.pop(host.watch, None)

    def finding(self, host: PlacedHost) -> str | None:
        """Description of a process that was ended because it hung; None for any other."""
        return self._findings.get(host.watch)

    def stop(self) -> None:
        """Stop the thread."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(_REMOTE_TIMEOUT_S + DUMP_WAIT_S + self._interval_s)

    def _run(self) -> None:
        asked: dict[Any, tuple[Any, float]] = {}
        last = time.monotonic()
        while not self._is_over.wait(self._interval_s):
            now = time.monotonic()
            if now - last > self._heartbeat_s / 2:  # this process was stopped itself: what it asked counts from now
                asked = {watch: (beat, now) for watch, (beat, _) in asked.items()}
                self._gcs_asked_at = None if self._gcs_asked_at is None else now
            last = now
            self._look_at_ray(now)
            with self._lock:
                hosts = dict(self._hosts)
            asked = {watch: beat for watch, beat in asked.items() if watch in hosts}
            try:
                for watch in hosts.keys() - asked.keys():
                    asked[watch] = (hosts[watch].actor.beat.remote(), now)
                self._collect(hosts, asked)
            except (RayError, RuntimeError):  # Ray itself has ended
                return
            for watch in [watch for watch, (_, since) in asked.items() if now - since > self._heartbeat_s]:
                del asked[watch]
                self._end(hosts[watch])

    def _ask_gcs(self) -> None:
        """Ask the GCS for its nodes again and again: it may be alive without serving."""
        while not self._is_over.wait(self._interval_s):
            self._gcs_asked_at = time.monotonic()
            try:
                ray.nodes()
            except Exception:  # noqa: BLE001 - Ray itself has ended, or will not answer: `_look_at_ray` says which
                return
            self._gcs_asked_at = None

    def _look_at_ray(self, now: float) -> None:
        for pid in self._services:
            if not is_stopped(pid):
                self._stopped_since.pop(pid, None)
            elif now - self._stopped_since.setdefault(pid, now) > self._heartbeat_s:
                end(pid)
        lost = [pid for pid, name in self._services.items() if name == _GCS and has_ended(pid)]
        is_silent = self._gcs_asked_at is not None and now - self._gcs_asked_at > self._heartbeat_s
        if is_silent:
            lost = [pid for pid, name in self._services.items() if name == _GCS]
        if lost and not self._is_over.is_set():
            what = "does not answer" if is_silent else "has ended, or was stopped,"
            message = f"Ray's {_GCS} (process {lost[0]}) {what} for heartbeat_s={self._heartbeat_s:g} s"
            sys.stdout.flush()
            print(f"rl-train: {message}; go on with --resume", file=sys.stderr, flush=True)  # noqa: T201 - the last word
            os._exit(1)

    def _collect(self, hosts: dict[Any, PlacedHost], asked: dict[Any, tuple[Any, float]]) -> None:
        of = {beat: watch for watch, (beat, _) in asked.items()}
        done, _ = ray.wait([*of], num_returns=len(of), timeout=0) if of else ([], [])
        for beat in done:
            del asked[of[beat]]
            try:
                self._in_flight[of[beat]] = ray.get(beat)
            except RayError:
                self.forget(hosts[of[beat]])

    def _end(self, host: PlacedHost) -> None:
        where = host.where
        assert where is not None, "it has answered"
        self.forget(host)
        busy = self._in_flight.get(host.watch) or "no call"
        silent = f"gave no sign of life for heartbeat_s={self._heartbeat_s:g} s and was ended ({busy} in flight before)"
        self._findings[host.watch] = f"{silent}; {description_of(where)}"
        try:
            on_machine_of(where, end, where.pid)
        except RayError:
            ray.kill(host.actor)
