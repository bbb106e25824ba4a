"""One rank of the tests of Muon on sharded matrices: `muon_ranks.py FOLDER`, with torchrun's environment."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch

from rl_engine import EngineConfig, OptimizerConfig, OptimizerKind, Precision, create_engine

_spec = spec_from_file_location("engine_ranks", Path(__file__).with_name("engine_ranks.py"))
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)
LR, SEED = 1e-2, 7


def build(folder, backend):
    # torch orthogonalises a gradient that is nearly zero into noise: rows of unused tokens are not Muon's
    optimizer = OptimizerConfig(kind=OptimizerKind.MUON, lr=LR, eps=1e-3, weight_decay=0.1, max_grad_norm=1e9)
    config = EngineConfig(
        model_path=str(folder / "model"), precision=Precision.FLOAT64, optimizer=optimizer, timeout_s=120.0
    )
    engine = create_engine(backend, config)
    engine.initialize()
    return engine


def three_steps(engine, data, folder=None):
    """Losses and norms of three steps and the weights after them; the state before the last goes to a folder."""
    steps = [ranks.one_step(engine, data) for _ in range(2)]
    if folder is not None:
        engine.save_checkpoint(folder, 2)
    steps.append(ranks.one_step(engine, data))
    return steps, ranks.weights(engine)


def main(folder, backends):
    torch.set_num_threads(1)
    seen = {}
    holder = ranks.build(folder / "model", optimizer=None)  # makes the process group; the others join it
    rank, size = holder.parts.built.world.rank, holder.parts.built.world.size
    mine = ranks.batch_of(ranks.draw_rows(SEED)[rank::size])
    for backend in backends:
        engine = build(folder, backend)
        seen[backend] = three_steps(engine, mine, folder / f"by {backend}")
        assert engine.load_checkpoint(folder / f"by {backend}") == 2
        seen[f"{backend} again"] = ranks.one_step(engine, mine), ranks.weights(engine)
        engine.close()
    holder.close()
    if rank == 0:
        torch.save(seen, folder / "seen.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
