"""A controller that is killed takes the Ray that it has started along, and all that Ray has started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_bench.waiting import until
from rl_trainer.runtime.processes import has_ended
from rl_trainer.runtime.reaper import DEATH_GRACE_S, VARIABLE, find_processes, start_time

pytestmark = pytest.mark.process

PLAIN = """
import subprocess, sys, time
from rl_trainer.runtime.reaper import Reaper
reaper = Reaper(death_grace_s=0.5)
sleep = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
with reaper.marking():
    started = [subprocess.Popen(sleep, start_new_session=True) for _ in range(2)]
bystander = subprocess.Popen(sleep, start_new_session=True)
print(bystander.pid, *[process.pid for process in started], flush=True)
if sys.argv[1] == "stop":
    reaper.end()
    print("ended", flush=True)
time.sleep(600)
"""
SHY = """
import subprocess, sys, time
from rl_trainer.runtime.reaper import LOOK_EVERY_S, Reaper
reaper = Reaper(death_grace_s=0.5)
child = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
parent = f"import subprocess, time; print(subprocess.Popen({child}, env={{}}, start_new_session=True).pid, flush=True)"
with reaper.marking():
    parent = [sys.executable, "-I", "-S", "-c", f"{parent}; time.sleep({4 * LOOK_EVERY_S})"]
    started = subprocess.Popen(parent, stdout=subprocess.PIPE, text=True)
print(started.stdout.readline().strip(), started.wait(), flush=True)
if sys.argv[1] == "stop":
    reaper.end()
time.sleep(600)
"""
RUN = """
import sys
from rl_trainer.runtime.base import ResourcePool
from rl_trainer.runtime import create_runtime
with create_runtime("ray") as runtime:
    runtime.start([ResourcePool(name="one", num_workers=2, num_cpus=0.1)])
    print(runtime._reaper._mark, flush=True)
    sys.stdin.read()
"""


def controller(script, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
    )


WAYS = ["kill", pytest.param("stop", marks=pytest.mark.slow)]


def of_run(mark):
    """Command lines of a run's processes, the reaper's too."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
            if mark.encode() in (entry / "environ").read_bytes() + line:
                found[int(entry.name)] = line.decode(errors="replace")[:80].strip()
        except OSError:
            continue
    return found


@pytest.mark.parametrize("how", WAYS)
def test_what_is_marked_ends_and_nothing_else(how):
    process = controller(PLAIN, how)
    bystander, running, stopped = map(int, process.stdout.readline().split())
    try:
        os.kill(stopped, signal.SIGSTOP)
        if how == "kill":
            process.kill()
            process.wait(10)
        else:
            assert process.stdout.readline() == "ended\n"
        until(lambda: has_ended(running) and has_ended(stopped), "a marked process is there still")
        assert not has_ended(bystander)
    finally:
        os.kill(bystander, signal.SIGKILL)
        process.kill()
        process.communicate()


@pytest.mark.promise("and what its processes have started, also without the run's mark")
@pytest.mark.parametrize("how", WAYS)
def test_an_orphan_ends_if_a_marked_process_has_started_it(how):
    process = controller(SHY, how)
    orphan, status = map(int, process.stdout.readline().split())
    assert status == 0
    try:
        if how == "kill":
            assert not has_ended(orphan)
            process.kill()
        until(lambda: has_ended(orphan), "an orphan of the run is there still")
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def sleeper():
    processes = []

    def start(**options):
        processes.append(subprocess.Popen(["sleep", "600"], **options))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_processes_are_found_by_mark_by_descent_and_by_memory(sleeper):
    child = "subprocess.Popen(['sleep', '600'], env={}, stdout=subprocess.DEVNULL)"
    script = f"import subprocess; child = {child}; print(child.pid, flush=True); input()"
    parent = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", script],
        env={VARIABLE: "one"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    child = int(parent.stdout.readline())
    other = sleeper(env={VARIABLE: "another"})
    try:
        run = find_processes(f"{VARIABLE}=one", {})
        assert set(run) == {parent.pid, child}
        assert set(find_processes("", {parent.pid: start_time(parent.pid)})) == {parent.pid, child}
        parent.communicate("\n")
        assert find_processes(f"{VARIABLE}=one", {}) == {}
        assert set(find_processes(f"{VARIABLE}=one", run)) == {child}
        another_time = {pid: start + 1 for pid, start in run.items()}  # the kernel has given the numbers away again
        assert find_processes(f"{VARIABLE}=one", another_time) == {}
        assert set(find_processes(f"{VARIABLE}=another", run)) == {child, other.pid}
    finally:
        os.kill(child, signal.SIGKILL)
        parent.kill()
        parent.communicate()


def test_a_zombie_and_a_reused_number_are_not_of_the_run(sleeper):
    process = sleeper(env={VARIABLE: "one"})
    run = find_processes(f"{VARIABLE}=one", {})
    process.kill()
    until(lambda: has_ended(process.pid))
    assert find_processes(f"{VARIABLE}=one", run) == {}, "it has not been waited for yet"
    with pytest.raises(ProcessLookupError, match=str(process.pid)):
        start_time(process.pid)


@pytest.mark.promise("A controller that is killed takes its Ray along")
@pytest.mark.timeout(300)
def test_nothing_of_ray_outlives_a_killed_controller():
    process = controller(RUN)
    mark = process.stdout.readline().strip()
    there = of_run(mark)
    assert len(there) >= 6, f"Ray is not among {there}: the test shows nothing"
    worker = next(pid for pid, line in there.items() if line == "ray::one")
    os.kill(worker, signal.SIGSTOP)  # it cannot see that it is alone
    process.kill()
    process.communicate()
    deadline = time.monotonic() + DEATH_GRACE_S + 30
    while left := of_run(mark):
        assert time.monotonic() < deadline, f"a killed controller left {left}"
        time.sleep(0.1)
