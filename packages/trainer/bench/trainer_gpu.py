"""A GRPO step of 128 completions of 256 tokens on one GPU, with a random model of the shape of Qwen3-0.6B.

Engine and server share the GPU in one process (`runtime=inline`), so that neither Ray nor a second GPU is needed.
Each phase stands beside its bound: the bytes or products that it cannot do without, at the speed of a copy and of a
product in this run. Without a GPU a tiny model takes its place, which tells nothing but that the benchmark works.
"""

import json
import math
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch

from rl_bench import Role, Run, has_card
from rl_bench.shapes import qwen3, weight_shapes
from rl_rollout.testing import write_tiny_model

PROMPTS, GROUP, MAX_NEW_TOKENS, PROMPT_TOKENS = 16, 8, 256, 64
STEPS, WARM_UP, TIMEOUT_S = 10, 3, 500
QWEN3_600M = qwen3("0.6B", max_position_embeddings=1024, initializer_range=0.02)
METRIC, GOAL = "step of 128 completions x 256 tokens, Qwen3-0.6B shape", "<= 1.5 s"
TRL = "TRL's GRPOTrainer 1.16, generation by transformers"
WHY_NO_TRL = "not run here; it took 8.77 s a step in this shape on one H200 (torch 2.11, 2026-11-20)"
PARAMETERS = sum(math.prod(shape) for shape in weight_shapes(QWEN3_600M).values())
TASK = Path(__file__).with_name("_letters.py")


def main(run: Run) -> None:
    has_gpu = torch.cuda.is_available()
    new_tokens = MAX_NEW_TOKENS if has_gpu and not run.quick else 32
    tokens = PROMPTS * GROUP * (PROMPT_TOKENS + new_tokens)  # a micro-batch holds all of a step's
    run.parameters(prompts=PROMPTS, group_size=GROUP, new_tokens=new_tokens, prompt_tokens=PROMPT_TOKENS, steps=STEPS)
    run.parameters(max_tokens_per_gpu=tokens)
    with tempfile.TemporaryDirectory() as folder:
        model, out = Path(folder) / "model", Path(folder) / "out"
        write_tiny_model(model, **(QWEN3_600M if has_gpu else {}))
        overrides = [
            f"model.path={model}", f"output_dir={out}", f"steps={STEPS}", "eval_every=0", "save_every=0",
            "runtime=inline", f"data={{format: {TASK}:Letters, eval_size: 2, max_prompt_tokens: {PROMPT_TOKENS}}}",
            f"reward.path={TASK}:share_of_even", f"batch.batch_size={PROMPTS}", f"batch.mini_batch_size={PROMPTS}",
            f"batch.group_size={GROUP}", f"rollout.max_new_tokens={new_tokens}",
            f"rollout.max_model_len={PROMPT_TOKENS + new_tokens}", "algorithm.kl_coef=0",
            "algorithm.old_logprobs=rollout", "engine.activation_checkpointing=false",
            f"engine.max_tokens_per_gpu={tokens}",
        ]  # fmt: skip
        command = [sys.executable, "-m", "rl_trainer.cli", "gsm8k", *overrides]
        limits = bounds(new_tokens) if has_gpu else {}
        try:
            with Watched() as watched:
                subprocess.run(command, check=True, timeout=TIMEOUT_S, stdout=sys.stderr)
        finally:  # also of a run whose time ended: the steps that it has
            record(run, (out / "metrics.jsonl").read_text(), limits, watched.most_gib)


def record(run: Run, lines: str, limits: dict[str, float], most_gib: float) -> None:
    steps = [json.loads(line) for line in lines.splitlines()][1 + WARM_UP :]
    run.record(
        METRIC, "ours, runtime=inline", [step["wall_s"] for step in steps], unit="s", goal=GOAL,
        can_tell=has_card("H200") and not run.quick,
    )  # fmt: skip
    run.record(METRIC, TRL, [], unit="s", role=Role.PEER, note=WHY_NO_TRL)
    for phase in ("generate", "update", "weight_sync"):
        metric = f"{phase} of a step"
        if phase in limits:
            run.record(metric, "bytes and products at this GPU's speed", [limits[phase]], unit="s", role=Role.LIMIT)
        run.record(metric, "ours, runtime=inline", [step["phase_s"][phase] for step in steps], unit="s")
    if torch.cuda.is_available():
        run.record("memory of the GPU at its fullest", "ours, runtime=inline", [most_gib], unit="GiB")


class Watched:
    """The most memory that all processes hold of the GPU, as the driver tells this one every few milliseconds."""

    most_gib = 0.0

    def __enter__(self):
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if torch.cuda.is_available():
            self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join(5)

    def _watch(self):
        while not self._is_over.wait(0.02):
            free, total = torch.cuda.mem_get_info()
            self.most_gib = max(self.most_gib, (total - free) / 2**30)


def bounds(new_tokens):
    """Seconds of each phase: weights and cache read once a token, products of forward and backward, a copy."""
    size = 8192
    a = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
    flops = 2 * size**3 / seconds_of(lambda: a @ a)
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = source.nbytes / seconds_of(lambda: target.copy_(source))  # as many are written
    weights, rows = 2 * PARAMETERS, PROMPTS * GROUP
    cached = 28 * 2 * 8 * 128 * 2  # bytes of a token's keys and values
    read = new_tokens * weights + rows * cached * sum(PROMPT_TOKENS + i for i in range(new_tokens))
    tokens = rows * (PROMPT_TOKENS + new_tokens)
    return {"generate": read / (2 * copied), "update": 6 * PARAMETERS * tokens / flops, "weight_sync": weights / copied}


def seconds_of(work):
    """The fastest of five, after one."""
    found = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return min(found[1:])


gpu = main
