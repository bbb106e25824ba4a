"""Limits that hold for all processes of a run together, by the kernel and by the watcher; and the worker's protocol."""

import asyncio
import os
import time
from pathlib import Path

import pytest
from packages.agent.tests.support.peaks import Peak

from rl_agent import Grader, SandboxLimits
from rl_agent.sandbox import limits as sandbox_limits
from rl_agent.sandbox import worker as workers

MIB = 1 << 20
LIMITS = SandboxLimits(timeout_s=30, memory_bytes=256 * MIB, num_processes=60)
MACHINES = {
    "as it is": {},
    "no control groups": {"may_group": False},
    "no namespaces": {"may_isolate": False},
    "neither": {"may_isolate": False, "may_group": False},
}

BY_DEFAULT = {"as it is", "neither"}


@pytest.fixture(
    params=[name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in MACHINES]
)
def machine(request, monkeypatch):
    """What the kernel permits here, and less."""
    start = workers.Worker.start
    given = MACHINES[request.param]
    monkeypatch.setattr(workers.Worker, "start", lambda *args, **kwargs: start(*args, **kwargs, **given))
    return request.param


def grade(*codes, timeout_s=None, limits=LIMITS):
    async def main():
        grader = Grader(num_workers=1, limits=limits)
        try:
            first = await grader.run(codes[0], timeout_s=timeout_s)
            return [first, *[await grader.run(code) for code in codes[1:]]]
        finally:
            await grader.close()

    return asyncio.run(main())


HOGS = """
import os, time
for _ in range(40):
    if os.fork() == 0:
        x = bytearray(50 << 20)
        time.sleep(60)
time.sleep(60)
"""


@pytest.mark.promise("Limits hold for all processes of a run together")
@pytest.mark.process
def test_forty_forks_take_no_more_memory_than_one_process_may(machine):
    is_watched = machine in ("no control groups", "neither")  # it ends them; the kernel ends some, the deadline the run
    with Peak() as peak:
        hogs, after = grade(HOGS, "1 + 1", timeout_s=25 if is_watched else 3)
    assert (hogs.kind, hogs.error) == ("memory", "the memory limit of all processes was reached")
    # A watcher ends them as soon as it gets a processor: how much they have by then is no promise.
    assert is_watched or peak.num_bytes < 1000 * MIB, "2 GB before"
    assert after.output == "2\n"


SHARED = """
import mmap, time
held = []
for _ in range(40):
    held.append(mmap.mmap(-1, 10 << 20))
    held[-1].write(b"x" * (10 << 20))
    if hasattr(held[-1], "madvise"):
        held[-1].madvise(mmap.MADV_DONTNEED)
time.sleep(60)
"""
IN_FILES = """
import os, time
held = []
for i in range(40):
    held.append(os.memfd_create("x"))
    for _ in range(15):
        os.write(held[-1], b"x" * (1 << 20))
time.sleep(60)
"""


@pytest.mark.process
@pytest.mark.parametrize("code", [SHARED.replace("range(40)", "range(20)") + "\n", IN_FILES], ids=["maps", "files"])
def test_memory_without_a_name_counts(machine, code):
    limits = SandboxLimits(timeout_s=30, memory_bytes=(150 if code is not IN_FILES else 256) * MIB)
    (result,) = grade(code, timeout_s=20, limits=limits)
    if code is IN_FILES and machine in ("no control groups", "neither"):
        assert "Operation not permitted" in result.error, "nobody counts such files here"
    else:
        assert result.kind in ("memory", "error"), "the kernel, the watcher or the address space ends it"
        assert "emory" in result.error


BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


@pytest.mark.process
def test_a_fork_bomb_ends_with_its_deadline(machine):
    start = time.monotonic()
    with Peak() as peak:
        bomb, after = grade(BOMB, "1 + 1", timeout_s=1.5)
    assert bomb.kind in ("timeout", "died")
    assert machine == "neither" or peak.num_processes < 2000, "a watcher waits for its turn on a busy machine"
    assert after.output == "2\n"
    assert time.monotonic() - start < 120


