"""One rank of the veomni backend, under a Python that has VeOmni: `veomni_engine.py FOLDER`, by torchrun.

Takes three steps over its share of FOLDER/rows.json and writes to FOLDER/veomni.pt the losses, the norms and the
weights that a server would get; `steps` is the same under any backend.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from rl_engine import EngineConfig, OptimizerConfig, create_engine
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged_batch


def steps(backend, folder, rows):
    """Losses, norms and weights of three steps."""
    engine = create_engine(backend, EngineConfig(model_path=str(folder), optimizer=OptimizerConfig(lr=0.01)))
    engine.initialize()
    data, told = ragged_batch([row[:1] for row in rows], [row[1:] for row in rows]), []
    for _ in range(3):
        loss = engine.forward_backward_batch(data, sft_loss).metrics["loss"]
        told.append((loss, engine.optimizer_step()))
        engine.optimizer_zero_grad()
    weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    engine.save_checkpoint(folder / backend, 3)
    engine.close()
    return told, weights


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    told, weights = steps("veomni", folder, json.loads((folder / "rows.json").read_text())[rank::size])
    if rank == 0:
        torch.save({"steps": told, "weights": weights}, folder / "veomni.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
