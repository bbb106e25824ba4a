"""Optimizer steps against a plain Hugging Face loop (padded there, packed here) and TRL's SFTTrainer: speed and memory.

TRL is an optional peer in an environment of its own, because it pins other versions than the workspace:

    uv venv trl && uv pip install --python trl/bin/python trl==1.16.0 transformers==5.23.0 datasets==5.2.0
    RL_BENCH_TRL_PYTHON=trl/bin/python uv run rl-bench engine
"""

import os
import random
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_bench import Role, Run
from rl_bench.processes import race
from rl_bench.shapes import qwen3
from rl_engine.testing import write_tiny_model

# a vocabulary whose logits weigh, as they do in real models, and rows of mixed lengths
WIDE = {
    "vocab_size": 16384, "hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 6, "head_dim": 32, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
BATCH, LONGEST = 16, 512
# the vocabulary of Qwen, under a trunk that weighs little
QWEN_HEAD = {
    "vocab_size": 151936, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}  # fmt: skip
# a tiny model, which learns from 8 completions of each of 8 prompts
GROUPS = 8
SMALL = {
    "vocab_size": 80, "hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 48, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
QWEN, GPU_TOKENS, GPU_LONGEST = qwen3("0.6B"), 8192, 2048
CHILD = Path(__file__).with_name("_child.py")
NAMES = {"rl-engine": "rl-engine", "plain": "plain Hugging Face", "trl-sft": "TRL's SFTTrainer"}
VARIABLE = "RL_BENCH_TRL_PYTHON"


def main(run: Run) -> None:
    _mixed_rows(run)
    _head_memory(run)
    _prompts(run)
    gpu(run)


def _mixed_rows(run: Run) -> None:
    """Steps on rows of mixed lengths, each system in a process of its own."""
    draw = random.Random(0)
    batches = [
        [mixed_row(draw, LONGEST, WIDE["vocab_size"]) for _ in range(BATCH)] for _ in range(3 if run.quick else 4)
    ]
    run.parameters(mixed=WIDE, batch_size=BATCH, longest=LONGEST)
    with tempfile.TemporaryDirectory() as place:
        model = write_wide_model(Path(place) / "model")
        given = {"model": str(model), "batches": batches, "batch_size": BATCH, "longest": LONGEST}
        found = compete(run, Path(place), given | {"device": "cpu", "is_random": False})
    tell(run, "rows of mixed lengths", batches, found, warm_up=1, goal=">= 1.5 of best peer")
    is_above = {"peak resident memory": False, "its growth over imports": True}
    for metric, over_imports in is_above.items():
        tell_memory(run, metric, found, over_imports=over_imports)


def _head_memory(run: Run) -> None:
    """What steps under 152k tokens of vocabulary take at most, beyond weights, gradients and moments."""
    draw = random.Random(0)
    rows = [mixed_row(draw, 128, QWEN_HEAD["vocab_size"]) for _ in range(16)]
    scored = sum(sum(row["completion_mask"]) for row in rows)
    systems = {"rl-engine": "loss in the head", "separate": "log-probs, then the loss", "plain": NAMES["plain"]}
    run.parameters(qwen_head=QWEN_HEAD, qwen_scored_tokens=scored, qwen_tokens=sum(len(r["input_ids"]) for r in rows))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        write_tiny_model(folder, **QWEN_HEAD)
        held = 4 * (folder / "model.safetensors").stat().st_size
        given = {"model": str(folder), "batches": [rows] * 2, "batch_size": len(rows), "longest": 128}
        found = compete(run, Path(place), given | {"device": "cpu", "is_random": False}, systems=tuple(systems))
    run.parameters(qwen_held_mebibytes=held / 2**20)
    for system, name in systems.items():
        taken, role = found[system], Role.PEER if system == "plain" else Role.OURS
        above = (taken["peak_bytes"] - taken["base_bytes"] - held) / 2**20
        run.record("memory of a step under 152k tokens of vocabulary", name, [above], unit="MiB", role=role)
        run.record("step under 152k tokens of vocabulary", name, taken["seconds"][1:], unit="s", role=role)


def _prompts(run: Run) -> None:
    """Updates from groups of completions: each prompt fed once, as by default, and with every completion.

    Tokens a second are those of the rows, prompts and completions, however often a prompt is fed.
    """
    ways = {"prompts fed once": (True, Role.OURS), "prompts fed with every row": (False, Role.PEER)}
    run.parameters(shared_prompts=SMALL, groups=GROUPS, group_size=GROUPS)
    with tempfile.TemporaryDirectory() as place:
        model = write_tiny_model(Path(place) / "model", **SMALL)
        for prompt, completion in ((10, 32), (512, 64)):
            rows = group_rows(prompt, completion, groups=2 if run.quick and prompt > 100 else GROUPS)
            work, tokens = f"update, prompts of {prompt} and completions of {completion}", sum(map(row_size, rows))
            given = {"model": str(model), "batches": [rows] * 4, "batch_size": len(rows)}
            given |= {"longest": prompt + completion, "device": "cpu", "is_random": False}
            for name, (share, role) in ways.items():
                found = compete(run, Path(place), given | {"prefix_sharing": share}, systems=("rl-engine",))[
                    "rl-engine"
                ]
                speeds = [tokens / seconds for seconds in found["seconds"][1:]]
                run.record(work, name, speeds, unit="tokens/s", role=role)
                grown = (found["peak_bytes"] - found["base_bytes"]) / 2**20
                run.record(f"{work}: memory over imports", name, [grown], unit="MiB", role=role)


def row_size(row: dict) -> int:
    return len(row["input_ids"])


def group_rows(prompt: int, completion: int, *, groups: int) -> list[dict]:
    """Rows of completions of the same prompts, as `_child.py` takes them."""
    draw = random.Random(0)
    rows, mask = [], [0] * prompt + [1] * completion
    for _ in range(groups):
        start = [draw.randrange(4, 70) for _ in range(prompt)]
        ends = ([draw.randrange(4, 70) for _ in range(completion)] for _ in range(GROUPS))
        rows += [{"input_ids": start + end, "completion_mask": mask} for end in ends]
    return rows


def gpu(run: Run) -> None:
    """The same on a GPU: a model of half a billion parameters, packed batches of eight thousand tokens."""
    metric, memory = "0.6 B parameters on a GPU", "0.6 B parameters on a GPU, peak memory"
    goal = ">= 1.5 of best peer"
    if not torch.cuda.is_available():
        run.record(metric, NAMES["rl-engine"], [], unit="tokens/s", goal=goal, note="no CUDA device")
        run.record(memory, NAMES["rl-engine"], [], unit="MiB", goal=">= 1.43 of best peer", note="no CUDA device")
        return
    draw = random.Random(0)
    batches = [full_batch(draw) for _ in range(6 if run.quick else 12)]
    most_rows = max(map(len, batches))
    run.parameters(gpu_model=QWEN, gpu_tokens=GPU_TOKENS, gpu_longest=GPU_LONGEST)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        write_tiny_model(folder)  # its tokenizer
        AutoConfig.for_model("qwen3", **QWEN).save_pretrained(folder)
        (folder / "model.safetensors").unlink()
        given = {"model": str(folder), "batches": batches, "batch_size": most_rows, "longest": GPU_LONGEST}
        found = compete(run, Path(place), given | {"device": "cuda", "is_random": True}, timeout_s=280)
    tell(run, metric, batches, found, warm_up=3, goal=goal)
    tell_memory(run, memory, found, over_imports=False)


def compete(
    run: Run,
    folder: Path,
    given: dict,
    systems: tuple[str, ...] = ("rl-engine", "plain", "trl-sft"),
    *,
    timeout_s: float = 100,
) -> dict[str, dict]:
    """What each system's process wrote; TRL's only where there is its interpreter, and batches are of equally many.

    A peer that the GPU's memory is too small for is missing.
    """
    threads, trl_python = torch.get_num_threads(), os.environ.get(VARIABLE)
    run.parameters(threads=threads)
    if not trl_python or len({len(rows) for rows in given["batches"]}) > 1:
        systems = tuple(system for system in systems if system != "trl-sft")
    found, given = {}, given | {"threads": threads, "lr": 1e-5}
    for system in systems:
        python = trl_python if system == "trl-sft" else None
        wrote = race(CHILD, system, given, folder, python=python, timeout_s=timeout_s)
        if isinstance(wrote, dict):
            found[system] = wrote
        elif system == "rl-engine":
            raise RuntimeError(wrote)
    return found


def tell(run: Run, metric: str, batches: list, found: dict[str, dict], *, warm_up: int, goal: str) -> None:
    """Tokens a second of every step after the first ones."""
    tokens = [sum(map(row_size, rows)) for rows in batches][warm_up:]
    run.parameters(**{f"tokens of steps, {metric}": tokens})

    def speeds(one: dict) -> list[float]:
        return [count / seconds for count, seconds in zip(tokens, one["seconds"][warm_up:], strict=True)]

    _tell(run, metric, "tokens/s", found, speeds, goal)


def tell_memory(run: Run, metric: str, found: dict[str, dict], *, over_imports: bool) -> None:
    """Bytes at most, or what they are more than before the model."""

    def mebibytes(one: dict) -> list[float]:
        return [(one["peak_bytes"] - (one["base_bytes"] if over_imports else 0)) / 2**20]

    _tell(run, metric, "MiB", found, mebibytes, ">= 1.43 of best peer")  # 1 / 0.7


def _tell(run: Run, metric: str, unit: str, found: dict[str, dict], samples_of, goal: str) -> None:
    for system, name in NAMES.items():
        taken, role = found.get(system), Role.OURS if system == "rl-engine" else Role.PEER
        why = (
            f"{VARIABLE} is not set, or batches differ in rows"
            if system == "trl-sft"
            else "the GPU's memory is too small"
        )
        note = "" if taken else why
        run.record(
            metric, name, samples_of(taken) if taken else [], unit=unit, role=role,
            goal=goal if role is Role.OURS else None, note=note,
        )  # fmt: skip


def mixed_row(draw, longest, vocab_size, *, centre=4.8):
    """A row of lognormal length, half of it prompt, as TRL takes it."""
    size = min(longest, max(16, int(draw.lognormvariate(centre, 0.8))))
    ids = [draw.randrange(vocab_size) for _ in range(size)]
    return {"input_ids": ids, "completion_mask": [int(index >= size // 2) for index in range(size)]}


def full_batch(draw):
    """Rows of mixed lengths with `GPU_TOKENS` tokens in all."""
    rows, left = [], GPU_TOKENS
    while left >= 32:
        row = mixed_row(draw, min(GPU_LONGEST, left), QWEN["vocab_size"], centre=6.0)
        rows.append(row)
        left -= len(row["input_ids"])
    return rows


def write_wide_model(folder):
    write_tiny_model(folder)  # its tokenizer
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **WIDE), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder
