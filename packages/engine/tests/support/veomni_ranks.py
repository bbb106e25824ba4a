"""One rank of VeOmni's own training step, under a Python that has it: `veomni_ranks.py FOLDER EP`, by torchrun.

Loads FOLDER by VeOmni's loader, shards it by VeOmni's FSDP2 (and EP expert-parallel ranks), and writes loss and norm of
the gradient of this rank's row of FOLDER/rows.json to FOLDER/ep-EP-RANK.json. rl-engine is not needed.
"""

import json
import sys
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from veomni.arguments.arguments_types import MixedPrecisionConfig, OpsImplementationConfig
from veomni.distributed.parallel_state import init_parallel_state
from veomni.distributed.torch_parallelize import build_parallelize_model
from veomni.models import build_foundation_model


def main(folder, ep):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    init_parallel_state(dp_size=size, dp_shard_size=size, extra_parallel_sizes=(ep,), device_type="cpu")
    ops = {
        field.name: "eager"
        for field in fields(OpsImplementationConfig)
        if field.name.endswith("implementation") and field.default != "none"
    }
    model = build_foundation_model(
        str(folder),
        weights_path=str(folder),
        torch_dtype="float32",
        init_device="meta",
        ops_implementation=OpsImplementationConfig(**ops),
    )
    model = build_parallelize_model(
        model,
        weights_path=str(folder),
        mixed_precision=MixedPrecisionConfig(enable=False),
        enable_gradient_checkpointing=False,
        init_device="meta",
    )
    row = torch.tensor(json.loads((folder / "rows.json").read_text())[rank])[None]
    output = model(input_ids=row, labels=row, position_ids=torch.arange(row.shape[1])[None], use_cache=False)
    output.loss.backward()
    total = 0.0
    for parameter in model.parameters():
        grad = parameter.grad
        if grad is not None:
            full = grad.full_tensor() if isinstance(grad, DTensor) else grad
            total += float(full.double().pow(2).sum())
    told = {
        "loss": float(output.loss),
        "norm": total**0.5,
        "classes": [kind.__module__ for kind in type(model).__mro__],
    }
    (folder / f"ep-{ep}-{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
