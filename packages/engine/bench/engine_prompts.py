"""Updates from groups of completions: each prompt fed once, as by default, and with every completion. CPU.

Tokens a second are those of the rows, prompts and completions, however often a prompt is fed.
"""

import random
import tempfile
from pathlib import Path

from packages.engine.bench.engine import our_step, race

from rl_bench import Role, Run
from rl_engine.testing import ragged_batch, write_tiny_model

# the tiny model of packages/trainer/bench/trainer_step.py, which learns from 8 completions of each of 8 prompts
GROUPS, GROUP = 8, 8
SMALL = {
    "vocab_size": 80, "hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 48, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip


def main(run: Run) -> None:
    run.parameters(shared_prompts=SMALL, groups=GROUPS, group_size=GROUP)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = write_tiny_model(folder / "model", **SMALL)
        for prompt, completion in ((10, 32), (512, 64)):
            rows = group_rows(prompt, completion, groups=2 if run.quick and prompt > 100 else GROUPS)
            work = f"update, prompts of {prompt} and completions of {completion}"
            batch = ragged_batch(
                [row["input_ids"][:prompt] for row in rows], [row["input_ids"][prompt:] for row in rows]
            )
            budget = {"max_tokens_per_gpu": len(rows) * (prompt + completion), "matmul_precision": "medium"}
            shared, _ = our_step(model, batch, prefix_sharing=True, **budget)
            whole, _ = our_step(model, batch, prefix_sharing=False, **budget)
            run.compare(
                work, {"prompts fed once": shared}, peers={"prompts fed with every row": whole}, unit="tokens/s",
                amount=len(rows) * (prompt + completion), peer_repetitions=3 if prompt > 100 else None,
            )  # fmt: skip
        given = {"model": str(model), "batches": [rows] * 2, "batch_size": len(rows), "longest": prompt + completion}
        given |= {"device": "cpu", "is_random": False}
        for name, share, role in (
            ("prompts fed once", True, Role.OURS), ("prompts fed with every row", False, Role.PEER),
        ):  # fmt: skip
            found = race(run, folder, given | {"prefix_sharing": share}, systems=("rl-engine",))["rl-engine"]
            grown = (found["peak_bytes"] - found["base_bytes"]) / 2**20
            run.record(f"{work}: memory over imports", name, [grown], unit="MiB", role=role)


def group_rows(prompt: int, completion: int, *, groups: int) -> list[dict]:
    """Rows of completions of the same prompts, as `_sft_child.py` takes them."""
    draw = random.Random(0)
    rows, mask = [], [0] * prompt + [1] * completion
    for _ in range(groups):
        start = [draw.randrange(4, 70) for _ in range(prompt)]
        ends = ([draw.randrange(4, 70) for _ in range(completion)] for _ in range(GROUP))
        rows += [{"input_ids": start + end, "completion_mask": mask} for end in ends]
    return rows
