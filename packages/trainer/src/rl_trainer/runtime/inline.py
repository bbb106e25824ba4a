"""Inline runtime: all workers are objects of this process, so that `breakpoint()` works."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from rl_trainer.errors import PlacementError
from rl_trainer.runtime.base import Call, ReplicaSet, ResourcePool, Runtime, WorkerContext
from rl_trainer.runtime.dispatch import Mesh, calls_of, join, spread
from rl_trainer.runtime.network import free_address
from rl_trainer.runtime.tracing import span

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

R = TypeVar("R")
W = TypeVar("W")


class InlineRuntime(Runtime):
    """Runtime without processes: workers are objects of this one.

    Pools have one process each: SPMD over several ranks needs real processes.
    """

    def __init__(self) -> None:
        self._pools: set[str] = set()
        self._workers: list[Any] = []
        self._one_at_a_time = threading.Lock()
        self._is_over = False

    def start(self, pools: Sequence[ResourcePool]) -> None:
        """Register the pools; nothing is reserved."""
        for pool in pools:
            if pool.num_workers != 1:
                raise PlacementError(
                    f"the inline runtime runs one worker per pool, but pool {pool.name!r} asks for {pool.num_workers}; "
                    "set its size to 1, or use runtime=ray"
                )
        self._pools = {pool.name for pool in pools}
        # torch gives a thread that computes for the first time the number of threads that was set last, by whatever
        # thread: this one, which trains, takes its own before a server next to it sets what suits a small model.
        torch.get_num_threads()

    @property
    def num_machines(self) -> int:
        """Always 1."""
        return 1

    def free_address(self, pool: str) -> tuple[str, int]:
        """A free port of the loopback interface."""
        del pool
        return free_address("127.0.0.1")

    def create_group(
        self, worker: Callable[..., W], pool: str, *, mesh: Mapping[str, int] | None = None, **kwargs: Any
    ) -> W:
        """Construct the worker here."""
        if pool not in self._pools:
            raise PlacementError(f"there is no pool {pool!r}; there are {sorted(self._pools)}")
        grid = Mesh(1, mesh).check(worker)
        with self._one_at_a_time:  # constructors import lazily, and two threads inside one import fail
            instance = worker(WorkerContext(rank=0, world_size=1), **kwargs)
        self._workers.append(instance)
        if self._is_over:  # a run failed while this one still started next to it
            self.stop()
        return cast("W", _InlineGroup(instance, grid))

    def create_replicas(
        self,
        worker: Callable[..., W],
        pool: str,
        *,
        owns_pool: bool = True,
        ranks_per_member: int = 1,
        num_members: int | None = None,
        **kwargs: Any,
    ) -> ReplicaSet[W]:
        """A replica set of one, which can neither die nor grow."""
        del owns_pool, ranks_per_member, num_members
        self.create_group(worker, pool, **kwargs)
        return _InlineReplicas(self._workers[-1])

    def stop(self) -> None:
        """Close every worker, last created first."""
        self._is_over = True
        while self._workers:
            close = getattr(self._workers.pop(), "close", None)
            if close is not None:
                close()


class _InlineReplicas(ReplicaSet[W]):
    def __init__(self, worker: Any) -> None:
        self._worker = worker

    @property
    def members(self) -> tuple[int, ...]:
        return (0,)

    def call(self, method: Callable[..., R], arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, R | Exception]:
        answers: dict[int, R | Exception] = {}
        for member, own in arguments.items():
            with span(method.__qualname__):
                try:
                    answers[member] = method(self._worker, *own)
                except Exception as error:  # noqa: BLE001 - an answer
                    answers[member] = error
        return answers

    def wait(self) -> tuple[int, ...]:
        return self.members

    def lose(self, member: int, error: Exception) -> None:
        raise error

    def resize(self, num_members: int) -> None:
        if num_members != 1:
            raise PlacementError(f"the inline runtime has one worker of a kind, not {num_members}; use runtime=ray")

    def take_news(self) -> list[str]:
        return []


class _InlineGroup:
    def __init__(self, worker: Any, mesh: Mesh) -> None:
        def called(method: Callable[..., Any], call: Call, *args: Any, **kwargs: Any) -> Any:
            (own,) = spread(call, mesh, args, kwargs)
            assert own is not None, "the only rank is always called"
            with span(method.__qualname__):
                return join(call, mesh, [method(*own[0], **own[1])])

        for name, call in calls_of(type(worker)).items():
            setattr(self, name, partial(called, getattr(worker, name), call))