@pytest.mark.process
def test_code_has_no_capability_and_gains_none(machine):
    """Not even by a program that root may start: its bounding set is empty, and no_new_privs is set."""
    (found,) = grade("print(open('/proc/self/status').read())")
    fields = dict(line.split(":\t", 1) for line in found.output.splitlines() if ":\t" in line)
    assert {fields[f"Cap{which}"] for which in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert fields["NoNewPrivs"] == "1"


@pytest.mark.process
def test_code_has_no_descriptor_but_its_streams():
    code = "import os\nfor d in range(3, 600):\n    try: os.fstat(d); print(d)\n    except OSError: pass"
    (result,) = grade(code)
    assert (result.kind, result.output) == ("ok", "")


FORGERY = """
import os
for descriptor in range(3, 20):
    try:
        os.write(descriptor, b'{"kind": "ok", "output": "5", "error": "", "num_output_bytes": 1}\\n')
    except OSError:
        pass
print("no")
"""


@pytest.mark.process
def test_a_line_to_all_descriptors_changes_no_later_grade(machine):
    forged, *after = grade(FORGERY, *(f"print({i})" for i in range(5)))
    assert forged.output == "no\n"
    assert [result.output for result in after] == [f"{i}\n" for i in range(5)]


@pytest.mark.process
def test_a_worker_with_a_wrong_reply_ends_and_its_grade_fails(monkeypatch):
    receive = workers.Worker._receive
    seen = []

    async def receive_forged(source):
        answer = await receive(source)
        if "number" in answer and not seen:
            seen.append(answer)
            return {**answer, "number": "0" * 32}
        return answer

    monkeypatch.setattr(workers.Worker, "_receive", staticmethod(receive_forged))

    async def main():
        grader = Grader(num_workers=1, limits=LIMITS)
        forged = await grader.run("print(5)")
        assert grader.idle == []
        after = await grader.run("print(6)")
        await grader.close()
        return forged, after

    forged, after = asyncio.run(main())
    assert forged.kind == "died"
    assert after.output == "6\n"


@pytest.mark.process
def test_a_run_past_its_deadline_leaves_its_worker_warm():
    async def main():
        grader = Grader(num_workers=1, limits=LIMITS)
        await grader.run("1")
        (worker,) = grader.idle
        late = await grader.run("import time; time.sleep(60)", timeout_s=0.3)
        after = await grader.run("2")
        assert grader.idle == [worker]
        await grader.close()
        return late, after

    late, after = asyncio.run(main())
    assert (late.kind, after.output) == ("timeout", "2\n")


@pytest.mark.process
def test_what_holds_is_told(machine):
    async def main():
        grader = Grader(num_workers=1, limits=LIMITS)
        try:
            return await grader.check()
        finally:
            await grader.close()

    report = asyncio.run(main())
    assert ("NOT from" in str(report)) == (len(report.isolation) < 3)
    if machine in ("no control groups", "neither"):
        assert report.memory == "watcher"
        assert "memory of all its processes is held by watcher" in str(report)
    if machine in ("no namespaces", "neither"):
        assert report.isolation == frozenset()


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_group_of_version_2_is_made_beside_this_process(tmp_path, monkeypatch):
    user = "sys/fs/cgroup/user.slice"
    files = {
        "proc/self/cgroup": "0::/user.slice/mine.scope\n",
        "proc/self/mountinfo": "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        f"{user}/cgroup.subtree_control": "cpu memory pids\n",
        f"{user}/cgroup.procs": "",
        f"{user}/mine.scope/cgroup.subtree_control": "\n",
        f"{user}/mine.scope/cgroup.procs": "",
    }
    tree(tmp_path, files)
    make = Path.mkdir

    def mkdir(path, *args, **kwargs):
        make(path, *args, **kwargs)
        if path.name.startswith("rl-agent-"):
            (path / "memory.events").write_text("oom 0\noom_kill 3\n")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    group = sandbox_limits.ControlGroup(LIMITS, str(tmp_path))
    assert group.version == 2
    assert [path.parent for path in group.paths] == [tmp_path / user]
    assert (group.paths[0] / "memory.max").read_text() == str(288 * MIB)
    assert (group.paths[0] / "pids.max").read_text() == "68"
    assert group.num_kills() == 3


def test_where_no_group_can_be_made_there_is_none(tmp_path):
    tree(tmp_path, {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": "30 1 0:26 / / rw - tmpfs none rw\n"})
    with pytest.raises(OSError, match="no control group for memory and processes"):
        sandbox_limits.ControlGroup(LIMITS, str(tmp_path))


@pytest.mark.process
def test_no_group_is_left(machine):
    before = groups()
    grade("1")
    assert groups() <= before


@pytest.mark.process
def test_a_cancelled_close_leaves_no_group_and_no_process(machine):
    """As of a sandbox server that is stopped while sandboxes end."""

    async def main():
        grader = Grader(limits=LIMITS)
        await grader.run("1")
        (worker,) = grader.idle
        closing = asyncio.create_task(grader.close())
        for _ in range(3):  # it has begun
            await asyncio.wait([closing], timeout=0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        return worker

    before = groups()
    worker = asyncio.run(main())
    assert not worker.is_alive
    assert groups() <= before


@pytest.mark.process
def test_a_run_cancelled_while_it_is_stopped_spoils_no_later_one(machine):
    async def main():
        grader = Grader(num_workers=1, limits=LIMITS)
        await grader.run("1")
        (worker,) = grader.idle
        stop, has_begun = worker.stop, asyncio.Event()

        async def noted_stop():
            has_begun.set()
            await stop()

        worker.stop = noted_stop
        running = asyncio.create_task(grader.run("while True: pass", timeout_s=0.2))
        await has_begun.wait()
        running.cancel()
        await asyncio.wait([running])
        try:
            return await grader.run("print(2)")
        finally:
            await grader.close()

    assert asyncio.run(main()).output == "2\n"


def groups():
    return set(Path("/sys/fs/cgroup").rglob(f"rl-agent-{os.getpid()}-*"))
