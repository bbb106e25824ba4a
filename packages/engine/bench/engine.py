"""Optimizer steps against a plain Hugging Face loop (padded there, packed here) and TRL's SFTTrainer: speed and memory.

TRL is an optional peer in an environment of its own, because it pins other versions than the workspace:

    uv venv trl && uv pip install --python trl/bin/python trl==1.16.0 transformers==5.23.0 datasets==5.2.0
    RL_BENCH_TRL_PYTHON=trl/bin/python uv run rl-bench engine
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_bench import Role, Run
from rl_engine import EngineConfig, OptimizerConfig, create_engine
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged_batch, write_tiny_model

SIZES = {"hidden_size": 160, "intermediate_size": 480, "num_hidden_layers": 4, "num_attention_heads": 5, "head_dim": 32}

# a vocabulary whose logits weigh, as they do in real models, and rows of mixed lengths
WIDE = {
    "vocab_size": 16384, "hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 6, "head_dim": 32, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
BATCH, LONGEST = 16, 512
VARIABLE = "RL_BENCH_TRL_PYTHON"


def draw_rows(num_rows, low, high):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(low, high, (2, num_rows), generator=generator).tolist()
    draw = lambda size: torch.randint(4, 70, (size,), generator=generator).tolist()  # noqa: E731
    return [draw(size) for size in lengths[0]], [draw(size) for size in lengths[1]]


def padded(prompts, completions):
    width = max(len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, stop = len(prompt), len(prompt) + len(completion)
        ids[row, :stop] = torch.tensor(prompt + completion)
        labels[row, start:stop], mask[row, :stop] = ids[row, start:stop], 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def plain_step(folder, prompts, completions, micro_rows):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    tokens = sum(map(len, completions))
    pieces = [
        padded(prompts[start : start + micro_rows], completions[start : start + micro_rows])
        for start in range(0, len(prompts), micro_rows)
    ]

    def step():
        optimizer.zero_grad()
        for piece in pieces:
            model(**piece, num_items_in_batch=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def our_step(folder, batch, **changes):
    engine = create_engine("fsdp", EngineConfig(model_path=str(folder), optimizer=OptimizerConfig(), **changes))
    engine.initialize()

    def step():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, sft_loss)
        engine.optimizer_step()

    return step, lambda: engine.forward_backward_batch(batch, None)


def main(run: Run) -> None:
    _short_rows(run)
    _mixed_rows(run)


def _short_rows(run: Run) -> None:
    num_rows, low, high = (128, 3, 12) if run.quick else (512, 3, 14)
    prompts, completions = draw_rows(num_rows, low, high)
    batch = ragged_batch(prompts, completions)
    tokens = sum(map(len, prompts)) + sum(map(len, completions))
    budget = 8192
    run.parameters(**SIZES, num_rows=num_rows, tokens=tokens, max_tokens_per_gpu=budget)
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(folder, num_key_value_heads=5, **SIZES)
        exact, scores = our_step(folder, batch, max_tokens_per_gpu=budget)
        medium, medium_scores = our_step(folder, batch, max_tokens_per_gpu=budget, matmul_precision="medium")
        plain = plain_step(folder, prompts, completions, micro_rows=budget // (2 * high - 2))
        amount = {"unit": "tokens/s", "amount": tokens}
        run.compare(
            "step", {"rl-engine": exact}, peers={"plain Hugging Face": plain}, goal=">= 1.0 of best peer", **amount
        )
        run.compare(
            "step, bfloat16 products", {"rl-engine": medium}, peers={"plain Hugging Face, float32": plain}, **amount
        )
        run.compare("old log-probs", {"float32": scores, "bfloat16 products": medium_scores}, **amount)


def _mixed_rows(run: Run) -> None:
    """Steps on rows of mixed lengths, each system in a process of its own."""
    draw = random.Random(0)
    batches = [[mixed_row(draw) for _ in range(BATCH)] for _ in range(3 if run.quick else 4)]
    tokens = [sum(len(row["input_ids"]) for row in rows) for rows in batches]
    threads = torch.get_num_threads()
    run.parameters(mixed=WIDE, batch_size=BATCH, longest=LONGEST, tokens_of_steps=tokens, threads=threads)
    trl_python = os.environ.get(VARIABLE)
    systems = {"rl-engine": sys.executable, "plain": sys.executable} | ({"trl": trl_python} if trl_python else {})
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model, settings = write_wide_model(folder / "model"), folder / "settings.json"
        given = {"model": str(model), "batches": batches, "batch_size": BATCH, "longest": LONGEST}
        settings.write_text(json.dumps(given | {"threads": threads, "lr": 1e-5}))
        for system, python in systems.items():
            script = str(Path(__file__).with_name("_sft_child.py"))
            subprocess.run(
                [python, "-W", "ignore", script, str(settings), system],
                check=True, timeout=100, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            found[system] = json.loads((folder / f"{system}.json").read_text())
    names = {"rl-engine": "rl-engine", "plain": "plain Hugging Face", "trl": "TRL's SFTTrainer"}

    def speeds(one):
        return [count / seconds for count, seconds in zip(tokens[1:], one["seconds"][1:], strict=True)]

    measured = {
        "rows of mixed lengths": ("tokens/s", speeds),
        "peak resident memory": ("MiB", lambda one: [one["peak_bytes"] / 2**20]),
        "its growth over imports": ("MiB", lambda one: [(one["peak_bytes"] - one["base_bytes"]) / 2**20]),
    }
    for metric, (unit, samples_of) in measured.items():
        goal = ">= 1.5 of best peer" if unit == "tokens/s" else ">= 1.43 of best peer"  # 1 / 0.7
        for system, name in names.items():
            taken = found.get(system)
            role = Role.OURS if system == "rl-engine" else Role.PEER
            run.record(
                metric, name, samples_of(taken) if taken else [], unit=unit, role=role,
                goal=goal if role is Role.OURS else None, note="" if taken else f"{VARIABLE} is not set",
            )  # fmt: skip


def mixed_row(draw):
    """A row of lognormal length, half of it prompt, as TRL takes it."""
    size = min(LONGEST, max(16, int(draw.lognormvariate(4.8, 0.8))))
    ids = [draw.randrange(WIDE["vocab_size"]) for _ in range(size)]
    return {"input_ids": ids, "completion_mask": [int(index >= size // 2) for index in range(size)]}


def write_wide_model(folder):
    write_tiny_model(folder)  # its tokenizer
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **WIDE), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder
