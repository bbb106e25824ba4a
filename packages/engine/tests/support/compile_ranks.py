"""One rank of the compiled layers' tests: `compile_ranks.py FOLDER`."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch

from rl_engine import ParallelConfig

_spec = spec_from_file_location("engine_ranks", Path(__file__).with_name("engine_ranks.py"))
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)
CASES = {
    "dp": {},
    "recomputed": {"activation_checkpointing": True},
    "sp": {"parallel": ParallelConfig(sp=2)},
    "replicas": {"parallel": ParallelConfig(dp_replicate=2)},
}


def main(folder):
    torch.set_num_threads(1)
    holder = ranks.build(folder / "model", optimizer=None)  # makes the process group; the others join it
    rank, size = holder.parts.built.world.rank, holder.parts.built.world.size
    seen = {}
    for case, changes in CASES.items():
        for name in ("plain", "compiled"):
            engine = ranks.build(folder / "model", torch_compile=name == "compiled", **changes)
            steps = [ranks.one_step(engine, ranks.batch_of(ranks.draw_rows(seed)[rank::size])) for seed in range(3)]
            seen[f"{case} {name}"] = (steps, ranks.weights(engine))
            engine.close()
    holder.close()
    if rank == 0:
        torch.save(seen, folder / "seen.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
