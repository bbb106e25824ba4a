"""Updates of one rank of two: `_ranks_child.py SETTINGS.json BACKEND RANK`, BACKEND `fsdp` or `megatron` (tp=2).

Rank and size of the group are in the environment, as torchrun gives them. Writes the losses of all updates, the seconds
of each (forward, backward, optimizer), and resident bytes before the model is built and at most, to
`BACKEND-RANK.json` beside the settings. Ranks are on CPUs; megatron has the stand-in for CUDA of the tests.
"""

import json
import sys
import time
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

STAND_IN = Path(__file__).parents[1] / "tests" / "support" / "megatron_on_cpu"


def resident(field):
    """Bytes: `VmRSS` now, `VmHWM` at most."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def main():
    settings, backend, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    given = json.loads(settings.read_text())
    torch.set_num_threads(1)
    from rl_engine import EngineConfig, OptimizerConfig, ParallelConfig, create_engine
    from rl_engine.losses import sft_loss
    from rl_engine.testing import ragged_batch

    name, parallel = backend, ParallelConfig(tp=2) if backend == "megatron" else ParallelConfig()
    import_module(f"rl_engine.backends.{backend}")  # before memory is looked at
    if backend == "megatron":
        sys.path.insert(0, str(STAND_IN))
        name = STAND_IN.name
    base = resident("VmRSS")
    engine = create_engine(
        name,
        EngineConfig(
            model_path=given["model"],
            parallel=parallel,
            optimizer=OptimizerConfig(lr=given["lr"]),
            max_tokens_per_gpu=given["max_tokens"],
            timeout_s=120,
        ),
    )
    engine.initialize()
    batch = ragged_batch(given["prompts"][rank::2], given["completions"][rank::2])
    losses, seconds = [], []
    for _ in range(given["updates"]):
        dist.barrier()
        since = time.perf_counter()
        engine.optimizer_zero_grad()
        losses.append(engine.forward_backward_batch(batch, sft_loss).metrics["loss"])
        engine.optimizer_step()
        dist.barrier()
        seconds.append(time.perf_counter() - since)
    found = {"losses": losses, "seconds": seconds, "base_bytes": base, "peak_bytes": resident("VmHWM")}
    settings.with_name(f"{backend}-{rank}.json").write_text(json.dumps(found))
    engine.close()


if __name__ == "__main__":
    main()
