"""One rank of the multi-process tests of the torchtitan backend: `torchtitan_ranks.py FOLDER`."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch

from rl_engine import EngineConfig, OptimizerConfig, ParallelConfig, Precision, create_engine
from rl_engine.losses import sft_loss

_spec = spec_from_file_location("engine_ranks", Path(__file__).with_name("engine_ranks.py"))
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)

SEED = 7
CASES = {
    "qwen3 dp": {},
    "llama dp": {},
    "qwen3 replicas": {"parallel": ParallelConfig(dp_replicate=2)},
    "qwen3 recomputed": {"activation_checkpointing": True},
}


def build(model, **changes):
    options = {
        "precision": Precision.FLOAT64,
        "optimizer": OptimizerConfig(lr=1e-2, eps=1e-3, total_steps=10),
        "timeout_s": 120.0,
    }
    config = EngineConfig(model_path=str(model), max_tokens_per_gpu=40, **(options | changes))
    engine = create_engine("torchtitan", config)
    engine.initialize()
    return engine


def gradients(engine):
    named = engine.parts.built.scorer.named_weights()
    return {name: ranks.full(weight.grad).clone() for name, weight in named.items() if weight.grad is not None}


def main(folder):
    torch.set_num_threads(1)
    first = build(folder / "qwen3")
    rank, size = first.parts.built.world.rank, first.parts.built.world.size
    mine = ranks.batch_of(ranks.draw_rows(SEED)[rank::size])
    seen = {}
    for case, changes in CASES.items():
        engine = build(folder / case.split()[0], **changes)
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(mine, sft_loss)
        rows = first.parts.built.world.exchange([row.tolist() for row in output.columns.get("logprobs").unbind()])
        seen[case] = {
            "loss": output.metrics["loss"],
            "logprobs": [rows[index % size][index // size] for index in range(len(ranks.draw_rows(SEED)))],
            "gradients": gradients(engine),
            "share": ranks.shards_are_the_weights(engine, first.parts.built.world),
            "streamed": ranks.most_alive(engine),
        }
        engine.close()
    seen["first"] = ranks.one_step(first, mine)
    first.save_checkpoint(folder / "by titan", 4)
    first.save_model(folder / "saved")
    seen["straight"] = (*ranks.one_step(first, mine), ranks.weights(first))
    assert first.load_checkpoint(folder / "by fsdp") == 9
    seen["from fsdp"] = (*ranks.one_step(first, mine), ranks.weights(first))
    first.close()
    if rank == 0:
        torch.save(seen, folder / "seen.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
