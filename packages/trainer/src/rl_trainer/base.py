"""The controller's interface: worker classes, the groups they run in, and the runtimes that place them.

A worker is a plain class. `@register` says how a call on its group is spread over the ranks and how the answers come
back; a group has
the same methods, with the same types, as the class itself. Nothing but a runtime knows whether a rank is an object in
this process or a process on another machine.
"""

from __future__ import annotations

import itertools
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

DISPATCH_ATTRIBUTE = "__dispatch_mode__"


class Dispatch(StrEnum):
    """How a group's method reaches its ranks."""

    ONE_TO_ALL = "one_to_all"
    """The same arguments to every rank; rank 0's answer comes back."""
    RANK_ZERO = "rank_zero"
    """Rank 0 alone."""
    SPLIT = "split"
    """Arguments that can be chunked are cut over the ranks; answers are joined in rank order."""
    SPLIT_REDUCED = "split_reduced"
    """Like `split`, but the ranks have reduced their answers to the same one; rank 0's comes back."""
    GATHER = "gather"
    """The same arguments to every rank; the list of all answers, joined."""


def register(dispatch_mode: Dispatch) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a worker's method as callable on its group."""

    def mark(method: Callable[P, R]) -> Callable[P, R]:
        setattr(method, DISPATCH_ATTRIBUTE, dispatch_mode)
        return method

    return mark


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcePool:
    """Processes that worker groups are placed in.

    Groups on one pool are colocated: rank i of each lives in process i.
    """

    name: str
    """Shown in messages."""
    num_workers: int
    """Processes."""
    num_cpus: float = 1.0
    """CPUs reserved for each process."""
    num_gpus: float = 0.0
    """GPUs reserved for each process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a worker's constructor gets first."""

    rank: int
    """Position in its group."""
    world_size: int
    """Workers in its group."""


class Fleet(ABC, Generic[W]):
    """Workers of one class that know nothing of one another: any may die, be replaced, join or leave while others work.

    A member has a number that is never given again. One that died is replaced in the background, a bounded number of
    times; its successor joins under a new number.
    """

    @property
    @abstractmethod
    def members(self) -> tuple[int, ...]:
        """Numbers of those that are there, in the order in which they joined."""

    @abstractmethod
    def call(self, method: Callable[..., R], arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, R | Exception]:
        """Call a method (`Worker.method`) of some members at once, each with its own positional arguments.

        Returns:
            What each gave or raised; `WorkerDiedError` of one that died meanwhile, or before.

        Raises:
            WorkerTimeoutError: a member did not answer before the deadline.
        """

    @abstractmethod
    def wait(self) -> tuple[int, ...]:
        """The members, once there is at least one.

        Raises:
            WorkerDiedError: there is none, and none is about to join; it is the last death.
        """

    @abstractmethod
    def lose(self, member: int, error: Exception) -> None:
        """Count a member as dead, for what it looks after is gone: end its process, and replace it."""

    @abstractmethod
    def resize(self, num_members: int) -> None:
        """Start members in the background, or end those that joined last, until there are so many.

        Raises:
            PlacementError: there is no room for them.
        """

    @abstractmethod
    def take_news(self) -> list[str]:
        """What happened since the last call, in sentences: deaths with their last lines, and who joined."""


class Runtime(ABC):
    """Places worker groups and ends them.

    A context manager: leaving it stops every worker, also after an exception or Ctrl-C.
    """

    @abstractmethod
    def start(self, pools: Sequence[ResourcePool]) -> None:
        """Reserve the pools.

        Raises:
            PlacementError: they do not fit; says what is asked for and what is there.
        """

    @abstractmethod
    def create_group(self, worker: Callable[..., W], pool: str, **kwargs: Any) -> W:
        """Place one worker of a class per process of a pool and return their group, typed as the class.

        Each is constructed as `worker(context, **kwargs)`. If the class has `close()`, it is called at the end.
        """

    @abstractmethod
    def create_fleet(self, worker: Callable[..., W], pool: str, *, is_alone: bool = True, **kwargs: Any) -> Fleet[W]:
        """Place one worker of a class per process of a pool, each on its own: see `Fleet`.

        `is_alone` says that the pool is the fleet's. In one that it shares with groups, nobody is replaced and nobody
        joins: a process that dies takes all of its workers along, and the run ends.
        """

    @abstractmethod
    def stop(self) -> None:
        """End every worker and free the pools. Idempotent."""

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def dispatch_modes(worker: type) -> Mapping[str, Dispatch]:
    """The registered methods of a worker class."""
    return {
        n: getattr(m, DISPATCH_ATTRIBUTE) for n in dir(worker) if hasattr(m := getattr(worker, n), DISPATCH_ATTRIBUTE)
    }


def spread(mode: Dispatch, num_ranks: int, args: tuple[Any, ...]) -> list[tuple[Any, ...] | None]:
    """The arguments for each rank; None where a rank is not called.

    `SPLIT` cuts every argument that is a list or has `reorder` (a `BatchMeta`) into `num_ranks` contiguous parts
    whose lengths differ by at most one row; other arguments go to every rank.
    """
    if mode is Dispatch.RANK_ZERO:
        return [args, *([None] * (num_ranks - 1))]
    if mode not in {Dispatch.SPLIT, Dispatch.SPLIT_REDUCED}:
        return [args] * num_ranks
    parts = [cut(a, num_ranks) if isinstance(a, list) or hasattr(a, "reorder") else [a] * num_ranks for a in args]
    return [tuple(p[rank] for p in parts) for rank in range(num_ranks)]


def cut(argument: Any, num_parts: int) -> list[Any]:
    """A list, or what has `reorder`, in contiguous parts whose lengths differ by at most one."""
    base, longer = divmod(len(argument), num_parts)
    bounds = [rank * base + min(rank, longer) for rank in range(num_parts + 1)]
    if isinstance(argument, list):
        return [argument[a:b] for a, b in itertools.pairwise(bounds)]
    return [argument.reorder(range(a, b)) for a, b in itertools.pairwise(bounds)]


def join(mode: Dispatch, answers: Sequence[Any]) -> Any:
    """One answer out of the ranks' answers, of the same type as a single rank's."""
    first = answers[0]
    if mode in {Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO, Dispatch.SPLIT_REDUCED} or len(answers) == 1:
        return first
    if isinstance(first, list):
        return [item for answer in answers for item in answer]
    if hasattr(type(first), "concat"):
        return type(first).concat([a for a in answers if len(a)])
    raise TypeError(f"answers of type {type(first).__name__} cannot be joined; return a list or a type with concat()")
