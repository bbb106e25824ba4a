"""Ray actor that hosts workers: one process of a resource pool, and its last lines when it died. Public API only."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from rl_trainer.runtime.base import WorkerContext
from rl_trainer.runtime.heartbeat import WorkerLocation, description_of, on_machine_of
from rl_trainer.runtime.network import free_address
from rl_trainer.runtime.processes import enable_stack_dumps, end_sessions, quiet_libraries, unblock_sigterm
from rl_trainer.runtime.tracing import name_process, span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

_NUM_LINES = 20
_TAIL_BYTES = 16 * 2**10
CALLS_AT_A_TIME = 16
HEARTBEAT = "heartbeat"
"""The concurrency group of `Host.beat`: a thread that no other call can take."""


class Host:
    """Host process of a pool, as a Ray actor.

    With `is_one_machine` all of them are on this machine; `folder` is the driver's working folder.

    Each worker lives on a thread of its own: a long call does not block another worker's, and torch keeps one team of
    threads and one heap for it, where Ray's changing threads would each make their own.
    """

    def __init__(self, rank: int, world_size: int, *, folder: str, is_one_machine: bool) -> None:
        self.rank, self.world_size = rank, world_size
        self.host = "127.0.0.1" if is_one_machine else ray.util.get_node_ip_address()
        if Path(folder).is_dir():  # relative paths are those of the process that the run was started in
            os.chdir(folder)
        self.workers: dict[str, Any] = {}
        self.threads: dict[str, ThreadPoolExecutor] = {}
        self.in_flight: dict[int, tuple[str, float]] = {}
        self.numbers = itertools.count()
        self.is_over = threading.Event()
        signal.signal(signal.SIGTERM, _stay)  # a handler: SIG_IGN would be inherited by child processes
        unblock_sigterm()
        self.dumps = enable_stack_dumps()
        name_process(f"{type(self).__name__} {rank}, process {os.getpid()}")  # the runtime makes a class per pool
        quiet_libraries()

    def location(self) -> WorkerLocation:
        """Location of this process."""
        files = {Path(f"/proc/self/fd/{fd}").readlink() for fd in (1, 2)}
        logs = tuple(sorted(str(file) for file in files if file.is_file()))
        context = ray.get_runtime_context()
        return WorkerLocation(
            node_id=context.get_node_id(),
            node_address=ray.util.get_node_ip_address(),
            devices=tuple(context.get_accelerator_ids().get("GPU", ())),
            pid=os.getpid(),
            logs=logs,
            dumps=self.dumps,
        )

    @ray.method(concurrency_group=HEARTBEAT)
    def beat(self) -> str:
        """Heartbeat: the calls in flight and their seconds, while the interpreter runs."""
        now = time.monotonic()
        return ", ".join(f"{what} for {now - since:.0f} s" for what, since in list(self.in_flight.values()))

    def watch(self) -> None:
        """Block until this process is closed: a waiter learns of its death at once."""
        self.is_over.wait()

    def free_address(self) -> tuple[str, int]:
        """An address that others can meet this process at."""
        return free_address(ray.util.get_node_ip_address())

    def set_rendezvous(self, address: str, port: int, rank: int) -> None:
        """Take a rank, which is unknown before all are scheduled, and set what torch.distributed's `env://` reads."""
        self.rank = rank
        os.environ.update(
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK="0",
        )

    def create(
        self, name: str, worker: Callable[..., Any], kwargs: dict[str, Any], devices: tuple[str, ...] = ()
    ) -> None:
        """Construct a worker; one of a replica gets the GPUs of its group."""
        thread = self.threads[name] = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=unblock_sigterm)
        context = WorkerContext(rank=self.rank, world_size=self.world_size, host=self.host, devices=devices)
        self.workers[name] = thread.submit(worker, context, **kwargs).result()
        gc.collect()
        gc.freeze()  # what is there now stays: the collector need not walk all of torch again and again

    def call(self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of a worker."""
        number = next(self.numbers)
        self.in_flight[number] = f"{name}.{method}", time.monotonic()
        try:
            return self.threads[name].submit(_traced, getattr(self.workers[name], method), args, kwargs).result()
        finally:
            del self.in_flight[number]

    def call_urgent(self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a worker's urgent method on another thread, in parallel with the call in flight."""
        return getattr(self.workers[name], method)(*args, **kwargs)

    def close(self) -> None:
        """Close the workers, last created first."""
        while self.workers:
            name, worker = self.workers.popitem()
            if hasattr(worker, "close"):
                self.threads[name].submit(worker.close).result()
            self.threads.pop(name).shutdown()
        end_sessions()  # of workers that were still starting
        self.is_over.set()


def _stay(number: int, frame: FrameType | None) -> None:
    """Ignore SIGTERM: the controller ends this process once the checkpoint is written."""


def _traced(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with span(method.__qualname__):
        return method(*args, **kwargs)


def reason_of(error: RayTaskError) -> Exception:
    """The error of a call as its process raised it, without Ray's wrapper, whose text is a traceback."""
    if not isinstance(error.cause, Exception):
        return error
    error.cause.__cause__ = error
    return error.cause


def last_lines(where: WorkerLocation | None) -> str:
    """Last lines of a process's output, dead or alive, on any node."""
    if where is None:
        return "it had written nothing yet"
    try:
        text = on_machine_of(where, _tail, where.logs)
    except RayError as error:
        return f"its last lines cannot be read ({error}); they are in {', '.join(where.logs)} on its machine"
    return f"the last lines of process {where.pid}:\n{text}" if text else f"process {where.pid} wrote nothing"


def last_seen(late: Sequence[WorkerLocation | None]) -> str:
    """Error text about processes that did not answer in time: state, stacks, last lines."""
    return "; ".join(f"{description_of(where)}\n{last_lines(where)}" for where in late)


def _tail(paths: tuple[str, ...]) -> str:
    lines: list[str] = []
    for path in map(Path, paths):
        if path.is_file():
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                lines += file.read().decode(errors="replace").splitlines()
    wanted = [line for line in lines if line.strip() and not line.startswith(":")]  # Ray's own marks begin with a colon
    return "\n".join(wanted[-_NUM_LINES:])
