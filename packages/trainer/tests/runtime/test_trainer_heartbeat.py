"""Processes that are stopped or stuck are found, named with what they are at, and ended; long calls are left alone."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rl_bench.waiting import until
from rl_trainer.errors import WorkerDiedError, WorkerHungError, WorkerTimeoutError
from rl_trainer.runtime import create_runtime
from rl_trainer.runtime.base import Dispatch, ResourcePool, WorkerContext, register
from rl_trainer.runtime.processes import describe

HEARTBEAT_S = 4.0
pytestmark = [pytest.mark.timeout(400), pytest.mark.process]


class Sleeper:
    def __init__(self, context: WorkerContext) -> None:
        pass

    @register(Dispatch.RANK_ZERO)
    def process(self) -> int:
        return os.getpid()

    @register(Dispatch.RANK_ZERO)
    def sleep_and_let_others_run(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @register(Dispatch.RANK_ZERO)
    def keep_the_interpreter(self, seconds: int) -> None:
        ctypes.PyDLL(None).sleep(seconds)  # which does not give its lock back

    @register(Dispatch.RANK_ZERO)
    def wait_for_a_lock_that_nobody_gives_back(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire(timeout=300)

    @register(Dispatch.RANK_ZERO, is_urgent=True)
    def answer_beside(self) -> str:
        return threading.current_thread().name

    def add(self, number: int) -> int:
        time.sleep(0.2)
        return number + 1


@pytest.fixture(scope="module")
def runtime():
    with create_runtime("ray", timeout_s=240.0, heartbeat_s=HEARTBEAT_S) as made:
        names = ("sound", "stopped", "stuck", "other")
        made.start(
            [
                *(ResourcePool(name=name, num_workers=1, num_cpus=0.1) for name in names),
                ResourcePool(name="replica_set", num_workers=2, num_cpus=0.1),
            ]
        )
        yield made


def test_a_long_call_is_not_a_hung_process(runtime):
    group = runtime.create_group(Sleeper, "sound")
    assert group.sleep_and_let_others_run(1.5 * HEARTBEAT_S) == 1.5 * HEARTBEAT_S


def test_an_urgent_call_is_answered_beside_a_long_one(runtime):
    group = runtime.create_group(Sleeper, "sound")
    thread = threading.Thread(target=group.sleep_and_let_others_run, args=(4.0,))
    thread.start()
    time.sleep(0.5)
    assert group.answer_beside()
    assert thread.is_alive(), "the urgent call waited for the other one"
    thread.join()


@pytest.mark.promise("A call past its deadline tells where it stands")
def test_a_call_past_its_deadline_tells_where_it_stands(runtime, monkeypatch):
    group = runtime.create_group(Sleeper, "sound")
    monkeypatch.setattr(runtime.answers, "timeout_s", 2.0)
    with pytest.raises(WorkerTimeoutError, match="(?s)within 2 s; process .*wait_for_a_lock_that_nobody_gives_back"):
        group.wait_for_a_lock_that_nobody_gives_back()


def test_members_waiting_for_a_dead_group_are_not_blamed(runtime):
    other = runtime.create_group(Sleeper, "other")
    replica_set = runtime.create_replicas(Sleeper, "replica_set")
    members = replica_set.members
    threading.Timer(1.0, os.kill, (other.process(), signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(WorkerDiedError, match="a worker of pool 'other', rank 0, died during keep_the_interpreter"):
        replica_set.call(Sleeper.keep_the_interpreter, {members[0]: (3,)})
    assert time.monotonic() - start < 30
    assert "pool 'other'" in str(runtime.death(0.0))
    del runtime.answers.hosts["other"]  # for the tests that follow
    assert runtime.death(0.0) is None
    # A member that is stopped is replaced, and told of.
    until_answers(replica_set, members)
    stopped = replica_set.call(Sleeper.process, {members[1]: ()})[members[1]]
    os.kill(stopped, signal.SIGSTOP)
    answers = replica_set.call(Sleeper.add, dict.fromkeys(members, (1,)))
    assert answers[members[0]] == 2
    assert isinstance(answers[members[1]], WorkerHungError)
    assert f"process {stopped} is stopped (state T" in str(answers[members[1]])
    until(lambda: len(replica_set.members) >= 2)
    assert members[1] not in replica_set.members


def until_answers(replica_set, members):
    assert set(replica_set.call(Sleeper.add, dict.fromkeys(members, (1,))).values()) == {2}


def test_a_stopped_process_is_named_and_ended(runtime):
    group = runtime.create_group(Sleeper, "stopped")
    pid = group.process()
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(WorkerHungError) as found:
        group.sleep_and_let_others_run(1.0)
    assert time.monotonic() - start < HEARTBEAT_S + 30
    assert "a worker of pool 'stopped', rank 0, hung during Sleeper-" in str(found.value)
    assert f"gave no sign of life for heartbeat_s={HEARTBEAT_S:g} s" in str(found.value)
    assert f"process {pid} is stopped (state T" in str(found.value)
    until(lambda: describe(pid, None) == f"process {pid} has ended")
    del runtime.answers.hosts["stopped"]


@pytest.mark.promise("A process without a heartbeat is named, with its stack, and ended")
def test_a_stuck_interpreter_is_found_with_its_stack(runtime):
    group = runtime.create_group(Sleeper, "stuck")
    with pytest.raises(
        WorkerHungError, match=r"(?s)hung during Sleeper-\d+.keep_the_.*stack:.* in keep_the_interpreter"
    ):
        group.keep_the_interpreter(200)
    del runtime.answers.hosts["stuck"]


@pytest.mark.slow
def test_a_worker_s_own_session_ends_with_the_worker():
    script = "import subprocess, sys; from rl_trainer.runtime.processes import end_sessions\n"
    script += (
        "own = subprocess.Popen(['sleep', '300'], start_new_session=True); beside = subprocess.Popen(['sleep', '1'])\n"
    )
    script += "end_sessions(); print(own.wait(60), beside.wait(60))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.split() == [str(-signal.SIGKILL), "0"]


OF_RAY = """
import os, signal, sys, time
from rl_trainer.runtime.base import Dispatch, ResourcePool, register
from rl_trainer.errors import WorkerDiedError
from rl_trainer.runtime import create_runtime
from rl_trainer.runtime.processes import children

class Worker:
    def __init__(self, context):
        pass

    @register(Dispatch.RANK_ZERO)
    def sleep(self, seconds):
        time.sleep(seconds)

with create_runtime("ray", timeout_s=200, heartbeat_s=4) as runtime:
    runtime.start([ResourcePool(name="one", num_workers=1, num_cpus=0.1)])
    group = runtime.create_group(Worker, "one")
    (pid,) = children((sys.argv[1],))
    os.kill(pid, getattr(signal, sys.argv[2]))
    try:
        group.sleep(200)
    except WorkerDiedError as error:
        print("told:", error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("program", ["raylet", "gcs_server"])
def test_the_end_of_ray_itself_is_told(program, number):
    ended = subprocess.run(
        [sys.executable, "-c", OF_RAY, program, number], capture_output=True, text=True, timeout=300, check=False
    )
    if program == "raylet":
        assert "told: a worker of pool 'one', rank 0, died during " in ended.stdout, ended.stderr
        assert ended.returncode == 0
    else:
        assert ended.returncode == 1, ended.stderr
        assert ended.stderr.splitlines()[-2].startswith("rl-train: Ray's gcs_server (process ")
