"""Runs a command and ends all of it when its own parent is gone: `python -m rl_rollout.process_guard COMMAND...`.

Inference servers start processes of their own, which outlive whoever started them. The guard, the command and all
that it starts are one process group, which ends when the guard's standard input is closed or the command has ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

TERMINATE_S = 8.0
"""How long the group may take to end after SIGTERM, seconds."""


def main(command: list[str]) -> int:
    """Returns the command's exit code."""
    signal.signal(signal.SIGTERM, _stay)  # a handler, and not SIG_IGN, which the command would inherit
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    code = process.wait()
    os.killpg(0, signal.SIGTERM)
    return code if code >= 0 else 128 - code


def _stay(number: int, frame: object) -> None:
    """The guard signals its own group, and goes on."""


def _end_with_stdin() -> None:
    os.read(sys.stdin.fileno(), 1)  # nothing is ever written to it: this returns when the other end is closed
    os.killpg(0, signal.SIGTERM)
    time.sleep(TERMINATE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
