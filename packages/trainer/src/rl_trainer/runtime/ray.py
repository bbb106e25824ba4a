"""Ray runtime: one host process per pool slot, as a Ray actor, with any number of colocated workers."""

from __future__ import annotations

import importlib
import itertools
import os
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_trainer.errors import PlacementError, TrainerError, WorkerDiedError
from rl_trainer.runtime.base import DISPATCH_ATTRIBUTE, Call, ReplicaSet, ResourcePool, Runtime
from rl_trainer.runtime.dispatch import Mesh, calls_of, join, spread
from rl_trainer.runtime.heartbeat import Heartbeat, PlacedHost, WorkerLocation
from rl_trainer.runtime.limits import OBJECT_STORE_BYTES, check_limits
from rl_trainer.runtime.network import check_ray_address, make_tokens
from rl_trainer.runtime.processes import children, ended_when_asked, sigterm_blocked
from rl_trainer.runtime.ray_answers import LOOK_S, Answers
from rl_trainer.runtime.ray_host import CALLS_AT_A_TIME, HEARTBEAT, Host, last_seen, reason_of
from rl_trainer.runtime.reaper import Reaper
from rl_trainer.runtime.tracing import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

R = TypeVar("R")
W = TypeVar("W")

_PLACEMENT_TIMEOUT_S = 20.0
_INIT_ATTEMPTS = 3
_START_TIMEOUT_S = 120.0
"""Seconds until a host process answers, which has nothing to load yet."""
_CLOSE_TIMEOUT_S = 20.0
_SPARE_CPUS = 16
"""CPUs of a local Ray beyond what the pools ask for: room for replica sets to grow."""
_MAX_REPLACEMENTS = 16
"""Replacements of a replica set, in all: repeated deaths have a cause that a new process does not fix."""
_JOIN_POLL_S = 0.05


