"""One rank of the command lines: `cli_ranks.py FOLDER COMMAND...`, with torchrun's environment."""

import os
import sys
from pathlib import Path

import torch

from rl_engine.finetune.cli import distill_main, dpo_main, rm_main, sft_main

RUNS = {
    "sft": (sft_main, "rows.jsonl", ["eval.path={}/rows.jsonl"]),
    "dpo": (dpo_main, "pairs.jsonl", ["eval.path={}/pairs.jsonl"]),
    "kto": (dpo_main, "pairs.jsonl", ["loss=kto"]),
    "rm": (rm_main, "pairs.jsonl", []),
    "distill": (distill_main, "rows.jsonl", ["teacher.path={}/teacher", "loss=mixed", "num_candidates=4"]),
}


def run(folder, name, output):
    """A command's exit code. Five items at a time of seven, so that one may come twice in a step."""
    main, data, more = RUNS[name]
    shared = ["steps=3", "batch_size=5", "lr=1e-2", "warmup_steps=0", "precision=float64", "log_every=1"]
    paths = [f"model.path={folder}/model", f"data.path={folder}/{data}", f"output_dir={folder}/{output}"]
    return main([*paths, *shared, *(argument.format(folder) for argument in more)])


def main(folder, names):
    torch.set_num_threads(1)
    codes = {name: run(folder, name, f"{name}-many") for name in names}
    if os.environ["RANK"] == "0":
        torch.save(codes, folder / "seen.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
