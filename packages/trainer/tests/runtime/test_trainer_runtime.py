"""Worker groups on both runtimes; the Ray ones are real Ray processes."""

import gc
import os
import re
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rl_bench.waiting import until
from rl_tq.types import BatchMeta
from rl_trainer.errors import PlacementError, WorkerDiedError, WorkerTimeoutError
from rl_trainer.runtime import create_runtime
from rl_trainer.runtime.base import Call, Dispatch, ResourcePool, WorkerContext, register
from rl_trainer.runtime.dispatch import Mesh, join, spread
from rl_trainer.runtime.inline import InlineRuntime
from rl_trainer.runtime.network import free_address
from rl_trainer.runtime.processes import children, rare_collections
from rl_trainer.runtime.ray import RayRuntime, _init_patiently


def test_a_port_that_is_found_is_given_to_nobody_else_meanwhile():
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    with ExitStack() as stack:
        for _ in range(20):
            host, port = free_address("127.0.0.1")
            assert not low <= port <= high, "the kernel may give it to whoever asks for any port"
            stack.enter_context(socket.create_server((host, port)))


def test_garbage_is_collected_as_before_after_a_start():
    before, first, second = gc.get_threshold(), rare_collections(), rare_collections()
    first.__enter__()
    second.__enter__()
    assert gc.get_threshold()[0] > 10 * before[0]
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)  # of two starts that overlap in threads
    assert gc.get_threshold() == before


class Counter:
    def __init__(self, context: WorkerContext, *, start: int) -> None:
        self.context, self.value, self.is_closed = context, start, False

    @register(Dispatch.ONE_TO_ALL)
    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    @register(Dispatch.SPLIT)
    def squares(self, numbers: list[int], offset: int) -> list[int]:
        return [n * n + offset + 100 * self.context.rank for n in numbers]

    @register(Dispatch.GATHER)
    def processes(self) -> list[int]:
        return [os.getpid()]

    @register(Dispatch.RANK_ZERO)
    def thread(self) -> int:
        return threading.get_ident()

    @register(Dispatch.RANK_ZERO)
    def fail(self, kind: str) -> None:
        if kind == "error":
            raise ValueError("seven is not allowed")
        if kind == "die":
            sys.stderr.write("farewell\n")
            sys.stderr.flush()
            os._exit(3)
        time.sleep(30)

    def close(self) -> None:
        self.is_closed = True


def meta(count):
    return BatchMeta(partition="p", sample_ids=tuple(f"s{i}" for i in range(count)), columns=("c",))


def call(mode, axis=None):
    return Call(mode=mode, axis=axis)


def test_spread_cuts_what_can_be_cut():
    seven, two, three = [1, 2, 3, 4, 5, 6, 7], Mesh(2), Mesh(3)
    cuts = [([1, 2, 3], "x"), ([4, 5], "x"), ([6, 7], "x")]
    assert spread(call(Dispatch.SPLIT), three, (seven, "x"), {}) == [(args, {}) for args in cuts]
    by_name = [((), {"a": a, "b": b}) for a, b in cuts]
    assert spread(call(Dispatch.SPLIT), three, (), {"a": seven, "b": "x"}) == by_name
    parts = [own[0][0] for own in spread(call(Dispatch.SPLIT), two, (meta(5),), {})]
    assert [len(p) for p in parts] == [3, 2]
    assert join(call(Dispatch.SPLIT), two, parts).sample_ids == meta(5).sample_ids
    assert spread(call(Dispatch.RANK_ZERO), two, (1,), {}) == [((1,), {}), None]
    assert spread(call(Dispatch.ONE_TO_ALL), two, (1,), {"b": [2]}) == [((1,), {"b": [2]})] * 2
    with pytest.raises(TypeError, match="answers of type int cannot be joined"):
        join(call(Dispatch.SPLIT), two, [1, 2])
    with pytest.raises(TypeError, match="axis='dp' goes with split, split_reduced, gather, not with rank_zero"):
        register(Dispatch.RANK_ZERO, axis="dp")