class RayRuntime(Runtime):
    """Ray runtime: starts a local Ray, or joins the cluster that `RAY_ADDRESS` names.

    Every host process is watched: whichever call is under way when one of a group dies ends at once, and says so.
    """

    def __init__(self, *, timeout_s: float, heartbeat_s: float = 30.0) -> None:
        self._heartbeat = Heartbeat(heartbeat_s)
        self._pools: dict[str, ResourcePool] = {}
        self._placements: list[PlacementGroup] = []
        self.answers = Answers(self._heartbeat, timeout_s)
        """Waits for the answers of host processes."""
        self._hosts = self.answers.hosts
        self._actors: list[Any] = []
        self._replica_sets: dict[str, RayReplicas[Any]] = {}
        self._numbers = itertools.count(1)
        self._has_started_ray = False
        self._reaper: Reaper | None = None

    def start(self, pools: Sequence[ResourcePool]) -> None:
        """Reserve a placement group per pool and start its host processes."""
        if not ray.is_initialized():
            self._init_ray(pools)
        _require_room(pools)
        bundles = {pool.name: self._reserve_bundles(pool) for pool in pools}
        for pool in pools:
            self._pools[pool.name] = pool
            self._hosts[pool.name] = [
                self._launch(pool, rank, group, index) for rank, (group, index) in enumerate(bundles[pool.name])
            ]
        for name, hosts in self._hosts.items():
            places = self.answers.get(
                [host.actor.location.remote() for host in hosts], hosts, "start", _START_TIMEOUT_S
            )
            hosts[:] = in_rank_order(hosts, places)
            for host in hosts:
                self._heartbeat.watch(host)
            where = self.answers.get([hosts[0].actor.free_address.remote()], hosts[:1], "start", _START_TIMEOUT_S)[0]
            meet = [host.actor.set_rendezvous.remote(*where, host.rank) for host in hosts]
            self.answers.get(meet, hosts, f"start pool {name}", _START_TIMEOUT_S)

    def _init_ray(self, pools: Sequence[ResourcePool]) -> None:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's coming default; silences its warning
        options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
        tokens, variables = make_tokens(), environment()
        if "RAY_ADDRESS" in os.environ:
            variables |= tokens  # what is started here has them from this process
        else:
            # Roles wait for one another more than they compute, so a laptop may hold more of them than it has cores.
            wanted = sum(p.num_workers * p.num_cpus for p in pools)
            options |= {
                "address": "local",
                "num_cpus": max(int(wanted) + _SPARE_CPUS, os.cpu_count() or 1),
                "object_store_memory": OBJECT_STORE_BYTES,
            }
            self._has_started_ray = True
            _forget_token()
            # Ray runs workers at a niceness of 15, so that they would starve next to whatever else a machine does.
            os.environ.setdefault("RAY_worker_niceness", "0")
            # For the same reason each may compute on all cores; Ray would give torch one thread per reserved CPU.
            os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
        if variables:
            options["runtime_env"] = {"env_vars": variables}
        if not self._has_started_ray:
            _init_patiently(options)
            return
        self._reaper = Reaper()
        with self._reaper.marking(), sigterm_blocked():
            _init_patiently(options)
        self._heartbeat.watch_ray()

    @property
    def num_machines(self) -> int:
        """Number of nodes on which Ray has placed the pools."""
        return len({host.where.node_id for hosts in self._hosts.values() for host in hosts if host.where is not None})

    def free_address(self, pool: str) -> tuple[str, int]:
        """Host and free port on the node of rank 0."""
        host = self._hosts_of(pool)[0]
        return self.answers.get([host.actor.free_address.remote()], [host], "find a port")[0]

    def _reserve_bundles(self, pool: ResourcePool) -> list[tuple[PlacementGroup, int]]:
        """Placement group of each rank, and the bundle of it that the process gets."""
        if pool.is_elastic:
            alone = replace(pool, num_workers=1)
            return [(self._reserve(alone), 0) for _ in range(pool.num_workers)]
        group = self._reserve(pool)
        return [(group, index) for index in range(pool.num_workers)]

    def _reserve(self, pool: ResourcePool) -> PlacementGroup:
        bundle = _bundle(pool)
        name = f"{pool.name}-{os.getpid()}-{next(self._numbers)}"
        group = placement_group([bundle] * pool.num_workers, strategy="PACK", name=name)
        if not self._is_reserved(group):
            there = {k: v for k, v in ray.available_resources().items() if k in {"CPU", "GPU", pool.resource}}
            remove_placement_group(group)
            raise PlacementError(
                f"pool {pool.name!r} asks for {pool.num_workers} x {bundle}, but after {_PLACEMENT_TIMEOUT_S:.0f} s "
                f"only {there} is free"
            )
        self._placements.append(group)
        return group

    def _is_reserved(self, group: PlacementGroup) -> bool:
        """Whether Ray finds room in time, for a run that goes on."""
        deadline = time.monotonic() + _PLACEMENT_TIMEOUT_S
        with self.answers.waiting():
            while not self.answers.is_over and time.monotonic() < deadline:
                if group.wait(LOOK_S):
                    return True
        return False

    def _launch(self, pool: ResourcePool, rank: int, group: PlacementGroup, bundle: int) -> PlacedHost:
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
        options: dict[str, Any] = {
            "name": f"{pool.name}-{rank}-{os.getpid()}-{next(self._numbers)}",
            "num_cpus": pool.num_cpus,
            "num_gpus": pool.num_gpus,
            "max_concurrency": CALLS_AT_A_TIME + 1,
            "enable_task_events": False,  # of a cluster that runs already; see `create_runtime`
            "scheduling_strategy": strategy,
        }
        if pool.python is not None:
            options["runtime_env"] = {"py_executable": pool.python}
        as_actor: Any = ray.remote
        kind = type(pool.name, (Host,), {})  # by whose name `ps` shows it: ray::engine
        make = as_actor(concurrency_groups={HEARTBEAT: 1})(kind)
        ends = {"folder": str(Path.cwd()), "is_one_machine": self._has_started_ray}
        actor = make.options(**options).remote(rank, pool.num_workers, **ends)
        self._actors.append(actor)
        return PlacedHost(pool=pool, rank=rank, group=group, bundle=bundle, actor=actor, watch=actor.watch.remote())

    def _located(self, host: PlacedHost) -> PlacedHost:
        (where,) = self.answers.get([host.actor.location.remote()], [host], "start", _START_TIMEOUT_S)
        located = replace(host, where=where, devices=where.devices)
        self._heartbeat.watch(located)
        return located

    def create_group(
        self, worker: Callable[..., W], pool: str, *, mesh: Mapping[str, int] | None = None, **kwargs: Any
    ) -> W:
        """Construct one worker in every host of the pool."""
        name, hosts = self._name_of(worker), self._hosts_of(pool)
        grid = Mesh(len(hosts), mesh).check(worker)
        create = [host.actor.create.remote(name, worker, kwargs) for host in hosts]
        self.answers.get(create, hosts, f"create {name}")
        return cast("W", _RayGroup(self, name, hosts, grid, cast("type", worker)))

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
        """Construct one worker in every host of the pool, or in the first of every `ranks_per_member`."""
        name, hosts = self._name_of(worker), members_of(self._hosts_of(pool), ranks_per_member, num_members)
        if owns_pool:
            del self._hosts[pool]  # members come and go: who waits for others does not hear of them
        replica_set: RayReplicas[W] = RayReplicas(self, pool, name, worker, kwargs, owns_pool=owns_pool)
        self._replica_sets[pool] = replica_set
        replica_set.begin(hosts)
        return replica_set

    def _name_of(self, worker: Any) -> str:
        return f"{getattr(worker, '__name__', 'worker')}-{next(self._numbers)}"

    def _hosts_of(self, pool: str) -> list[PlacedHost]:
        if pool not in self._hosts:
            raise PlacementError(f"there is no pool {pool!r}; there are {sorted(self._hosts)}")
        return self._hosts[pool]

    # ---- what a replica_set asks for

    def restart_host(self, host: PlacedHost) -> PlacedHost:
        """Restart a host process that died."""
        return self._located(self._launch(host.pool, host.rank, host.group, host.bundle))

    def add_host(self, pool: str) -> PlacedHost:
        """Start one more process of a pool.

        Raises:
            PlacementError: there is no room for it.
        """
        alone = replace(self._pools[pool], num_workers=1)
        return self._located(self._launch(alone, 0, self._reserve(alone), 0))

    def end_host(self, host: PlacedHost) -> bool:
        """Close a process's workers, then end it; returns whether what it had is free for others now."""
        self._heartbeat.forget(host)
        ray.wait([host.actor.close.remote()], timeout=_CLOSE_TIMEOUT_S)
        ray.kill(host.actor)
        if host.group.bundle_count > 1:
            return False
        self._placements.remove(host.group)
        remove_placement_group(host.group)
        return True

    def death(self, within_s: float) -> Exception | None:
        """See `Runtime.death`."""
        return self.answers.death(within_s)

    def stop(self) -> None:
        """Close every worker, end the hosts, and shut down the Ray that was started here."""
        self._heartbeat.stop()
        self.answers.is_over = True
        for replica_set in self._replica_sets.values():
            replica_set.close()
        everyone = {pool: replica_set.hosts for pool, replica_set in self._replica_sets.items()} | self._hosts
        for name, hosts in everyone.items():
            references = [host.actor.close.remote() for host in hosts]
            done, late = (
                ray.wait(references, num_returns=len(references), timeout=_CLOSE_TIMEOUT_S) if hosts else ((), ())
            )
            for reference in done:
                try:
                    ray.get(reference)
                except (RayActorError, RayTaskError) as error:
                    reason = reason_of(error) if isinstance(error, RayTaskError) else error
                    message = f"pool {name!r} did not close cleanly: {str(reason).partition(chr(10))[0]}"
                    print(message)  # noqa: T201 - the last word before the processes end
            for host in hosts if late else []:
                ray.kill(host.actor)
        for actor in self._actors:  # those too that were still starting: who waits for them hears of it
            ray.kill(actor)
        self._actors.clear()
        self.answers.wait_until_quiet(_CLOSE_TIMEOUT_S)
        for group in self._placements:
            remove_placement_group(group)
        self._hosts.clear()
        self._replica_sets, self._placements, self._pools = {}, [], {}
        if self._has_started_ray:
            with ended_when_asked(children()):
                ray.shutdown()
            self._has_started_ray = False
        if self._reaper is not None:
            self._reaper.end()
            self._reaper = None


