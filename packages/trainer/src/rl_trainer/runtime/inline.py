"""Everything in this process: the same groups and calls, and `breakpoint()` works."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rl_trainer.base import Dispatch, Fleet, ResourcePool, Runtime, WorkerContext, dispatch_modes, join, spread
from rl_trainer.errors import PlacementError
from rl_trainer.profiling import span

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

R = TypeVar("R")
W = TypeVar("W")


class InlineRuntime(Runtime):
    """Workers are objects of this process.

    Pools have one process each: SPMD over several ranks needs real processes.
    """

    def __init__(self) -> None:
        self._pools: set[str] = set()
        self._workers: list[Any] = []
        self._one_at_a_time = threading.Lock()

    def start(self, pools: Sequence[ResourcePool]) -> None:
        """Take the pools; nothing is reserved."""
        for pool in pools:
            if pool.num_workers != 1:
                raise PlacementError(
                    f"the inline runtime runs one worker per pool, but pool {pool.name!r} asks for {pool.num_workers}; "
                    "set its size to 1, or use runtime=ray"
                )
        self._pools = {pool.name for pool in pools}

    def create_group(self, worker: Callable[..., W], pool: str, **kwargs: Any) -> W:
        """Construct the worker here."""
        if pool not in self._pools:
            raise PlacementError(f"there is no pool {pool!r}; there are {sorted(self._pools)}")
        with self._one_at_a_time:  # constructors import lazily, and two threads inside one import fail
            instance = worker(WorkerContext(rank=0, world_size=1), **kwargs)
        self._workers.append(instance)
        return cast("W", _InlineGroup(instance))

    def create_fleet(self, worker: Callable[..., W], pool: str, *, is_alone: bool = True, **kwargs: Any) -> Fleet[W]:
        """A fleet of one, which can neither die nor grow."""
        del is_alone
        self.create_group(worker, pool, **kwargs)
        return _InlineFleet(self._workers[-1])

    def stop(self) -> None:
        """Close every worker, last created first."""
        while self._workers:
            close = getattr(self._workers.pop(), "close", None)
            if close is not None:
                close()


class _InlineFleet(Fleet[W]):
    def __init__(self, worker: Any) -> None:
        self._worker = worker

    @property
    def members(self) -> tuple[int, ...]:
        return (0,)

    def call(self, method: Callable[..., R], arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, R | Exception]:
        with span(method.__qualname__):
            return {member: method(self._worker, *own) for member, own in arguments.items()}

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
    def __init__(self, worker: Any) -> None:
        for name, mode in dispatch_modes(type(worker)).items():
            setattr(self, name, partial(_call, getattr(worker, name), mode))


def _call(method: Callable[..., Any], mode: Dispatch, *args: Any, **kwargs: Any) -> Any:
    (own,) = spread(mode, 1, args)
    with span(method.__qualname__):
        return join(mode, [method(*(own or ()), **kwargs)])
