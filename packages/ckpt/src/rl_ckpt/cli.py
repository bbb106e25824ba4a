"""Command line `rl-ckpt`: what a transfer plan will move, before it does."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rl_ckpt.errors import CkptError
from rl_ckpt.traffic import Traffic
from rl_ckpt.types import Placement

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan of a run: who sends what to whom, the bytes on each link, the expected seconds."""
    parser = argparse.ArgumentParser(prog="rl-ckpt", description="Weights from a trainer to its inference servers.")
    plan = parser.add_subparsers(dest="command", required=True).add_parser(
        "plan", help="print who sends what to whom", description="Print a transfer plan that rl-train has written."
    )
    plan.add_argument("file", metavar="FILE", type=Path, help="weights-plan.json of the output folder of a run")
    plan.add_argument("--link-gbit", type=float, default=25.0, help="of each node, Gbit/s (default: %(default)s)")
    plan.add_argument("--memory-gb", type=float, default=5.0, help="copied in a node, GB/s (default: %(default)s)")
    options = parser.parse_args(argv)
    for name in ("link_gbit", "memory_gb"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name):g}; give a number above 0")
    try:
        placement = Placement.load(options.file)
        lines = Traffic(placement).lines(placement, options.link_gbit, options.memory_gb)
    except CkptError as error:
        parser.error(str(error))
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
