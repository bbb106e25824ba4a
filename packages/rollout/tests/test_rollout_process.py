"""A server's process: its end, and that of its children."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rl_bench.waiting import until
from rl_rollout.errors import ServerStartError
from rl_rollout.process import ChildProcess, titled

pytestmark = pytest.mark.process


def test_its_output_closes_when_the_last_child_has_ended():
    """Were it left to the collector, a ResourceWarning would fail this test."""
    process = ChildProcess(["sh", "-c", "(sleep 2; echo child) & echo parent"], {}, name="parent")
    process.start()
    asyncio.run(process.end(grace_s=10.0))
    assert process.returncode == 0
    assert process.last_lines == ("parent",)
    until(lambda: not (any(thread.name == "rl-rollout-log" for thread in threading.enumerate())))
    assert process.last_lines == ("parent", "child")
    del process
    gc.collect()


def test_many_may_wait_for_the_same_end():
    """As the requests of a server do that hangs: none waits for the others."""

    async def scenario():
        process = ChildProcess([sys.executable, "-c", "input()"], {}, name="it")
        process.start()
        start = time.monotonic()
        ends = await asyncio.gather(*(process.has_ended(0.3) for _ in range(400)))
        took_s = time.monotonic() - start
        await process.end(grace_s=20)
        return any(ends), took_s, process.returncode is not None

    has_ended, took_s, is_over = asyncio.run(scenario())
    assert not has_ended
    assert took_s < 2
    assert is_over


def test_a_caller_without_an_event_loop_may_wait_and_kill():
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '100']); print(p.pid, flush=True); p.wait()"
    process = ChildProcess([sys.executable, "-c", child], {}, name="it")
    process.start()
    until(lambda: process.last_lines)
    assert process.wait(0.05) is None
    process.kill()
    process.kill()
    assert process.returncode == -9
    until(lambda: has_ended(process.last_lines[0]), "what it started ends with it")


@pytest.mark.promise("A third-party server ends, with all its children, when who started it does")
def test_a_guarded_command_ends_with_whoever_started_it():
    """Inference servers start processes of their own: all of them end, though nobody could say so any more."""
    inner = [sys.executable, "-c", "import subprocess; subprocess.run(['sh', '-c', 'echo $$; sleep 100'])"]
    code = f"""
import os, subprocess, sys
guard = [sys.executable, "-m", "rl_rollout.process", *{inner!r}]
child = subprocess.Popen(guard, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
print(child.pid, child.stdout.readline(), flush=True)
os.kill(os.getpid(), 9)
"""
    told = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    pids = told.stdout.split()
    assert len(pids) == 2
    until(lambda: all(map(has_ended, pids)), "what was guarded outlives its starter")


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_what_it_wrote_at_its_end_is_told():
    process = ChildProcess([sys.executable, "-c", "print('x = 1\\nOSError: no disk')"], {}, name="it")
    process.start()
    assert process.wait(30.0) == 0
    assert process.with_output("it ended early") == "it ended early; its last lines:\n  | x = 1\n  | OSError: no disk"
    with pytest.raises(ServerStartError, match="it was started and stopped already"):
        process.start()
    process.kill()


def test_a_fork_with_a_worker_s_title_is_no_worker():
    """vLLM's workers fork helpers, which have their title: the end of one is no reason to end the server."""
    worker = "(exec -a W::0 sleep 100) & echo $!; (exec -a W::0 sleep 100) & echo $!; sleep 100; true"
    process = ChildProcess(["bash", "-c", worker], {}, name="it", workers="W::")
    process.start()
    until(lambda: not (len(process.last_lines) < 2 or len(titled(process.pid, "W::")) < 2))
    fork, worker = (int(line) for line in process.last_lines)
    try:
        assert not process.end_without_workers()
        os.kill(fork, signal.SIGKILL)
        until(lambda: fork not in titled(process.pid, "W::"))
        assert not process.end_without_workers()
        assert process.returncode is None
        os.kill(worker, signal.SIGKILL)
        until(lambda: not titled(process.pid, "W::"))
        assert process.end_without_workers()
        assert process.wait(30.0) is not None
        assert "its process W::0" in process.why_ended()
    finally:
        process.kill()
