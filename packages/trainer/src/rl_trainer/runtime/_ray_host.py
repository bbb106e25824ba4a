"""One process of a pool, as a Ray actor, and what it wrote when it is gone. Public Ray API only."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_trainer.base import WorkerContext
from rl_trainer.profiling import span
from rl_trainer.runtime._network import free_address

if TYPE_CHECKING:
    from collections.abc import Callable

_NUM_LINES = 20
_TAIL_BYTES = 16 * 2**10
_TAIL_TIMEOUT_S = 15.0
CALLS_AT_A_TIME = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """Where a host process is, and where its output goes."""

    node_id: str
    """Ray's name of the machine."""
    pid: int
    """Of the process."""
    logs: tuple[str, ...]
    """Files of its standard output and error, on that machine."""


class Host:
    """A process of a pool.

    With `is_alone` all of them are on this machine; `folder` is the driver's working folder.

    Each worker lives on a thread of its own: a long call does not block another worker's, and torch keeps one team of
    threads and one heap for it, where Ray's changing threads would each make their own.
    """

    def __init__(self, rank: int, world_size: int, *, folder: str, is_alone: bool) -> None:
        self.rank, self.world_size = rank, world_size
        self.host = "127.0.0.1" if is_alone else ray.util.get_node_ip_address()
        if Path(folder).is_dir():  # relative paths are those of the process that the run was started in
            os.chdir(folder)
        self.workers: dict[str, Any] = {}
        self.threads: dict[str, ThreadPoolExecutor] = {}
        self.is_over = threading.Event()

    def whereabouts(self) -> Whereabouts:
        """Where this process is."""
        files = {Path(f"/proc/self/fd/{fd}").readlink() for fd in (1, 2)}
        logs = tuple(sorted(str(file) for file in files if file.is_file()))
        return Whereabouts(node_id=ray.get_runtime_context().get_node_id(), pid=os.getpid(), logs=logs)

    def watch(self) -> None:
        """Return when this process is closed; who waits for it hears of its death at once."""
        self.is_over.wait()

    def free_address(self) -> tuple[str, int]:
        """An address that others can meet this process at."""
        return free_address(ray.util.get_node_ip_address())

    def set_rendezvous(self, address: str, port: int) -> None:
        """Set what torch.distributed's `env://` reads."""
        os.environ.update(
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK="0",
        )

    def create(self, name: str, worker: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        """Construct a worker."""
        thread = self.threads[name] = ThreadPoolExecutor(1, thread_name_prefix=name)
        context = WorkerContext(rank=self.rank, world_size=self.world_size, host=self.host)
        self.workers[name] = thread.submit(worker, context, **kwargs).result()
        gc.collect()
        gc.freeze()  # what is there now stays: the collector need not walk all of torch again and again

    def call(self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a worker."""
        return self.threads[name].submit(_traced, getattr(self.workers[name], method), args, kwargs).result()

    def close(self) -> None:
        """Close the workers, last created first."""
        while self.workers:
            name, worker = self.workers.popitem()
            if hasattr(worker, "close"):
                self.threads[name].submit(worker.close).result()
            self.threads.pop(name).shutdown()
        self.is_over.set()


def _traced(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with span(method.__qualname__):
        return method(*args, **kwargs)


def last_lines(where: Whereabouts | None) -> str:
    """What a process wrote last, also of one that is dead, on whatever machine: a sentence, then the lines."""
    if where is None:
        return "it had written nothing yet"
    if where.node_id == ray.get_runtime_context().get_node_id():
        text = _tail(where.logs)
    else:
        there = NodeAffinitySchedulingStrategy(where.node_id, soft=False)
        try:
            read = ray.remote(_tail).options(num_cpus=0, scheduling_strategy=there).remote(where.logs)
            text = ray.get(read, timeout=_TAIL_TIMEOUT_S)
        except RayError as error:
            return f"its last lines cannot be read ({error}); they are in {', '.join(where.logs)} on its machine"
    return f"the last lines of process {where.pid}:\n{text}" if text else f"process {where.pid} wrote nothing"


def _tail(paths: tuple[str, ...]) -> str:
    lines: list[str] = []
    for path in map(Path, paths):
        if path.is_file():
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                lines += file.read().decode(errors="replace").splitlines()
    wanted = [line for line in lines if line.strip() and not line.startswith(":")]  # Ray's own marks begin with a colon
    return "\n".join(wanted[-_NUM_LINES:])