@pytest.mark.parametrize(
    ("groups", "parts"),
    [
        ([7, 7, 7, 3, 3, 3, 5, 5, 5], [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        ([7, 3, 7, 3], [[0, 2], [], [1, 3]]),
        ([7] * 9, [[], [*range(9)], []]),
        ([7, 7, 7, 7, 7, 7, 3, 5, 5], [[], [0, 1, 2, 3, 4, 5], [6, 7, 8]]),
    ],
)
def test_a_group_stays_on_one_rank(groups, parts):
    batch = BatchMeta(
        partition="p",
        sample_ids=tuple(map(str, range(len(groups)))),
        columns=("c",),
        tags=tuple({"group_id": g} for g in groups),
    )
    found = [own[0][0] for own in spread(call(Dispatch.SPLIT_GROUPS), Mesh(3), (batch, "x"), {})]
    assert [[int(name) for name in part.sample_ids] for part in found] == parts
    assert {*join(call(Dispatch.SPLIT_GROUPS), Mesh(3), found).sample_ids} == {*batch.sample_ids}


@pytest.mark.parametrize(
    ("axes", "parts", "leaders"),
    [
        ({"dp": 2, "tp": 2}, [[1, 2], [1, 2], [3], [3]], [0, 2]),
        ({"tp": 2, "dp": 2}, [[1, 2], [3], [1, 2], [3]], [0, 1]),
        ({"pp": 2, "dp": 2, "tp": 2}, [[1, 2], [1, 2], [3], [3]] * 2, [0, 2]),
        ({"dp": 4}, [[1], [2], [3], []], [0, 1, 2, 3]),
    ],
)
def test_an_axis_of_a_mesh_by_hand(axes, parts, leaders):
    mesh = Mesh(len(parts), axes)
    along = call(Dispatch.SPLIT, "dp")
    assert [own[0][0] for own in spread(along, mesh, ([1, 2, 3],), {})] == parts
    assert join(along, mesh, [[rank] for rank in range(len(parts))]) == leaders
    assert join(call(Dispatch.GATHER, "dp"), mesh, [[rank] for rank in range(len(parts))]) == leaders
    assert join(call(Dispatch.SPLIT_REDUCED, "dp"), mesh, [*range(len(parts))]) == 0


class Probe:
    """Worker of which `RuntimeConformance` places a group."""

    def __init__(self, context: WorkerContext, *, offset: int, closed: str) -> None:
        self._context, self._offset, self._closed = context, offset, closed

    @register(Dispatch.SPLIT)
    def shift(self, numbers: list[int], by: int) -> list[int]:
        """Each number plus `by` and the offset."""
        return [n + by + self._offset for n in numbers]

    @register(Dispatch.ONE_TO_ALL)
    def remember(self, value: int) -> int:
        """Set the offset on every rank; returns the rank."""
        self._offset = value
        return self._context.rank

    @register(Dispatch.GATHER)
    def ranks(self) -> list[int]:
        """Every rank."""
        return [self._context.rank]

    @register(Dispatch.GATHER)
    def processes(self) -> list[int]:
        """Every rank's process."""
        return [os.getpid()]

    @register(Dispatch.RANK_ZERO)
    def fail(self) -> None:
        """Raise."""
        raise LookupError("no such thing")

    def close(self) -> None:
        """Leave a trace."""
        Path(self._closed).touch()


class Adder:
    """Worker of which `RuntimeConformance` places a replica set."""

    def __init__(self, context: WorkerContext, *, offset: int) -> None:
        del context
        self._offset = offset

    def shift(self, number: int) -> int:
        """A number plus the offset; 0 is refused."""
        if number == 0:
            raise LookupError("no such number")
        return number + self._offset


class RuntimeConformance:
    """Conformance suite of runtimes: subclass it in a test module and say how a runtime is made."""

    num_workers = 1
    """Processes of the pool that the suite asks for."""

    def _started(self):
        runtime = self.make_runtime()
        try:
            runtime.start([ResourcePool(name="pool", num_workers=self.num_workers, num_cpus=0.5)])
        except BaseException:
            runtime.stop()
            raise
        return runtime

    def test_a_group_has_the_worker_s_methods_and_closes_at_the_end(self, tmp_path: Path) -> None:
        """Calls reach the ranks that their mode names, answers come back in rank order, and `close` runs."""
        closed, count = tmp_path / "closed", self.num_workers
        with self._started() as runtime:
            assert runtime.num_machines >= 1
            host, port = runtime.free_address("pool")
            assert host, "the host of a free address is empty"
            assert 0 < port < 1 << 16, f"{port} is no port"
            group = runtime.create_group(Probe, "pool", offset=1, closed=str(closed))
            assert group.ranks() == list(range(count))
            assert group.shift([1, 2, 3, 4, 5], by=10) == [12, 13, 14, 15, 16]
            assert group.remember(100) == 0, "one_to_all gives rank 0's answer"
            assert group.shift([1, 2, 3], by=0) == [101, 102, 103], "one_to_all reaches every rank"
            other = runtime.create_group(Probe, "pool", offset=7, closed=str(closed))
            assert other.processes() == group.processes(), "groups on one pool share its processes"
            assert (other.shift([1], by=0), group.shift([1], by=0)) == ([8], [101]), "each has workers of its own"
            with pytest.raises(LookupError, match="no such thing"):
                group.fail()
            with pytest.raises(PlacementError, match=r"there is no pool 'elsewhere'; there are \['pool'\]"):
                runtime.create_group(Probe, "elsewhere", offset=0, closed="")
            with pytest.raises(PlacementError):
                runtime.create_group(Probe, "pool", mesh={"dp": count + 1}, offset=0, closed=str(closed))
            assert not closed.exists(), "a worker was closed before the end"
        assert closed.exists(), "no worker was closed"
        runtime.stop()  # once more does nothing

    def test_replica_set_members_answer_alone_and_end_with_the_run(self, tmp_path: Path) -> None:
        """Each member has arguments of its own; what one raises is its answer; an exception ends the workers too."""
        closed = tmp_path / "closed"

        def fail_in_between() -> None:
            with self._started() as runtime:
                runtime.create_group(Probe, "pool", offset=0, closed=str(closed))
                replica_set = runtime.create_replicas(Adder, "pool", owns_pool=False, offset=10)
                assert replica_set.wait() == replica_set.members
                assert len(replica_set.members) == self.num_workers
                answers = replica_set.call(Adder.shift, {member: (member + 1,) for member in replica_set.members})
                assert answers == {member: member + 11 for member in replica_set.members}
                *_, last = replica_set.members
                refused = replica_set.call(Adder.shift, {last: (0,)})
                assert list(refused) == [last], "nobody else was asked"
                assert isinstance(refused[last], LookupError), "what a member raises is its answer"
                assert all(isinstance(line, str) for line in replica_set.take_news())
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail_in_between()
        assert closed.exists(), "an exception left the workers behind"


class TestInline(RuntimeConformance):
    def make_runtime(self):
        return create_runtime("inline")


def test_inline_refuses_several_ranks():
    with create_runtime("inline") as runtime, pytest.raises(PlacementError, match="pool 'pool' asks for 2"):
        runtime.start([ResourcePool(name="pool", num_workers=2)])


@pytest.fixture(scope="module")
def ray_runtime():
    with create_runtime("ray", timeout_s=240.0) as runtime:
        runtime.start(
            [
                ResourcePool(name="two", num_workers=2, num_cpus=0.5),
                *(ResourcePool(name=name, num_workers=1, num_cpus=0.1) for name in ("one", "slow", "idle")),
                ResourcePool(name="replica_set", num_workers=2, num_cpus=0.1),
            ]
        )
        yield runtime


@pytest.mark.process
@pytest.mark.usefixtures("ray_runtime")
class TestRay(RuntimeConformance):
    """On the Ray of `ray_runtime`, as every test of this file."""

    num_workers = 2

    def make_runtime(self):
        return create_runtime("ray", timeout_s=240.0)


@pytest.mark.slow
def test_a_second_run_of_a_process_has_another_token(monkeypatch):
    """Ray keeps the first one in its own memory."""
    for _ in range(2):
        monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
        with create_runtime("ray", timeout_s=240.0) as runtime:
            runtime.start([ResourcePool(name="one", num_workers=1, num_cpus=0.1)])
            assert runtime.create_group(Counter, "one", start=1).add(1) == 2


@pytest.mark.process
def test_ray_groups_share_the_processes_of_their_pool(ray_runtime):
    first = ray_runtime.create_group(Counter, "two", start=1)
    second = ray_runtime.create_group(Counter, "two", start=100)
    assert first.processes() == second.processes()
    assert len(set(first.processes())) == 2
    assert os.getpid() not in first.processes()
    assert first.add(1) == 2
    assert second.add(1) == 101


@pytest.mark.process
def test_ray_keeps_a_worker_on_one_thread_of_its_own(ray_runtime):
    first, second = (ray_runtime.create_group(Counter, "two", start=0) for _ in range(2))
    threads = {first.thread() for _ in range(20)}
    assert len(threads) == 1
    assert second.thread() not in threads


def resident_kib(program):
    """Of a child process of this one."""
    (pid,) = children((program,))
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


@pytest.mark.promise("gcs_server does not grow with calls")
@pytest.mark.process
def test_ray_s_own_server_does_not_grow_with_calls(ray_runtime):
    """With Ray's defaults 3,000 calls leave 11 MB of task events in gcs_server."""
    counter = ray_runtime.create_group(Counter, "one", start=0)
    for _ in range(300):
        counter.add(1)
    before = resident_kib("gcs_server")
    for _ in range(3000):
        counter.add(1)
    assert resident_kib("gcs_server") - before < 2048


@pytest.mark.promise("A group of workers has the same methods on `inline` and `ray`")
@pytest.mark.process
def test_ray_splits_and_joins_in_rank_order(ray_runtime):
    group = ray_runtime.create_group(Counter, "two", start=0)
    assert group.squares([1, 2, 3], 0) == [1, 4, 109]
    assert group.squares(numbers=[1, 2, 3], offset=0) == [1, 4, 109]


class _Waits:
    """Ray's calls, of answers that come a share at a time; counts the references that it is given."""

    def __init__(self, ready_at_a_time):
        self.ready, self.step, self.num_given = 0, ready_at_a_time, 0

    def wait(self, references, *, num_returns, timeout):
        self.num_given += len(references)
        self.ready += self.step if num_returns > 1 else 0
        done = [r for r in references if r < self.ready or (num_returns == 1 and r == references[0])][:num_returns]
        return done, [r for r in references if r not in {*done}]

    def get(self, reference):
        return -reference


@pytest.mark.promise("Waiting for all ranks of a group takes no work that grows as their square")
@pytest.mark.parametrize("ready_at_a_time", [1024, 128])
def test_the_work_of_a_wait_grows_linearly_with_ranks(monkeypatch, ready_at_a_time):
    waits, num_ranks = _Waits(ready_at_a_time), 1024
    monkeypatch.setattr("rl_trainer.runtime.ray_answers.ray", waits)
    runtime = RayRuntime(timeout_s=5.0)
    answers = runtime.answers.get(
        [*range(num_ranks)], [SimpleNamespace(rank=rank) for rank in range(num_ranks)], "a call"
    )
    assert answers == [-rank for rank in range(num_ranks)]
    assert waits.num_given <= 2 * num_ranks * num_ranks / ready_at_a_time


class Meshed:
    def __init__(self, context: WorkerContext) -> None:
        self.rank = context.rank

    @register(Dispatch.SPLIT, axis="dp")
    def seen(self, numbers: list[int]) -> list[tuple[int, list[int]]]:
        return [(self.rank, numbers)]

    @register(Dispatch.GATHER, axis="tp")
    def shards(self) -> list[int]:
        return [self.rank]


@pytest.mark.process
def test_ray_splits_and_collects_over_a_named_axis_of_the_mesh(ray_runtime):
    over_dp = ray_runtime.create_group(Meshed, "two", mesh={"dp": 2, "tp": 1})
    assert over_dp.seen([1, 2, 3]) == [(0, [1, 2]), (1, [3])]
    assert over_dp.shards() == [0]
    over_tp = ray_runtime.create_group(Meshed, "two", mesh={"dp": 1, "tp": 2})
    assert over_tp.seen([1, 2, 3]) == [(0, [1, 2, 3])]
    assert over_tp.shards() == [0, 1]
    with pytest.raises(PlacementError, match="has 4 ranks, but the group has 2"):
        ray_runtime.create_group(Meshed, "two", mesh={"dp": 2, "tp": 2})
    with pytest.raises(PlacementError, match=r"Meshed.shards goes along axis 'tp', but .* has \['dp'\]"):
        ray_runtime.create_group(Meshed, "two", mesh={"dp": 2})


def test_inline_keeps_the_trainer_s_threads_next_to_a_server():
    def in_a_new_thread(call):
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(call).result()

    def start_and_count():
        with InlineRuntime() as runtime:
            runtime.start([ResourcePool(name="pool", num_workers=1)])
            in_a_new_thread(lambda: torch.set_num_threads(1))
            return torch.get_num_threads()

    before = torch.get_num_threads()
    try:
        in_a_new_thread(lambda: torch.set_num_threads(3))
        assert in_a_new_thread(start_and_count) == 3
    finally:
        in_a_new_thread(lambda: torch.set_num_threads(before))


def test_inline_has_the_same_modes():
    with create_runtime("inline") as runtime:
        runtime.start([ResourcePool(name="pool", num_workers=1)])
        assert runtime.create_group(Counter, "pool", start=0).squares(numbers=[3], offset=1) == [10]
        assert runtime.create_group(Meshed, "pool", mesh={"dp": 1, "tp": 1}).seen([1, 2]) == [(0, [1, 2])]
        with pytest.raises(PlacementError, match="the group's mesh has no axes; give create_group a mesh"):
            runtime.create_group(Meshed, "pool")


@pytest.mark.process
def test_ray_gives_the_worker_s_own_error_type(ray_runtime):
    group = ray_runtime.create_group(Counter, "two", start=0)
    with pytest.raises(ValueError, match="seven is not allowed"):
        group.fail("error")


@pytest.mark.process
def test_ray_ends_a_wait_at_its_deadline_and_names_the_rank(ray_runtime, monkeypatch):
    group = ray_runtime.create_group(Counter, "two", start=0)
    monkeypatch.setattr(ray_runtime.answers, "timeout_s", 1.0)
    with pytest.raises(
        WorkerTimeoutError, match=r"rank \[0\] of pool 'two' did not finish Counter-\d+.fail within 1 s"
    ):
        group.fail("hang")


@pytest.mark.process
def test_ray_tells_of_a_dead_worker_at_once(ray_runtime):
    group = ray_runtime.create_group(Counter, "one", start=0)
    start = time.monotonic()
    with pytest.raises(
        WorkerDiedError, match="a worker of pool 'one', rank 0, died during Counter-\\d+.fail(?s:.*)farewell"
    ):
        group.fail("die")
    assert time.monotonic() - start < 30
    del ray_runtime.answers.hosts["one"]  # for the tests that follow


class Slow:
    def __init__(self, context: WorkerContext) -> None:
        sys.stderr.write("still looking for the model\n")
        sys.stderr.flush()
        time.sleep(30)


@pytest.mark.process
def test_ray_shows_what_a_worker_wrote_that_does_not_get_ready(ray_runtime, monkeypatch):
    ray_runtime.create_group(Counter, "slow", start=0)  # so that what it imports is there
    monkeypatch.setattr(ray_runtime.answers, "timeout_s", 4.0)
    with pytest.raises(
        WorkerTimeoutError, match=r"did not finish create Slow-\d+ within 4 s(?s:.*)still looking for the"
    ):
        ray_runtime.create_group(Slow, "slow")


@pytest.mark.process
def test_ray_tells_of_a_death_whoever_is_being_called(ray_runtime):
    """An idle worker's death ends the wait for another pool."""
    idle = ray_runtime.create_group(Counter, "idle", start=0)
    busy = ray_runtime.create_group(Counter, "two", start=0)
    threading.Timer(1.0, os.kill, (idle.processes()[0], signal.SIGKILL)).start()
    with pytest.raises(WorkerDiedError, match="a worker of pool 'idle', rank 0, died during Counter-\\d+.fail"):
        busy.fail("hang")
    del ray_runtime.answers.hosts["idle"]  # for the tests that follow


class Member:
    """A member of a replica_set."""

    def __init__(self, context: WorkerContext, *, start: int) -> None:
        self.start = start

    def where(self) -> int:
        return os.getpid()

    def add(self, amount: int) -> int:
        if amount < 0:
            raise ValueError("only upwards")
        return self.start + amount

    def die(self) -> None:
        sys.stderr.write("out of luck\n")
        sys.stderr.flush()
        os._exit(9)


@pytest.mark.slow
def test_ray_fleet_members_die_are_replaced_join_and_leave(ray_runtime):
    replica_set = ray_runtime.create_replicas(Member, "replica_set", start=10)
    assert replica_set.members == (0, 1)
    assert replica_set.call(Member.add, {0: (1,), 1: (2,)}) == {0: 11, 1: 12}
    answers = replica_set.call(Member.add, {0: (-1,), 1: (5,)})
    assert isinstance(answers[0], ValueError)
    assert answers[1] == 15
    answers = replica_set.call(Member.die, {1: ()})
    assert isinstance(answers[1], WorkerDiedError)
    assert "out of luck" in str(answers[1])
    assert isinstance(replica_set.call(Member.add, {1: (1,)})[1], WorkerDiedError)
    until(lambda: replica_set.members == (0, 2))
    assert replica_set.call(Member.add, {2: (1,)}) == {2: 11}
    os.kill(replica_set.call(Member.where, {0: ()})[0], signal.SIGKILL)  # nobody calls it
    until(lambda: replica_set.members == (2, 3))
    replica_set.lose(3, replica_set.call(Member.add, {3: (-1,)})[3])
    until(lambda: replica_set.members == (2, 4))
    replica_set.resize(3)
    until(lambda: replica_set.members == (2, 4, 5))
    replica_set.resize(1)
    assert replica_set.members == (2,)
    assert replica_set.wait() == (2,)
    news = "\n".join(replica_set.take_news())
    for told in (
        "member 1 of Member",
        "out of luck",
        "member 2 of",
        " is given up: only upwards\n",
        "member 5 of",
        "has left",
    ):
        assert told in news
    assert replica_set.take_news() == []


def test_a_ray_that_does_not_start_is_tried_again_and_then_told(monkeypatch):
    import ray

    tries = []

    def init(**options):
        tries.append(options)
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(PlacementError, match="Ray did not start, 3 times: Exception: The current node timed out"):
        _init_patiently({"address": "local"})
    assert tries == [{"address": "local"}] * 3


@pytest.mark.process
def test_ray_says_at_once_what_the_cluster_could_never_hold(ray_runtime):
    with pytest.raises(PlacementError, match=r"ask for \{'CPU': 20000.*\} in all \(huge 2 x .*but the cluster has"):
        ray_runtime.start([ResourcePool(name="huge", num_workers=2, num_cpus=10_000)])


@pytest.mark.process
def test_ray_says_what_does_not_fit(ray_runtime, monkeypatch):
    monkeypatch.setattr("rl_trainer.runtime.ray._PLACEMENT_TIMEOUT_S", 1.0)
    with pytest.raises(PlacementError, match=r"pool 'huge' asks for 1 x \{'CPU': 10000"):
        ray_runtime._reserve(ResourcePool(name="huge", num_workers=1, num_cpus=10_000))
