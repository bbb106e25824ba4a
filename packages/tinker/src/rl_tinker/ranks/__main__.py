"""Launcher of the training processes: torch's elastic launcher, which ends with the server, as the ranks do with it."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Start `sys.argv[1]` ranks with the rest of the arguments."""
    end_with_parent()
    from torch.distributed.run import main as launch

    num_ranks, *arguments = sys.argv[1:]
    launch(
        [
            "--standalone",
            f"--nproc-per-node={num_ranks}",
            "--max-restarts=0",
            "--monitor-interval=0.1",
            "-m",
            "rl_tinker.ranks.rank",
            *arguments,
        ]
    )


if __name__ == "__main__":
    main()
