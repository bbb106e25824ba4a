"""A GRPO step of 128 completions of 256 tokens on one GPU, with a random model of the shape of Qwen3-0.6B.

Engine and server share the GPU in one process (`runtime=inline`), so that neither Ray nor a second GPU is needed. The
goal's peer, TRL with its own generation, took 8.8 s a step on an H200. Without a GPU a tiny model takes its place,
which tells nothing but that the benchmark works.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from rl_bench import Run
from rl_rollout.testing import write_tiny_model

PROMPTS, GROUP, MAX_NEW_TOKENS, PROMPT_TOKENS = 16, 8, 256, 64
STEPS, WARM_UP, TIMEOUT_S = 10, 3, 500
QWEN3_600M = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 1024,
    "initializer_range": 0.02,
}  # fmt: skip
METRIC, GOAL = "step of 128 completions x 256 tokens, Qwen3-0.6B shape", "<= 1.5 s"
PHASES = ("generate", "update", "weight_sync")
TASK = Path(__file__).with_name("_letters.py")


def main(run: Run) -> None:
    has_gpu = torch.cuda.is_available()
    new_tokens = MAX_NEW_TOKENS if has_gpu and not run.quick else 32
    run.parameters(prompts=PROMPTS, group_size=GROUP, new_tokens=new_tokens, prompt_tokens=PROMPT_TOKENS, steps=STEPS)
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
        ]  # fmt: skip
        command = [sys.executable, "-m", "rl_trainer.cli", "gsm8k", *overrides]
        subprocess.run(command, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)
        lines = (out / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][1 + WARM_UP :]
    run.record(
        METRIC, "ours, runtime=inline", [step["wall_s"] for step in steps], unit="s", goal=GOAL,
        can_tell=has_gpu and not run.quick,
    )  # fmt: skip
    for phase in PHASES:
        run.record(f"{phase} of a step", "ours, runtime=inline", [step["phase_s"][phase] for step in steps], unit="s")


gpu = main
