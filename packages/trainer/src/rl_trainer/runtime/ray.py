"""Workers as Ray actors: one host process per pool slot, in which any number of colocated workers live."""

from __future__ import annotations

import gc
import itertools
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_trainer.base import Dispatch, ResourcePool, Runtime, WorkerContext, dispatch_modes, join, spread
from rl_trainer.errors import PlacementError, WorkerDiedError, WorkerTimeoutError
from rl_trainer.profiling import environment, span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

W = TypeVar("W")

_PLACEMENT_TIMEOUT_S = 20.0
_START_TIMEOUT_S = 120.0
_OBJECT_STORE_BYTES = 256 * 2**20
"""Ray carries references and numbers here, never tensors."""


class _Host:
    """A process of a pool.

    Each worker lives on a thread of its own: a long call does not block another worker's, and torch keeps one team of
    threads and one heap for it, where Ray's changing threads would each make their own.
    """

    def __init__(self, pool: str, rank: int, world_size: int) -> None:
        self.pool, self.rank, self.world_size = pool, rank, world_size
        self.workers: dict[str, Any] = {}
        self.threads: dict[str, ThreadPoolExecutor] = {}

    def rendezvous(self) -> tuple[str, int]:
        """An address that the ranks of this pool can meet at; called on rank 0."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]

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
        thread = self.threads[name] = ThreadPoolExecutor(1, thread_name_prefix=name)
        context = WorkerContext(rank=self.rank, world_size=self.world_size)
        self.workers[name] = thread.submit(worker, context, **kwargs).result()
        gc.collect()
        gc.freeze()  # what is there now stays: the collector need not walk all of torch again and again

    def call(self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.threads[name].submit(_traced, getattr(self.workers[name], method), args, kwargs).result()

    def close(self) -> None:
        """Close the workers, last created first."""
        while self.workers:
            name, worker = self.workers.popitem()
            if hasattr(worker, "close"):
                self.threads[name].submit(worker.close).result()
            self.threads.pop(name).shutdown()


def _traced(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with span(method.__qualname__):
        return method(*args, **kwargs)


class RayRuntime(Runtime):
    """Starts a local Ray, or joins the cluster that `RAY_ADDRESS` names."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._placements: dict[str, PlacementGroup] = {}
        self._hosts: dict[str, list[Any]] = {}
        self._numbers = itertools.count(1)
        self._has_started_ray = False

    def start(self, pools: Sequence[ResourcePool]) -> None:
        """Reserve a placement group per pool and start its host processes."""
        if not ray.is_initialized():
            self._init_ray(pools)
        for pool in pools:
            self._placements[pool.name] = self._reserve(pool)
        remote_host = ray.remote(_Host)
        for pool in pools:
            strategy = partial(PlacementGroupSchedulingStrategy, placement_group=self._placements[pool.name])
            self._hosts[pool.name] = [
                remote_host.options(
                    name=f"{pool.name}-{rank}-{os.getpid()}",
                    num_cpus=pool.num_cpus,
                    num_gpus=pool.num_gpus,
                    max_concurrency=16,
                    scheduling_strategy=strategy(placement_group_bundle_index=rank),
                ).remote(pool.name, rank, pool.num_workers)
                for rank in range(pool.num_workers)
            ]
        for name, hosts in self._hosts.items():
            where = self._get([hosts[0].rendezvous.remote()], name, "start", _START_TIMEOUT_S)[0]
            self._get([h.set_rendezvous.remote(*where) for h in hosts], name, "start", _START_TIMEOUT_S)

    def _init_ray(self, pools: Sequence[ResourcePool]) -> None:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's coming default; silences its warning
        options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
        if variables := environment():
            options["runtime_env"] = {"env_vars": variables}
        if "RAY_ADDRESS" not in os.environ:
            # Roles wait for one another more than they compute, so a laptop may hold more of them than it has cores.
            wanted = sum(p.num_workers * p.num_cpus for p in pools)
            options |= {
                "address": "local",
                "num_cpus": max(int(wanted + 1), os.cpu_count() or 1),
                "object_store_memory": _OBJECT_STORE_BYTES,
            }
            self._has_started_ray = True
            # For the same reason each may compute on all cores; Ray would give torch one thread per reserved CPU.
            os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
        ray.init(**options)

    def _reserve(self, pool: ResourcePool) -> PlacementGroup:
        bundle = {"CPU": pool.num_cpus} | ({"GPU": pool.num_gpus} if pool.num_gpus else {})
        group = placement_group([bundle] * pool.num_workers, strategy="PACK", name=f"{pool.name}-{os.getpid()}")
        if not group.wait(_PLACEMENT_TIMEOUT_S):
            there = {k: v for k, v in ray.available_resources().items() if k in {"CPU", "GPU"}}
            remove_placement_group(group)
            raise PlacementError(
                f"pool {pool.name!r} asks for {pool.num_workers} x {bundle}, but after {_PLACEMENT_TIMEOUT_S:.0f} s "
                f"only {there} is free"
            )
        return group

    def create_group(self, worker: Callable[..., W], pool: str, **kwargs: Any) -> W:
        """Construct one worker in every host of the pool."""
        if pool not in self._hosts:
            raise PlacementError(f"there is no pool {pool!r}; there are {sorted(self._hosts)}")
        name = f"{getattr(worker, '__name__', 'worker')}-{next(self._numbers)}"
        hosts = self._hosts[pool]
        self._get([h.create.remote(name, worker, kwargs) for h in hosts], pool, f"create {name}", _START_TIMEOUT_S)
        return cast("W", _RayGroup(self, pool, name, hosts, cast("type", worker)))

    def _get(self, references: list[Any], pool: str, what: str, timeout_s: float | None = None) -> list[Any]:
        """Wait for all; the first failure of any rank ends the wait."""
        deadline = time.monotonic() + (timeout_s or self._timeout_s)
        pending = list(references)
        try:
            while pending:
                done, pending = ray.wait(pending, num_returns=1, timeout=max(deadline - time.monotonic(), 0))
                if not done:
                    late = [i for i, r in enumerate(references) if r in set(pending)]
                    raise WorkerTimeoutError(
                        f"rank {late} of pool {pool!r} did not finish {what} within "
                        f"{timeout_s or self._timeout_s:.0f} s"
                    )
                ray.get(done)
            return ray.get(references)
        except RayTaskError as error:
            raise error.as_instanceof_cause() from None
        except GetTimeoutError as error:
            raise WorkerTimeoutError(f"pool {pool!r} did not finish {what}") from error
        except RayActorError as error:
            raise WorkerDiedError(f"a worker of pool {pool!r} died during {what}: {error}") from error

    def stop(self) -> None:
        """Close every worker, end the hosts, and shut down the Ray that was started here."""
        for name, hosts in self._hosts.items():
            references = [h.close.remote() for h in hosts]
            done, late = ray.wait(references, num_returns=len(references), timeout=20.0)
            for reference in done:
                try:
                    ray.get(reference)
                except (RayActorError, RayTaskError) as error:
                    print(f"pool {name!r} did not close cleanly: {error}")  # noqa: T201 - the last word before the processes end
            for host in hosts if late else []:
                ray.kill(host)
        for group in self._placements.values():
            remove_placement_group(group)
        self._hosts, self._placements = {}, {}
        if self._has_started_ray:
            ray.shutdown()
            self._has_started_ray = False


class _RayGroup:
    """The group's side of a worker class: every registered method, with the class's own signature."""

    def __init__(self, runtime: RayRuntime, pool: str, name: str, hosts: list[Any], worker: type) -> None:
        self._lock = threading.Lock()
        for method, mode in dispatch_modes(worker).items():
            setattr(self, method, partial(self._call, runtime, pool, name, hosts, method, mode))

    def _call(
        self,
        runtime: RayRuntime,
        pool: str,
        name: str,
        hosts: list[Any],
        method: str,
        mode: Dispatch,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with self._lock:  # ranks must see the calls of one group in one order
            references = [
                host.call.remote(name, method, own, kwargs)
                for host, own in zip(hosts, spread(mode, len(hosts), args), strict=True)
                if own is not None
            ]
        return join(mode, runtime._get(references, pool, f"{name}.{method}"))  # pyright: ignore[reportPrivateUsage] - same module