def _forget_token() -> None:
    """Make Ray read its token again: it caches the first, and the environment's may be another.

    There is no public call for it. A Ray without this one asks for the first token only, which is the usual case.
    """
    with suppress(ImportError, AttributeError):
        raylet: Any = importlib.import_module("ray._raylet")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def _init_patiently(options: dict[str, Any]) -> None:
    """Start or join Ray. It gives its own processes 30 s to answer, which a busy machine may not keep: try again."""
    reasons: list[str] = []
    is_joined = "RAY_ADDRESS" in os.environ
    if is_joined:
        check_ray_address()
    else:
        check_limits()
    while True:
        try:
            ray.init(**options)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
            ray.shutdown()
            if is_joined:
                raise PlacementError(
                    f"the Ray cluster at RAY_ADDRESS={os.environ['RAY_ADDRESS']} cannot be joined: {reasons[-1]} Look "
                    "at whether the address is right, and whether the cluster asks for a token (then set "
                    "RAY_AUTH_MODE=token, and have its ~/.ray/auth_token here)"
                ) from error
            if len(reasons) == _INIT_ATTEMPTS:
                raise PlacementError(
                    f"Ray did not start, {_INIT_ATTEMPTS} times: {reasons[-1]} Its logs are in "
                    f"{Path(tempfile.gettempdir()) / 'ray/session_latest/logs'}"
                ) from error
        else:
            return


