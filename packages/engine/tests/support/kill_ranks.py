"""One rank of a save that is killed: `kill_ranks.py FOLDER BACKEND WRITER POINT`.

The first checkpoint is complete; in the second one all ranks are killed at POINT, or one of them alone.
"""

import os
import signal
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch

from rl_engine import EngineConfig, OptimizerConfig, create_engine
from rl_engine.checkpoint import sharded

_spec = spec_from_file_location("engine_ranks", Path(__file__).with_name("engine_ranks.py"))
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)


def kill(pids):
    """The last one is this process."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def arm(point, rank, pids):
    """Let the next save be killed where it is told."""
    me = os.getpid()
    everybody = [pid for pid in pids if pid != me] + [me]
    if point in ("shards", "one rank") and rank == 1:
        write = sharded.write_shard

        def then_die(file, parts):
            write(file, parts)
            kill(everybody if point == "shards" else [me])

        sharded.write_shard = then_die
    if point == "manifest":
        sharded.replace_folder = lambda draft, target: kill(everybody)
    if point == "renames":
        rename = Path.rename

        def die_before_the_second(self, target):
            if self.name.endswith(".draft"):
                kill(everybody)
            return rename(self, target)

        Path.rename = die_before_the_second


def main(folder, backend, writer, point):
    torch.set_num_threads(1)
    config = EngineConfig(
        model_path=str(folder / "model"),
        optimizer=OptimizerConfig(lr=1e-2),
        async_checkpoints=writer == "background",
        timeout_s=60.0,
    )
    engine = create_engine(backend, config)
    engine.initialize()
    world = engine.parts.built.world
    mine = ranks.batch_of(ranks.draw_rows(7)[world.rank :: world.size])
    ranks.one_step(engine, mine)
    engine.save_checkpoint(folder / "checkpoint", 1)
    kept = ranks.weights(engine)
    if world.rank == 0:
        torch.save(kept, folder / "kept.pt")
    assert engine.load_checkpoint(folder / "checkpoint") == 1
    ranks.one_step(engine, mine)
    arm(point, world.rank, world.exchange(os.getpid()))
    engine.save_checkpoint(folder / "checkpoint", 2)
    engine.close()  # waits for what is written in the background


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
