"""One rank that makes one group after the other: `again_ranks.py FOLDER`, with torchrun's environment."""

import os
import sys
import time
from pathlib import Path

import torch

from rl_engine.distributed.world import join_world

seen = []
for number in range(4):
    world = join_world(timeout_s=60, needs_group=True)
    seen.append(world.exchange((world.rank, number)))
    time.sleep(0.5 * (world.rank == 0))  # whoever serves the store leaves last
    world.leave()
if os.environ["RANK"] == "0":
    torch.save({"seen": seen}, Path(sys.argv[1]) / "seen.pt")