def cluster_gpus() -> int:
    """GPUs of the cluster that `RAY_ADDRESS` names, which is joined to ask, and left again.

    Raises:
        PlacementError: there is none at that address.
    """
    is_joined = ray.is_initialized()
    if not is_joined:
        _init_patiently({"include_dashboard": False, "log_to_driver": False, "logging_level": "error"})
    try:
        return int(ray.cluster_resources().get("GPU", 0))
    finally:
        if not is_joined:
            ray.shutdown()


def in_rank_order(hosts: Sequence[PlacedHost], places: Sequence[WorkerLocation]) -> list[PlacedHost]:
    """Order host processes as ranks: by node, then by GPU.

    Ray promises no order, and neighbouring ranks are those that talk most and that share a replica.
    """

    def key(index: int) -> tuple[str, str, list[tuple[int, str]], int]:
        place = places[index]
        devices = [(int(name) if name.isdecimal() else 0, name) for name in place.devices]
        return place.node_address, place.node_id, devices, index

    order = sorted(range(len(hosts)), key=key)
    return [replace(hosts[i], rank=rank, where=places[i], devices=places[i].devices) for rank, i in enumerate(order)]


def members_of(hosts: Sequence[PlacedHost], ranks_per_member: int, num_members: int | None = None) -> list[PlacedHost]:
    """The first of every `ranks_per_member` neighbouring ranks of a node, with the GPUs of all of them.

    Ranks that no member needs are left over.

    Raises:
        PlacementError: there are fewer than `num_members` (None: as many as all ranks make) such groups.
    """
    wanted = len(hosts) // ranks_per_member if num_members is None else num_members
    nodes = [[*ranks] for _, ranks in itertools.groupby(hosts, key=lambda host: host.where and host.where.node_id)]
    groups = [node[i : i + ranks_per_member] for node in nodes for i in range(0, len(node), ranks_per_member)]
    groups = [group for group in groups if len(group) == ranks_per_member][:wanted]
    if len(groups) < wanted:
        counts = ", ".join(str(len(node)) for node in nodes)
        raise PlacementError(
            f"pool {hosts[0].pool.name!r} is to hold {wanted} replicas of {ranks_per_member} neighbouring ranks of one "
            f"node, and Ray placed {counts} ranks on its {len(nodes)} nodes, which hold {len(groups)}; make "
            "rollout.num_replicas or rollout.parallel smaller, or take larger nodes"
        )
    return [replace(group[0], devices=tuple(name for host in group for name in host.devices)) for group in groups]


