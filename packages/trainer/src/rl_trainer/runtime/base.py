"""Runtime interface of the controller: worker classes, worker groups, replica sets, resource pools.

A worker is a plain class. `@register` says how a call on its group is spread over the ranks and how the answers come
back; a group has the same methods, with the same types, as the class itself. Nothing but a runtime knows whether a
rank is an object in this process or a process on another machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")

DISPATCH_ATTRIBUTE = "__dispatch__"


class Dispatch(StrEnum):
    """Dispatch mode: how a call on a group reaches its ranks, and which answers come back."""

    ONE_TO_ALL = "one_to_all"
    """The same arguments to every rank; rank 0's answer comes back."""
    RANK_ZERO = "rank_zero"
    """Rank 0 alone."""
    SPLIT = "split"
    """Arguments that can be chunked are cut over the ranks; answers are joined in rank order."""
    SPLIT_REDUCED = "split_reduced"
    """Like `split`, but the ranks have reduced their answers to the same one; rank 0's comes back."""
    SPLIT_GROUPS = "split_groups"
    """Like `split`, but rows of one group (tag `group_id`) stay on one rank."""
    GATHER = "gather"
    """The same arguments to every rank; the list of all answers, joined."""


_ALONG_AXIS = (Dispatch.SPLIT, Dispatch.SPLIT_REDUCED, Dispatch.GATHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Dispatch of a registered method."""

    mode: Dispatch
    """Distribution of the arguments over the ranks."""
    axis: str | None = None
    """The axis of the group's mesh that it is split and collected over; None: all ranks."""
    is_urgent: bool = False
    """Whether it runs on another thread during the call in flight, not after it."""


def register(
    dispatch_mode: Dispatch, *, axis: str | None = None, is_urgent: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a worker's method as callable on its group.

    Args:
        dispatch_mode: How a call reaches the ranks.
        axis: For `split`, `split_reduced` and `gather`: an axis of the group's mesh, such as "dp". Arguments are cut
            over it; ranks that differ on other axes alone get the same part, and the first of them answers.
        is_urgent: Run on another thread, parallel to the call in flight, which it may end, and not after it.

    Raises:
        TypeError: an axis with another mode.
    """
    if axis is not None and dispatch_mode not in _ALONG_AXIS:
        raise TypeError(f"axis={axis!r} goes with {', '.join(_ALONG_AXIS)}, not with {dispatch_mode}; leave it out")

    def mark(method: Callable[P, R]) -> Callable[P, R]:
        setattr(method, DISPATCH_ATTRIBUTE, Call(mode=dispatch_mode, axis=axis, is_urgent=is_urgent))
        return method

    return mark


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcePool:
    """Resource pool: processes that worker groups are placed in.

    Groups on one pool are colocated: rank i of each lives in process i.
    """

    name: str
    """Shown in messages."""
    num_workers: int
    """Processes."""
    roles: tuple[str, ...] = ()
    """Roles whose workers live there; shown in the plan."""
    num_cpus: float = 1.0
    """CPUs reserved for each process."""
    num_gpus: float = 0.0
    """GPUs reserved for each process."""
    resource: str | None = None
    """Custom Ray resource of the nodes to choose from; None: any node."""
    python: str | None = None
    """Interpreter of the processes, of another environment; None: that of this process."""
    is_elastic: bool = False
    """Whether processes come and go: each is reserved on its own, and what one had is free when it has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Context of a worker: first argument of its constructor."""

    rank: int
    """Position in its group."""
    world_size: int
    """Workers in its group."""
    host: str = "127.0.0.1"
    """Address at which the job's other processes reach this one's machine."""
    devices: tuple[str, ...] = ()
    """GPUs of a replica, of its whole group, as CUDA_VISIBLE_DEVICES names them; empty without GPUs."""


class ReplicaSet(ABC, Generic[W]):
    """Replica set: independent workers of one class; any may die, be replaced, join or leave while others work.

    A member has a number that is never given again. One that died is replaced in the background, a bounded number of
    times; its successor joins under a new number.
    """

    @property
    @abstractmethod
    def members(self) -> tuple[int, ...]:
        """Numbers of the present members, in the order in which they joined."""

    @abstractmethod
    def call(self, method: Callable[..., R], arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, R | Exception]:
        """Call a method (`Worker.method`) of some members at once, each with its own positional arguments.

        Returns:
            What each gave or raised; `WorkerDiedError` of one that died meanwhile, or before.

        Raises:
            WorkerTimeoutError: a member did not answer before the deadline.
            WorkerDiedError: a worker of a group died meanwhile, on whose answer the members may wait.
        """

    @abstractmethod
    def wait(self) -> tuple[int, ...]:
        """The members, once there is at least one.

        Raises:
            WorkerDiedError: there is none, and none is about to join; it is the last death.
        """

    @abstractmethod
    def lose(self, member: int, error: Exception) -> None:
        """Declare a member lost, because the server that it supervises is gone: end its process and replace it."""

    @abstractmethod
    def resize(self, num_members: int) -> None:
        """Resize the set: start members in the background, or end those that joined last.

        `take_news` reports one that found no room.

        Raises:
            PlacementError: the processes are shared with others, so that none can join or leave.
        """

    @abstractmethod
    def take_news(self) -> list[str]:
        """News since the last call, in sentences: deaths with their last lines, and members that joined."""


class Runtime(ABC):
    """Runtime: places worker groups and replica sets in processes, and ends them.

    A context manager: leaving it stops every worker, also after an exception or Ctrl-C.
    """

    @abstractmethod
    def start(self, pools: Sequence[ResourcePool]) -> None:
        """Reserve the pools.

        Raises:
            PlacementError: they do not fit; says what is asked for and what is there.
        """

    @property
    @abstractmethod
    def num_machines(self) -> int:
        """Machines that the processes of started pools are on."""

    @abstractmethod
    def free_address(self, pool: str) -> tuple[str, int]:
        """Host and a free port of rank 0 of a pool."""

    @abstractmethod
    def create_group(
        self, worker: Callable[..., W], pool: str, *, mesh: Mapping[str, int] | None = None, **kwargs: Any
    ) -> W:
        """Place one worker of a class per process of a pool and return their group, typed as the class.

        Each is constructed as `worker(context, **kwargs)`. If the class has `close()`, it is called at the end.

        Args:
            worker: A class.
            pool: Name of a pool that was started.
            mesh: Sizes of the axes that registered methods name, outermost first, such as {"dp": 2, "tp": 4}.
            kwargs: For the constructor.

        Raises:
            PlacementError: no such pool, or a mesh of another size, or one that lacks an axis.
        """

    @abstractmethod
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
        """Place one worker of a class per process of a pool, each on its own: see `ReplicaSet`.

        A member of several ranks lives in the process of the first of so many neighbouring ranks of a shared pool, and
        is given the GPUs of all of them.

        Args:
            worker: A class.
            pool: Name of a pool that was started.
            owns_pool: No group shares the pool. In a shared one nobody is replaced and nobody joins: a process that
                dies takes all of its workers along, and the run ends.
            ranks_per_member: Processes of a shared pool whose GPUs one member has.
            num_members: Members in a shared pool, which may leave processes over; None: all that there is room for.
            kwargs: For the constructor.

        Raises:
            PlacementError: no such pool, or no node has the ranks of a member.
        """

    def death(self, within_s: float) -> Exception | None:
        """Death of a worker that is not replaced, if one is found within the time: others may fail because of it.

        None where workers are not processes.
        """
        del within_s
        return None

    @abstractmethod
    def stop(self) -> None:
        """End every worker and free the pools. Idempotent."""

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
