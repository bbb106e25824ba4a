"""GPU figures of the kernels: ours, the peers and the limits in one run. Usage: kernels.py [--json FILE] [--only A,B].

Stands alone beside an installed rl_csrc built with RL_CSRC_CUDA=ON. Rows have the format of rl_bench.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
from pathlib import Path

import torch
from attention import attention
from head import linear, tuning
from scores import forward, train
from table import ROWS, VOCAB, Table
from tokens_and_bytes import copies, deltas, losses

GROUPS = {
    "attention": attention,
    "deltas": deltas,
    "forward": forward,
    "train": train,
    "linear": linear,
    "losses": losses,
    "copies": copies,
}
ON_DEMAND = {"tuning": tuning}
"""Not of a run that names no groups."""


def main() -> None:
    """Run the groups asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--only", default=",".join(GROUPS))
    options = parser.parse_args()
    table = Table()
    for name in options.only.split(","):
        try:
            (GROUPS | ON_DEMAND)[name](table)
        except Exception as error:  # noqa: BLE001  # the other groups' figures must not be lost with this one
            print(f"{name} FAILED: {error!r}", flush=True)
        torch.cuda.empty_cache()
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    properties = torch.cuda.get_device_properties(0)
    result = {
        "name": "kernels_gpu",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "gpu": [properties.name],
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "driver": driver.stdout.split(),
            "torch": torch.__version__,
            "cores": os.cpu_count(),
        },
        "commit": os.environ.get("RL_COMMIT", "unknown"),
        "parameters": {"rows": ROWS, "vocab": VOCAB},
        "rows": table.finished(),
    }
    for row in result["rows"]:
        if row["goal"]:
            print(f"{row['metric']:44s} {row['system']:40s} {row['median']:10.4f} {row['goal']:20s} met: {row['met']}")
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