_MARK = 0.001
"""Amount of a custom resource that a process takes: it is there to choose nodes, and counts nothing."""


def _bundle(pool: ResourcePool) -> dict[str, float]:
    gpus = {"GPU": pool.num_gpus} if pool.num_gpus else {}
    return {"CPU": pool.num_cpus} | gpus | ({pool.resource: _MARK} if pool.resource is not None else {})


def _require_room(pools: Sequence[ResourcePool]) -> None:
    """Refuse at once what the whole cluster could not hold if it were empty."""
    wanted: Counter[str] = Counter()
    for pool in pools:
        wanted.update({kind: count * pool.num_workers for kind, count in _bundle(pool).items()})  # pyright: ignore[reportArgumentType] - a Counter of floats
    has = ray.cluster_resources()
    largest = max((float(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]), default=0.0)
    for pool in pools:
        if pool.num_gpus > largest:
            raise PlacementError(
                f"a member of pool {pool.name!r} takes {pool.num_gpus:g} GPUs of one node, and the largest node of "
                f"the cluster has {largest:g}; make rollout.parallel smaller, or take larger nodes"
            )
    if any(count > has.get(kind, 0.0) for kind, count in wanted.items()):
        asked = ", ".join(f"{pool.name} {pool.num_workers} x {_bundle(pool)}" for pool in pools)
        there = {kind: has.get(kind, 0.0) for kind in wanted}
        raise PlacementError(
            f"the pools ask for {dict(wanted)} in all ({asked}), but the cluster has {there}; make the pools "
            "smaller, or the cluster larger"
        )


class _RayGroup:
    """The group's side of a worker class: every registered method, with the class's own signature."""

    def __init__(self, runtime: RayRuntime, name: str, hosts: list[PlacedHost], mesh: Mesh, worker: type) -> None:
        lock = threading.Lock()

        def called(method: str, call: Call, *args: Any, **kwargs: Any) -> Any:
            asked: list[PlacedHost] = []
            references: list[Any] = []
            with lock:  # ranks must see the calls of one group in one order
                for host, own in zip(hosts, spread(call, mesh, args, kwargs), strict=True):
                    if own is not None:
                        asked.append(host)
                        actor_call = host.actor.call_urgent if call.is_urgent else host.actor.call
                        references.append(actor_call.remote(name, method, *own))
            return join(call, mesh, runtime.answers.get(references, asked, f"{name}.{method}"))

        for method, call in calls_of(worker).items():
            setattr(self, method, partial(called, method, call))


