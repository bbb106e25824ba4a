"""What two policies learn against each other: exploitability of both seats of Kuhn poker, by step of `two_policies`.

`rl-bench two_policies --json FILE` runs what `outputs/two_policies` does not have yet, three seeds.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rl_agent.recipes import kuhn

if TYPE_CHECKING:
    from rl_bench import Run

FOLDER = Path("outputs/two_policies")
SEEDS = (1, 2, 3)


def main(run: Run) -> None:
    """Run the seeds, and record what the best opponent wins of each policy before and after."""
    curves = {seed: trained(seed) for seed in (SEEDS[:1] if run.quick else SEEDS)}
    for policy, seat in zip(("opener", "replier"), kuhn.SEATS, strict=True):
        for what, at in (("after the warm start", 0), ("after RL", -1)):
            values = [[*curve.values()][at][seat] for curve in curves.values()]
            system = f"ours, seeds: {len(values)}"
            run.record(f"{policy}: {what}", system, values, unit="exploitability", role="ours")
    run.parameters(command="rl-train two_policies seed=N runtime=inline", curves=curves)


def trained(seed: int) -> dict[int, dict[str, float]]:
    """Run the recipe, unless it was run before; returns exploitability of the seats by step."""
    folder = FOLDER / str(seed)
    if not (folder / "summary.json").is_file():
        words = ["two_policies", f"seed={seed}", "runtime=inline", f"output_dir={folder}"]
        subprocess.run([sys.executable, "-m", "rl_trainer.cli", *words], check=True)
    curve = {0: kuhn.seat_exploitability(kuhn.bets_of(str(folder / "model")))}
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=lambda each: int(each.name.rpartition("-")[2])):
        opener, replier = (
            kuhn.bets_of(str(checkpoint / "policies" / name / "model")) for name in ("opener", "replier")
        )
        bets = replier | {name: bet for name, bet in opener.items() if name[1:] in ("", "pb")}
        curve[int(checkpoint.name.rpartition("-")[2])] = kuhn.seat_exploitability(bets)
    return curve
