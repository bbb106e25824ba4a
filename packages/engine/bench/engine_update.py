"""A GRPO update of 128 rows of 64 and 256 tokens, in groups of eight, on one GPU: Qwen3-0.6B's and 1.7B's shapes.

Beside TRL's on the same batch, in its own environment where `RL_BENCH_TRL_PYTHON` names one (see `engine.py`), in this
one where it can be imported. Without a GPU a tiny model takes its place, which tells nothing but that this works.
`RL_BENCH` names shapes and systems to run alone, for example `RL_BENCH="0.6B fsdp trl"`.
"""

import importlib.util
import os
import random
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_bench import Role, Run, has_card
from rl_bench.processes import race
from rl_bench.shapes import qwen3
from rl_engine.testing import write_tiny_model

ROWS, GROUP, PROMPT, COMPLETION, UPDATES, WARM_UP = 128, 8, 64, 256, 7, 2
PEAK_FLOPS = 989e12  # bfloat16 without sparsity, of NVIDIA's data sheets of H100 SXM and H200
TOKENS = {"0.6B": ROWS * (PROMPT + COMPLETION), "1.7B": ROWS * (PROMPT + COMPLETION) // 2}
TRL_ROWS = {"0.6B": 32, "1.7B": 16}
NAMES = {
    "fsdp": "rl-engine, fsdp",
    "trl": "TRL's GRPOTrainer",
    "compiled": "rl-engine, fsdp, torch_compile",
    "megatron": "rl-engine, megatron",
    "local": "rl-engine, megatron, megatron-core's own layers",
}


def main(run: Run) -> None:
    """Every shape and system that this machine has."""
    is_gpu, named = torch.cuda.is_available(), os.environ.get("RL_BENCH", "").split()
    shapes = [name for name in TOKENS if name in named] or [*TOKENS]
    systems = [system for system in NAMES if system in named] or [*NAMES]
    for name in shapes if is_gpu else ["0.6B"]:
        _shape(run, name, systems, is_gpu=is_gpu)


gpu = main


def _shape(run: Run, name: str, systems: list[str], *, is_gpu: bool) -> None:
    draw = random.Random(0)
    rows, prompt, completion = (ROWS, PROMPT, COMPLETION) if is_gpu else (16, 8, 8)
    sizes = qwen3(name) if is_gpu else {}
    with tempfile.TemporaryDirectory() as place:
        folder = write_tiny_model(Path(place) / "model")  # its tokenizer
        if is_gpu:
            with torch.device("cuda"):
                model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes), dtype=torch.bfloat16)
            model.save_pretrained(folder)
            del model
            torch.cuda.empty_cache()
        config = AutoConfig.from_pretrained(folder)
        tokens = lambda count: [draw.randrange(4, 70) for _ in range(count)]  # noqa: E731
        prompts = [tokens(prompt) for _ in range(rows // GROUP)]
        given = {
            "model": str(folder), "device": "cuda" if is_gpu else "cpu", "lr": 1e-6, "group": GROUP,
            "prompts": [prompts[row // GROUP] for row in range(rows)],
            "completions": [tokens(completion) for _ in range(rows)],
            "advantages": [draw.uniform(-1, 1) for _ in range(rows)],
            "tokens": TOKENS[name], "rows": TRL_ROWS[name] if is_gpu else 8,
            "updates": WARM_UP + 1 if run.quick or not is_gpu else UPDATES,
        }  # fmt: skip
        run.parameters(**{f"{name} {key}": given[key] for key in ("tokens", "rows", "updates")})
        count, flops = rows * (prompt + completion), _flops(config, rows, prompt, completion)
        for system in systems:
            _tell(run, name, system, _race(Path(place), given, system), count, flops)


def _tell(run: Run, name: str, system: str, found: dict | str, count: int, flops: float) -> None:
    """Rows of one system; of a sentence, why it has none."""
    is_gpu, role = torch.cuda.is_available(), Role.PEER if system == "trl" else Role.OURS
    update, who = f"GRPO update, {name} shape", NAMES[system]
    if isinstance(found, str):
        run.record(update, who, [], unit="tokens/s", role=role, note=found)
        return
    seconds, goal = found["seconds"][WARM_UP:], ">= 1.5 of best peer" if system == "fsdp" else None
    run.record(update, who, [count / each for each in seconds], unit="tokens/s", role=role, goal=goal, can_tell=is_gpu)
    start = found["start"]
    parts = ", ".join(f"{part} after {since:.1f} s" for part, since in start.items())
    run.record(f"until the first update, {name} shape", who, [start["first update"]], unit="s", role=role, note=parts)
    if has_card("H200") or has_card("H100"):
        shares = [100 * flops / PEAK_FLOPS / each for each in seconds]
        run.record(f"share of the GPU's products, {name} shape", who, shares, unit="percent", role=role)
    if is_gpu:
        run.record(f"peak memory, {name} shape", who, [found["peak_bytes"] / 2**30], unit="GiB", role=role)


def _flops(config, rows: int, prompt: int, completion: int) -> float:
    """Operations of the products of forward and backward pass; a head only at completions, no prompt shared."""
    size, heads = config.head_dim, config.num_attention_heads
    layer = 2 * config.hidden_size * (heads + config.num_key_value_heads) * size
    layer += 3 * config.hidden_size * config.intermediate_size
    length = prompt + completion
    scores = rows * length**2 * heads * size  # two products, of which causality leaves half
    products = config.num_hidden_layers * (layer * rows * length + scores)
    return 6 * (products + rows * completion * config.hidden_size * config.vocab_size)


def _race(folder: Path, given: dict, system: str) -> dict | str:
    """What a system's process wrote, or why it did not."""
    needs = {"trl": "trl", "megatron": "megatron", "local": "transformer_engine"}.get(system)
    python = os.environ.get("RL_BENCH_TRL_PYTHON") if system == "trl" else None
    if python is None and needs is not None and importlib.util.find_spec(needs) is None:
        return f"{needs} is not installed"
    if system not in ("fsdp", "trl") and given["device"] == "cpu":
        return "needs a GPU"
    return race(Path(__file__).with_name("_child.py"), system, given, folder, python=python)
