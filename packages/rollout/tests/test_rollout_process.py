"""A server's process: its end, and that of its children."""

import asyncio
import gc
import sys
import threading
import time

from rl_rollout.process import ChildProcess


def test_its_output_is_closed_when_the_last_of_its_children_has_ended():
    """Were it left to the collector, a ResourceWarning would fail this test."""
    process = ChildProcess(["sh", "-c", "(sleep 2; echo child) & echo parent"], {}, name="parent")
    process.start()
    asyncio.run(process.end(grace_s=10.0))
    assert process.returncode == 0
    assert process.last_lines == ("parent",)
    deadline = time.monotonic() + 30.0
    while any(thread.name == "rl-rollout-log" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
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
