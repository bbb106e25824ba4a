"""A GRPO step of 64 completions of 32 tokens on a tiny model, beside TRL's; and how soon the first one is done.

Both start from the same model, which adds two digits and mostly writes the answer down in a form that is not rewarded,
have the same task, batch, learning rate, clipping and number of steps, and are measured by the rewards of their own
samples, eight seeds each.
TRL is an optional peer in an environment of its own, because it pins other versions than the workspace:

    uv venv trl && uv pip install --python trl/bin/python trl==1.16.0 transformers==5.23.0 datasets==5.2.0
    RL_BENCH_TRL_PYTHON=trl/bin/python uv run rl-bench trainer_step

It needs neither torchvision nor accelerate's configuration file.

What was tried (2026-11-22) beyond the products, where the update's other half goes, and brought less than a tenth:
SwiGLU as one function over blocks of rows (nothing), RMSNorm as one function with three passes (4 to 6%), smaller
micro-batches (slower), huge pages (0 to 7%). With `engine.precision=bfloat16` (one run of 24 steps) the update takes 82
ms instead of 102, but generation, which has no native pass in bfloat16, 112 instead of 59. Two things of threads had
cost a third of the steps: the engine computed with the number of threads that the server had set last, and OpenMP's
threads of the server made those of the engine sleep and wake between operations (4.6 and 6.0 steps/s, four alternated
pairs).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

import torch
from packages.trainer.bench._long_sums import mostly_wrong

from rl_bench import Role, Run
from rl_trainer.config import WarmupConfig, load_config
from rl_trainer.data import load_datasets
from rl_trainer.data.warmup import make_small_model

VARIABLE = "RL_BENCH_TRL_PYTHON"
PROMPTS, GROUP, MAX_NEW_TOKENS, LR, LR_WARMUP_STEPS, SEED = 8, 8, 32, 2.0e-4, 2, 0
WINDOW = 6
"""Steps whose samples make one point of the learning curve."""
NUM_SEEDS = 8
TIMEOUT_S = 500
WARMUP = WarmupConfig(hidden_size=192, num_layers=2, steps=100, batch_size=64, target_accuracy=0.25)
WRONG_SHARE = 0.7
DATA = Path(__file__).with_name("_long_sums.py:LongSums")
SIZES = [
    f"batch.batch_size={PROMPTS}", f"batch.mini_batch_size={PROMPTS}", f"batch.group_size={GROUP}",
    f"rollout.max_new_tokens={MAX_NEW_TOKENS}", f"engine.optimizer.lr={LR}",
    f"engine.optimizer.warmup_steps={LR_WARMUP_STEPS}", "eval_every=0",
    f"data={{format: {DATA}, eval_size: 16, max_prompt_tokens: 16}}",
]  # fmt: skip


def main(run: Run) -> None:
    steps, seeds = (12, (SEED,)) if run.quick else (4 * WINDOW, tuple(range(SEED, SEED + NUM_SEEDS)))
    threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    run.parameters(
        prompts=PROMPTS, group_size=GROUP, max_new_tokens=MAX_NEW_TOKENS, lr=LR, steps=steps, threads=threads,
        seeds=str(seeds),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rows = load_datasets(load_config("quickstart", SIZES).data, seed=SEED).train
        model = make_small_model(
            root / "made", WARMUP, mostly_wrong(rows, share=WRONG_SHARE, seed=SEED), seed=SEED, timeout_s=TIMEOUT_S,
            on_line=lambda _: None,
        )  # fmt: skip
        limit(run, model)
        rewards = {"ours, runtime=inline": ours(run, model, root / "inline", steps, "inline", seeds)}
        if run.quick:
            ours(run, model, root / "ray", 8, "ray", seeds)
        if (python := os.environ.get(VARIABLE)) is None:
            run.record("steps per second", "TRL", [], unit="steps/s", role=Role.PEER, note=f"{VARIABLE} is not set")
        else:
            rewards["TRL"] = trl(run, python, model, root / "trl", rows, steps, threads, seeds)
        if not run.quick:
            learning(run, rewards)


def learning(run, rewards):
    """Record what share of the samples was wrong, in windows of steps, of every seed."""
    for name, by_seed in rewards.items():
        role = Role.PEER if name == "TRL" else Role.OURS
        for first in range(0, 4 * WINDOW, WINDOW):
            is_last = first == 3 * WINDOW
            run.record(
                f"wrong of samples {first * PROMPTS * GROUP + 1} to {(first + WINDOW) * PROMPTS * GROUP}", name,
                [1 - fmean(means[first : first + WINDOW]) for means in by_seed], unit="share", role=role,
                goal=">= 1 of best peer" if is_last and role is Role.OURS else None,
            )  # fmt: skip


def limit(run, model):
    """Record how many steps there would be if they were nothing but the layers' products, each prompt's made once."""
    config = json.loads((model / "config.json").read_text())
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, key_heads = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = [(width, heads), (width, key_heads), (width, key_heads), (heads, width)]
    layer += [(width, inner), (width, inner), (inner, width)]
    weights = [torch.randn(shape) for shape in layer * config["num_hidden_layers"]]
    num_rows, prompt = PROMPTS * GROUP, 10
    learned, decoded = (
        {size: torch.randn(count, size) for size in {size for shape in layer for size in shape}}
        for count in (PROMPTS * prompt + num_rows * (MAX_NEW_TOKENS - 1), num_rows)
    )

    def products():
        for weight in weights:  # forward, and backward to the inputs and to the weight
            given, wanted = learned[weight.shape[0]], learned[weight.shape[1]]
            given @ weight, wanted @ weight.T, given.T @ wanted
        for _ in range(MAX_NEW_TOKENS - 1):
            for weight in weights:
                decoded[weight.shape[0]] @ weight

    torch.set_float32_matmul_precision("medium")  # the recipe's
    products()
    speeds = []
    for _ in range(7):
        start = time.perf_counter()
        products()
        speeds.append(1 / (time.perf_counter() - start))
    run.record("steps per second", "matrix products alone", speeds, unit="steps/s", role=Role.LIMIT)


def ours(run, model, out, steps, runtime, seeds):
    """Record the steps but the first two, and when the first was done; returns every step's mean reward, by seed."""
    overrides = [*SIZES, f"steps={steps}", f"runtime={runtime}", f"model.path={model}"]
    commands = [["quickstart", *overrides, f"seed={seed}", f"output_dir={out}/{seed}"] for seed in seeds]
    script = "import json, sys\nfrom rl_trainer.cli import main\nsys.exit(any(map(main, json.loads(sys.argv[1]))))"
    start = time.time()
    process = subprocess.Popen([sys.executable, "-c", script, json.dumps(commands)], stdout=subprocess.DEVNULL)
    first_s, metrics = None, out / str(seeds[0]) / "metrics.jsonl"
    while process.poll() is None:
        if first_s is None and metrics.exists() and metrics.read_text().count("\n") >= 2:
            first_s = time.time() - start
        if time.time() - start > TIMEOUT_S:
            process.kill()
        time.sleep(0.05)
    assert process.returncode == 0, f"rl-train ended with {process.returncode}"
    records = [
        [json.loads(line) for line in (out / str(seed) / "metrics.jsonl").read_text().splitlines()] for seed in seeds
    ]
    speeds = [1 / (r["wall_s"] - r["phase_s"].get("eval", 0.0)) for each in records for r in each[3:]]
    name = f"ours, runtime={runtime}"
    run.record("steps per second", name, speeds, unit="steps/s", goal=">= 4 of best peer")
    run.record("first step done after", name, [first_s], unit="s", goal="<= 40 s")
    for phase in ("generate", "update", "weight_sync"):
        run.record(f"{phase} of a step", name, [r["phase_s"][phase] for each in records for r in each[3:]], unit="s")
    return [[r["reward"] for r in each if r["reward"] is not None] for each in records]


def trl(run, python, model, out, rows, steps, threads, seeds):
    """Record the steps but the first two; returns every step's mean reward, by seed."""
    out.mkdir()
    settings = {
        "model": str(model), "output_dir": str(out), "results": str(out / "results.json"), "steps": steps,
        "completions": PROMPTS * GROUP, "group_size": GROUP, "max_new_tokens": MAX_NEW_TOKENS, "lr": LR,
        "lr_warmup_steps": LR_WARMUP_STEPS, "seeds": seeds, "threads": threads,
        "rows": [{"prompt": row["prompt"], "truth": row["reward_model"]["ground_truth"]} for row in rows],
    }  # fmt: skip
    (out / "settings.json").write_text(json.dumps(settings))
    script = Path(__file__).with_name("_trl_grpo.py")
    subprocess.run([python, script, out / "settings.json"], check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)
    done = json.loads((out / "results.json").read_text()).values()
    speeds = [1 / seconds for each in done for seconds in each["seconds"][2:]]
    run.record("steps per second", "TRL", speeds, unit="steps/s", role=Role.PEER)
    return [each["rewards"] for each in done]
