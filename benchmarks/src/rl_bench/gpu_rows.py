"""Import benchmarks and see that they have rows for a GPU, as `rl-bench NAME --gpu` does first: `gpu_rows NAME...`."""

from __future__ import annotations

import sys
from pathlib import Path

from rl_bench.cli import find_benchmarks, find_checkout, load_benchmark


def main(names: list[str]) -> int:
    """Returns the exit code."""
    root = find_checkout(Path.cwd())
    if root is None:
        raise SystemExit("run this inside the rl-stack checkout")
    found = find_benchmarks(root)
    bad = [n for n in names if n not in found or not hasattr(load_benchmark(root, found[n], threads=1), "gpu")]
    print(f"without rows for a GPU: {', '.join(bad)}" if bad else f"rows for a GPU: {', '.join(names)}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
