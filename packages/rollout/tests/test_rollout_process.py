"""A server's process whose own children outlive it."""

import asyncio
import gc
import threading
import time

from rl_rollout._process import ServerProcess


def test_its_output_is_closed_when_the_last_of_its_children_has_ended():
    """Were it left to the collector, a ResourceWarning would fail this test."""
    process = ServerProcess(["sh", "-c", "(sleep 2; echo child) & echo parent"], {}, name="parent")
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
