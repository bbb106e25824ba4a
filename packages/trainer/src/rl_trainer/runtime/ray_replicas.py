"""A replica set of Ray actors: who is there, who died, and who takes the place of whom."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from rl_trainer.errors import PlacementError, TrainerError, WorkerDiedError, WorkerTimeoutError
from rl_trainer.runtime.base import ReplicaSet
from rl_trainer.runtime.ray_host import reason_of, told_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_trainer.runtime.ray import PlacedHost, RayRuntime

R = TypeVar("R")
W = TypeVar("W")

_MAX_REPLACEMENTS = 16
"""Of a replica set, in all: what dies again and again has a reason that a new process does not mend."""
_POLL_S = 0.05


class RayReplicas(ReplicaSet[W]):
    """Members are host processes of one worker each; made by `RayRuntime.create_replicas`."""

    def __init__(
        self, runtime: RayRuntime, pool: str, name: str, worker: Callable[..., W], kwargs: Any, *, owns_pool: bool
    ) -> None:
        self._owns_pool = owns_pool
        self._runtime, self._pool, self._name = runtime, pool, name
        self._worker, self._kwargs = worker, kwargs
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._hosts: dict[int, PlacedHost] = {}
        self._starting: set[threading.Thread] = set()
        self._num_replacements = 0
        self._is_closed = False
        self._news: list[str] = []
        self._last_death: Exception | None = None

    def begin(self, hosts: list[PlacedHost]) -> None:
        """Construct the first members, side by side."""
        create = [host.actor.create.remote(self._name, self._worker, self._kwargs) for host in hosts]
        self._runtime.get(create, hosts, f"create {self._name}")
        for host in hosts:
            self._hosts[next(self._numbers)] = host

    @property
    def members(self) -> tuple[int, ...]:
        """Without those whose process has ended."""
        with self._lock:
            if self._runtime.is_over:  # a call would have Ray start itself anew
                return ()
            watched = {host.watch: member for member, host in self._hosts.items()}
            over, _ = ray.wait([*watched], num_returns=len(watched), timeout=0) if watched else ([], [])
            for reference in over:
                self._bury(watched[reference], "while nobody was calling it")
            return tuple(self._hosts)

    def call(self, method: Callable[..., R], arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, R | Exception]:
        """See `ReplicaSet.call`."""
        name = method.__name__
        if self._runtime.is_over:
            raise WorkerDiedError(f"the run was ended before {name}")
        answers: dict[int, R | Exception] = {}
        sent: dict[Any, int] = {}
        with self._lock:
            for member, own in arguments.items():
                host = self._hosts.get(member)
                if host is None:
                    answers[member] = WorkerDiedError(f"member {member} of {self._name} is not there any more")
                else:
                    sent[host.actor.call.remote(self._name, name, own, {})] = member
        deadline = time.monotonic() + self._runtime.timeout_s
        watched = self._runtime.watched()
        pending = list(sent)
        with self._runtime.waiting():
            while pending:
                done = self._runtime.first_of([*pending, *watched], deadline, name)
                if done is None:
                    late = [self._hosts[sent[r]].where for r in pending if sent[r] in self._hosts]
                    raise WorkerTimeoutError(
                        f"members {[sent[r] for r in pending]} of {self._name} did not finish {name} within "
                        f"{self._runtime.timeout_s:.0f} s; {told_of(late)}"
                    )
                if done in watched:
                    raise self._runtime.death_of(watched[done], name)
                pending.remove(done)
                answers[sent[done]] = self._answer(done, sent[done], name)
        return answers

    def _answer(self, reference: Any, member: int, what: str) -> Any:
        try:
            return ray.get(reference)
        except RayTaskError as error:
            return reason_of(error)
        except RayActorError:
            return self._bury(member, f"during {what}")

    def _bury(self, member: int, when: str) -> WorkerDiedError:
        with self._lock:
            host = self._hosts.pop(member, None)
            if host is None:
                return WorkerDiedError(f"member {member} of {self._name} died {when}")
            error = self._runtime.death_named(host, f"member {member} of {self._name}", when)
            self._replace(host, error)
            return error

    def _replace(self, host: PlacedHost, error: Exception) -> None:
        self._last_death = error
        self._news.append(str(error))
        if self._is_closed or not self._owns_pool:
            return
        if self._num_replacements == _MAX_REPLACEMENTS:
            self._news.append(f"{self._name}: {_MAX_REPLACEMENTS} members were replaced already; this one is not")
            return
        self._num_replacements += 1
        self._start(lambda: self._runtime.restart_host(host))

    def _start(self, place: Callable[[], PlacedHost]) -> None:
        thread = threading.Thread(target=lambda: self._join(place), name=f"start {self._name}", daemon=True)
        self._starting.add(thread)
        thread.start()

    def _join(self, place: Callable[[], PlacedHost]) -> None:
        try:
            host = place()
            self._runtime.get(
                [host.actor.create.remote(self._name, self._worker, self._kwargs)], [host], f"create {self._name}"
            )
        except (TrainerError, OSError, RuntimeError, ValueError) as error:
            with self._lock:
                self._last_death = error
                self._news.append(f"a new member of {self._name} did not start: {error}")
        else:
            with self._lock:
                member = next(self._numbers)
                self._hosts[member] = host
                self._news.append(f"member {member} of {self._name} has joined")
        finally:
            self._starting.discard(threading.current_thread())

    def wait(self) -> tuple[int, ...]:
        """See `ReplicaSet.wait`."""
        deadline = time.monotonic() + self._runtime.timeout_s
        while not (members := self.members):
            if not self._starting or self._runtime.is_over or time.monotonic() > deadline:
                raise self._last_death or WorkerDiedError(f"{self._name} has no members")
            time.sleep(_POLL_S)
        return members

    def lose(self, member: int, error: Exception) -> None:
        """See `ReplicaSet.lose`."""
        with self._lock:
            host = self._hosts.pop(member, None)
            if host is not None:
                ray.kill(host.actor)
                self._replace(host, WorkerDiedError(f"member {member} of {self._name} is given up: {error}"))

    def resize(self, num_members: int) -> None:
        """See `ReplicaSet.resize`."""
        with self._lock:
            if not self._owns_pool and num_members != len(self._hosts):
                raise PlacementError(
                    f"{self._name} shares the {len(self._hosts)} processes of pool {self._pool!r} with others, so it "
                    f"cannot have {num_members} members"
                )
            for _ in range(num_members - len(self._hosts) - len(self._starting)):
                place = self._runtime.reserve_host(self._pool)
                self._start(place)
            for member in [*self._hosts][num_members:]:
                host = self._hosts.pop(member)
                self._runtime.end_host(host)
                self._news.append(f"member {member} of {self._name} has left")

    def take_news(self) -> list[str]:
        """See `ReplicaSet.take_news`."""
        _ = self.members
        with self._lock:
            news, self._news = self._news, []
        return news

    def close(self) -> None:
        """Replace nobody any more."""
        with self._lock:
            self._is_closed = True
        for thread in [*self._starting]:
            thread.join(5.0)

    @property
    def hosts(self) -> list[PlacedHost]:
        """The processes of those that are there."""
        return list(self._hosts.values())