class RayReplicas(ReplicaSet[W]):
    """Replica set on Ray: members are host processes of one worker each."""

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
        self._left: list[PlacedHost] = []
        self._num_replacements = 0
        self._is_closed = False
        self._news: list[str] = []
        self._last_death: Exception | None = None

    def begin(self, hosts: list[PlacedHost]) -> None:
        """Construct the first members, side by side."""
        create = [host.actor.create.remote(self._name, self._worker, self._kwargs, host.devices) for host in hosts]
        self._runtime.answers.get(create, hosts, f"create {self._name}")
        for host in hosts:
            self._hosts[next(self._numbers)] = host

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers of the members whose process lives."""
        with self._lock:
            if self._runtime.answers.is_over:  # a call would have Ray start itself anew
                return ()
            watched = {host.watch: member for member, host in self._hosts.items()}
            over, _ = ray.wait([*watched], num_returns=len(watched), timeout=0) if watched else ([], [])
            for reference in over:
                self._mark_dead(watched[reference], "while no call was in flight")
            return tuple(self._hosts)

    def call(self, method: Callable[..., R], arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, R | Exception]:
        """See `ReplicaSet.call`."""
        name, registered = method.__name__, getattr(method, DISPATCH_ATTRIBUTE, None)
        if self._runtime.answers.is_over:
            raise WorkerDiedError(f"the run was ended before {name}")
        answers: dict[int, R | Exception] = {}
        sent: dict[Any, int] = {}
        with self._lock:
            for member, own in arguments.items():
                host = self._hosts.get(member)
                if host is None:
                    answers[member] = WorkerDiedError(f"member {member} of {self._name} is not there any more")
                else:
                    is_urgent = registered is not None and registered.is_urgent
                    call = host.actor.call_urgent if is_urgent else host.actor.call
                    sent[call.remote(self._name, name, own, {})] = member

        def late(pending: list[Any]) -> str:
            seen = last_seen([self._hosts[sent[r]].where for r in pending if sent[r] in self._hosts])
            limit, members = self._runtime.answers.timeout_s, [sent[reference] for reference in pending]
            return f"members {members} of {self._name} did not finish {name} within {limit:.0f} s; {seen}"

        for done in self._runtime.answers.completed([*sent], name, self._runtime.answers.timeout_s, late):
            answers |= {sent[reference]: self._answer(reference, sent[reference], name) for reference in done}
        return answers

    def _answer(self, reference: Any, member: int, what: str) -> Any:
        try:
            return ray.get(reference)
        except RayTaskError as error:
            return reason_of(error)
        except RayActorError:
            return self._mark_dead(member, f"during {what}")

    def _mark_dead(self, member: int, when: str) -> WorkerDiedError:
        with self._lock:
            host = self._hosts.pop(member, None)
            if host is None:
                return WorkerDiedError(f"member {member} of {self._name} died {when}")
            error = self._runtime.answers.death_named(host, f"member {member} of {self._name}", when)
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
            self._runtime.answers.get(
                [host.actor.create.remote(self._name, self._worker, self._kwargs, host.devices)],
                [host],
                f"create {self._name}",
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
        deadline = time.monotonic() + self._runtime.answers.timeout_s
        while not (members := self.members):
            if not self._starting or self._runtime.answers.is_over or time.monotonic() > deadline:
                raise self._last_death or WorkerDiedError(f"{self._name} has no members")
            time.sleep(_JOIN_POLL_S)
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
                if self._left:  # what a member had that has left is still reserved
                    self._start(partial(self._runtime.restart_host, self._left.pop()))
                else:
                    self._start(partial(self._runtime.add_host, self._pool))
            for member in [*self._hosts][num_members:]:
                host = self._hosts.pop(member)
                if not self._runtime.end_host(host):
                    self._left.append(host)
                self._news.append(f"member {member} of {self._name} has left")

    def take_news(self) -> list[str]:
        """See `ReplicaSet.take_news`."""
        _ = self.members
        with self._lock:
            news, self._news = self._news, []
        return news

    def close(self) -> None:
        """Stop replacing members."""
        with self._lock:
            self._is_closed = True
        for thread in [*self._starting]:
            thread.join(5.0)

    @property
    def hosts(self) -> list[PlacedHost]:
        """Host processes of the present members."""
        return list(self._hosts.values())
