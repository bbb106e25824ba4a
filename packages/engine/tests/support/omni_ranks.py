"""One rank of the tests of omni thinkers: `omni_ranks.py FOLDER KIND`, with torchrun's environment."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch

from rl_engine import EngineConfig, Precision, create_engine
from rl_engine.losses import sft_loss

_spec = spec_from_file_location("test_engine_omni", Path(__file__).parents[1] / "model" / "test_engine_omni.py")
omni = module_from_spec(_spec)
_spec.loader.exec_module(omni)


def one_step(engine, rows):
    """Loss and norm of a step on the rows."""
    loss = engine.forward_backward_batch(omni.batch_of(rows), sft_loss).metrics["loss"]
    return loss, engine.optimizer_step()


def build(folder):
    """An engine whose micro-batches have a row or two."""
    config = EngineConfig(
        model_path=str(folder / "model"), precision=Precision.FLOAT64, max_tokens_per_gpu=44, timeout_s=60.0
    )
    engine = create_engine("fsdp", config)
    engine.initialize()
    return engine


def main(folder, kind):
    torch.set_num_threads(1)
    engine = build(folder)
    world = engine.parts.built.world
    rows, example = omni.rows_of(kind), omni.rows_of(kind, [("image", "video", 9)])[0][2]
    rows = [(prompt, answer, {name: columns.get(name, example[name][:0]) for name in example})
            for prompt, answer, columns in rows]  # fmt: skip
    seen = {"step": one_step(engine, rows[world.rank :: world.size])}
    engine.save_model(folder / "out")
    engine.close()
    if world.rank == 0:
        torch.save(seen, folder / "seen.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
