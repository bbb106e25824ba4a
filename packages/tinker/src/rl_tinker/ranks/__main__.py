"""Launcher of the training processes: torch's elastic launcher, which ends with the server, as the ranks do with it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends (Linux); end now if it has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, has ended")


def main() -> None:
    """Start ranks for process `sys.argv[1]`, `sys.argv[2]` of them, with the rest of the arguments."""
    parent, num_ranks, *arguments = sys.argv[1:]
    end_with_parent(int(parent))
    from torch.distributed.run import main as launch

    launch(
        [
            "--standalone",
            f"--nproc-per-node={num_ranks}",
            "--max-restarts=0",
            "--monitor-interval=0.1",
            "-m",
            "rl_tinker.ranks.rank",
            str(os.getpid()),
            *arguments,
        ]
    )


if __name__ == "__main__":
    main()
