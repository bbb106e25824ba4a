"""Rows that branch: an update of a tree of depth 3 by the share of distinct tokens, next to the same rows fed whole.

A prompt has 2, 4 or 8 first turns, and each of those as many second ones. The two ways take their turns in one run.
Without a GPU seconds are the process's on a processor, which other processes of the machine do not lengthen.
"""

import random
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from rl_bench import Role, Run
from rl_engine import EngineConfig, create_engine
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged_batch, write_tiny_model

SIZES = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
BRANCHES, TURN, UPDATES = (2, 4, 8), 128, 7
CLOCK = time.perf_counter if torch.cuda.is_available() else time.process_time


def main(run: Run) -> None:
    updates = 3 if run.quick else UPDATES
    run.parameters(model=SIZES, branches=BRANCHES, tokens_of_a_turn=TURN, updates=updates)
    with tempfile.TemporaryDirectory() as place:
        folder = str(write_tiny_model(Path(place) / "model", **SIZES))
        config = {"model_path": folder, "max_tokens_per_gpu": 1 << 20}
        engines = {
            way: create_engine("fsdp", EngineConfig(prefix_sharing=way == "shared", **config))
            for way in ("shared", "whole")
        }
        for engine in engines.values():
            engine.initialize()
        for branches in BRANCHES:
            _tree(run, engines, branches, updates)
        for engine in engines.values():
            engine.close()


def _tree(run: Run, engines: dict, branches: int, updates: int) -> None:
    prompts, completions = rows_of(branches)
    batch, seconds = ragged_batch(prompts, completions), {way: [] for way in engines}
    for update in range(updates + 1):
        for way, engine in engines.items():
            start = CLOCK()
            with engine.train_mode():
                engine.optimizer_zero_grad()
                engine.forward_backward_batch(batch, sft_loss)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if update:
                seconds[way].append(CLOCK() - start)
    leaves = branches**2
    share = (1 + branches + leaves) / (3 * leaves)
    metric = f"forward and backward, {branches} branches of depth 3"
    for way, name in (("whole", "rows fed whole"), ("shared", "common tokens once")):
        run.record(metric, name, seconds[way], unit="s", role=Role.PEER if way == "whole" else Role.OURS)
    taken = median(seconds["shared"]) / median(seconds["whole"])
    run.record(
        f"share of the time over share of the tokens ({share:.3f}), {branches} branches", "common tokens once",
        [taken / share], unit="ratio", role=Role.OURS, note=f"time {taken:.3f}, goal <= 1.15",
    )  # fmt: skip


def rows_of(branches: int) -> tuple[list, list]:
    """Prompts and completions, in any order."""
    draw = random.Random(0)

    def turn():
        return [draw.randrange(4, 70) for _ in range(TURN)]

    prompt, rows = turn(), []
    for _ in range(branches):
        first = turn()
        rows += [first + turn() for _ in range(branches)]
    draw.shuffle(rows)
    return [prompt] * len(rows), rows
