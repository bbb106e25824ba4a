"""The plugin of pytest, and the waiters of tests."""

import asyncio
import subprocess
import sys

import pytest

from rl_bench.waiting import until, until_async

IN_THE_BACKGROUND = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""
PRESSED = """
import os, signal
import rl_bench.tiers
try:
    os.kill(os.getpid(), signal.SIGINT)
    print("ignored")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.process
def test_ctrl_c_reaches_tests_that_run_in_the_background():
    command = [sys.executable, "-c", IN_THE_BACKGROUND, PRESSED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "interrupted\n"


def test_a_condition_that_never_comes_is_named():
    with pytest.raises(AssertionError, match=r"waited 0.02 s: the queue is empty"):
        until(lambda: False, "the queue is empty", timeout_s=0.02)
    with pytest.raises(AssertionError, match="waited 0.02 s: a condition"):
        asyncio.run(until_async(lambda: False, timeout_s=0.02))


def test_a_condition_is_looked_at_until_it_holds():
    left = [False, False, True, True]
    until(lambda: left.pop(0))
    asyncio.run(until_async(lambda: left.pop(0)))
    assert left == []
