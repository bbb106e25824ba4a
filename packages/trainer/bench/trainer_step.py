"""A GRPO step of 64 completions of 32 tokens on a tiny model, beside TRL's; and how soon the first one is done.

Both start from the same model, which adds two-digit numbers right now and then (answers are padded to 32 tokens), have
the same task, batch, learning rate, clipping and number of steps, and are measured on the same held-out problems by
`rl-eval` afterwards.
TRL is an optional peer in an environment of its own, because it pins other versions than the workspace:

    uv venv trl && uv pip install --python trl/bin/python trl==1.16.0 transformers==5.23.0 datasets==5.2.0
    RL_BENCH_TRL_PYTHON=trl/bin/python uv run rl-bench trainer_step

It needs neither torchvision nor accelerate's configuration file.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from rl_bench import Role, Run
from rl_trainer.config import WarmupConfig, load_config
from rl_trainer.data import load_datasets
from rl_trainer.warmup import make_small_model

VARIABLE = "RL_BENCH_TRL_PYTHON"
PROMPTS, GROUP, MAX_NEW_TOKENS, LR, SEED = 8, 8, 32, 6.0e-4, 0
TIMEOUT_S = 500
WARMUP = WarmupConfig(hidden_size=192, num_layers=2, steps=300, batch_size=64, target_accuracy=0.12)
DATA = Path(__file__).with_name("_long_sums.py:LongSums")
SIZES = [
    f"batch.batch_size={PROMPTS}", f"batch.mini_batch_size={PROMPTS}", f"batch.group_size={GROUP}",
    f"rollout.max_new_tokens={MAX_NEW_TOKENS}", f"engine.lr={LR}", f"seed={SEED}", "eval_every=0", "save_every=0",
    f"data={{format: {DATA}, eval_size: 256, max_prompt_tokens: 16}}",
]  # fmt: skip


def main(run: Run) -> None:
    steps = 12 if run.quick else 40
    threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    run.parameters(
        prompts=PROMPTS, group_size=GROUP, max_new_tokens=MAX_NEW_TOKENS, lr=LR, steps=steps, threads=threads, seed=SEED
    )
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        config = load_config("quickstart", SIZES)
        datasets = load_datasets(config.data, seed=SEED)
        model = make_small_model(
            root / "made", WARMUP, datasets.train, seed=SEED, timeout_s=TIMEOUT_S, on_line=lambda _: None
        )
        python = os.environ.get(VARIABLE)
        limit(run, model)
        done = {"inline": ours(run, model, root / "inline", steps, "inline")}
        if run.quick:
            ours(run, model, root / "ray", 8, "ray")
        if python is None:
            run.record("steps per second", "TRL", [], unit="steps/s", role=Role.PEER, note=f"{VARIABLE} is not set")
        else:
            done["TRL"] = trl(run, python, model, root / "trl", datasets.train, steps, threads)
        if run.quick:
            return
        for name, trained in done.items():
            role, goal = (Role.PEER, None) if name == "TRL" else (Role.OURS, ">= 1 of best peer")
            metric = f"wrong held-out answers after {steps * PROMPTS * GROUP} samples"
            run.record(metric, name, [wrong(trained)], unit="share", role=role, goal=goal)


def limit(run, model):
    """Record how many steps there would be if they were nothing but the matrix products of the layers."""
    config = json.loads((model / "config.json").read_text())
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, key_heads = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = [(width, heads), (width, key_heads), (width, key_heads), (heads, width)]
    layer += [(width, inner), (width, inner), (inner, width)]
    weights = [torch.randn(shape) for shape in layer * config["num_hidden_layers"]]
    num_rows, prompt = PROMPTS * GROUP, 10
    learned, decoded = (
        {size: torch.randn(count, size) for size in {size for shape in layer for size in shape}}
        for count in (num_rows * (prompt + MAX_NEW_TOKENS - 1), num_rows)
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


def ours(run, model, out, steps, runtime):
    """Record the steps but the first two, and when the first was done; returns the trained model."""
    start = time.time()
    command = [sys.executable, "-m", "rl_trainer.cli", "quickstart", *SIZES, f"steps={steps}", f"runtime={runtime}"]
    process = subprocess.Popen([*command, f"model.path={model}", f"output_dir={out}"], stdout=subprocess.DEVNULL)
    first_s, metrics = None, out / "metrics.jsonl"
    while process.poll() is None:
        if first_s is None and metrics.exists() and metrics.read_text().count("\n") >= 2:
            first_s = time.time() - start
        if time.time() - start > TIMEOUT_S:
            process.kill()
        time.sleep(0.05)
    assert process.returncode == 0, f"rl-train ended with {process.returncode}"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    speeds = [1 / (r["wall_s"] - r["phase_s"].get("eval", 0.0)) for r in records[3:]]
    name = f"ours, runtime={runtime}"
    run.record("steps per second", name, speeds, unit="steps/s", goal=">= 4 of best peer")
    run.record("first step done after", name, [first_s], unit="s", goal="<= 40 s")
    return out / f"checkpoint-{steps}" / "model"


def trl(run, python, model, out, rows, steps, threads):
    """Record the steps but the first two; returns the trained model."""
    out.mkdir()
    settings = {
        "model": str(model), "output_dir": str(out), "steps": steps,
        "completions": PROMPTS * GROUP, "group_size": GROUP,
        "max_new_tokens": MAX_NEW_TOKENS, "lr": LR, "seed": SEED, "threads": threads,
        "rows": [{"prompt": row["prompt"], "truth": row["reward_model"]["ground_truth"]} for row in rows],
    }  # fmt: skip
    (out / "settings.json").write_text(json.dumps(settings))
    script = Path(__file__).with_name("_trl_grpo.py")
    subprocess.run([python, script, out / "settings.json"], check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)
    speeds = [1 / seconds for seconds in json.loads((out / "steps.json").read_text())[2:]]
    run.record("steps per second", "TRL", speeds, unit="steps/s", role=Role.PEER)
    return out / "model"


def wrong(model):
    """Share of the held-out problems that the greedy answer gets wrong."""
    command = [sys.executable, "-c", "import rl_trainer.cli as c; raise SystemExit(c.main_eval())", "quickstart"]
    done = subprocess.run(
        [*command, *SIZES, f"model.path={model}"], check=True, timeout=TIMEOUT_S, capture_output=True, text=True
    )
    return 1.0 - float(next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("accuracy")))
