"""What is left of a real step when generation, forward and backward, the optimizer and weight transfer are taken away.

The quickstart's model and task with 64 prompts x 8, everything in one process (`runtime=inline`), by the spans of
`rl-train --profile`. What is left is the controller: prompts and references, advantages, mini-batches, the queue's
clients between the passes, and the bookkeeping of a step.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rl_bench import Run

PROMPTS, GROUP, TIMEOUT_S = 64, 8, 300
WORK = ("forward_backward", "forward", "optimizer_step", "weight_sync")
SIZES = [
    f"batch.batch_size={PROMPTS}", f"batch.mini_batch_size={PROMPTS}", f"batch.group_size={GROUP}", "runtime=inline",
    "tracking.profile=true", "eval_every=0", "data.eval_size=16", "data.options.num_rows=4000",
    "model.warmup.steps=20", "model.warmup.num_rows=2000",
]  # fmt: skip


def main(run: Run) -> None:
    steps = 8 if run.quick else 20
    run.parameters(prompts=PROMPTS, group_size=GROUP, steps=steps)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [sys.executable, "-m", "rl_trainer.cli", "quickstart", *SIZES, f"steps={steps}", f"output_dir={out}"]
        subprocess.run(command, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)
        events = json.loads((out / "trace.json").read_text())["traceEvents"]
    spans = [(e["name"], e["ts"], e["dur"]) for e in events if e.get("ph") == "X"]
    begins = sorted(start for name, start, _ in spans if name == "generate")[1:]  # the first step warms up
    ends = sorted(start + length for name, start, length in spans if name == "weight_sync")
    shares, left_ms = [], []
    for begin in begins:
        end = next(end for end in ends if end > begin)
        work = sum(length for name, start, length in spans if name in WORK and begin <= start < end)
        generated = min(start + length for name, start, length in spans if name == "generate" and start >= begin)
        work += max(start + length for name, start, length in spans if name == "put" and start < generated) - begin
        shares.append((end - begin - work) / (end - begin))
        left_ms.append((end - begin - work) / 1e3)
    run.record("controller's share of a step", "ours", shares, unit="share", goal="<= 0.05 share")
    run.record("controller's part of a step", "ours", left_ms, unit="ms")
