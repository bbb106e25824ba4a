"""SFT, then GRPO, then the benchmark: a small model on GSM8K, every number from this one script.

    python examples/gsm8k/run.py --model HuggingFaceTB/SmolLM2-135M-Instruct --data gsm8k --out out --size gpu

Stages run in one process, in order: accuracy of the start, `rl-sft` on the train split, accuracy, GRPO from there,
accuracy. Each evaluation is greedy, and the majority of eight. `results.json` is written after each stage; the same
command goes on where it was cut off, and with `--minutes 9` it stops by itself, with a checkpoint, and exits with 3.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rl_engine.finetune.cli import sft_main
from rl_trainer.cli import main as train_main
from rl_trainer.cli import main_eval
from rl_trainer.data.rows import GSM8K_INSTRUCTION

SIZES: dict[str, dict[str, Any]] = {
    "gpu": {"sft_rows": 7473, "sft": ["epochs=2", "lr=2e-5"], "test": 1319, "majority": 1319, "tokens": 320,
            "grpo": ["steps=100", "batch.batch_size=32", "batch.group_size=8", "batch.mini_batch_size=32"]},
    "cpu": {"sft_rows": 256, "sft": ["epochs=1", "lr=2e-5", "batch_size=16", "warmup_steps=4",
            "max_tokens_per_gpu=1024"], "test": 100, "majority": 25, "tokens": 160,
            "grpo": ["steps=3", "batch.batch_size=8", "batch.group_size=8", "batch.mini_batch_size=8",
                     "engine.max_tokens_per_gpu=1024"]},
    "tiny": {"sft_rows": 8, "sft": ["steps=2", "batch_size=2", "max_tokens_per_gpu=1024"], "test": 2, "majority": 2,
             "tokens": 16, "grpo": ["steps=2", "batch.batch_size=2", "batch.group_size=2", "batch.mini_batch_size=2"]},
}  # fmt: skip
"""`gpu`: all 1,319 test rows; `cpu`: shortened, which shows the direction; `tiny`: a rehearsal."""
_CALCULATION = re.compile(r"<<[^>]*>>")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder, or the hub's id of a model")
    parser.add_argument("--data", required=True, type=Path, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--out", required=True, type=Path, help="folder of rows, models, runs and results.json")
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--minutes", type=float, help="stop after as many minutes, with a checkpoint")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.minutes is not None:
        timer = threading.Timer(60 * given.minutes, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()
    size, sft, grpo = SIZES[given.size], given.out / "sft", given.out / "grpo"
    results = Results(given.out / "results.json", model=given.model, size=given.size, **size)
    rows = given.out / "sft.jsonl"
    write_rows(given.data / "train.jsonl", rows, size["sft_rows"])
    settings = [f"data.path={given.data}", "data.max_prompt_tokens=384", "runtime=inline"]
    settings += [f"rollout.max_new_tokens={size['tokens']}", f"rollout.max_model_len={384 + size['tokens']}"]
    stages = {
        "before": lambda: evaluate(given.model, size, settings),
        "sft": lambda: fine_tune(given.model, rows, sft, size),
        "after_sft": lambda: evaluate(str(sft), size, settings),
        "grpo": lambda: learn(str(sft), grpo, size, settings),
        "after_grpo": lambda: evaluate(str(newest(grpo)), size, settings),
    }
    for name, stage in stages.items():
        if name not in results.values:
            start = time.time()
            try:
                found = stage()
            except (KeyboardInterrupt, StoppedError):
                print(f"stopped during {name}; the same command goes on from there", flush=True)
                return 3
            results.add(name, {**found, "seconds": round(time.time() - start, 1)})
    return 0


class StoppedError(Exception):
    """A command ended by a signal, after it had written what it goes on from."""


class Results:
    """`results.json`: settings and the figures of every stage that is done."""

    def __init__(self, file: Path, **settings: Any) -> None:
        self._file = file
        self.values: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"settings": settings}
        if self.values["settings"] != settings:
            raise SystemExit(f"{file} is of {self.values['settings']}; give another --out for {settings}")

    def add(self, stage: str, found: dict[str, Any]) -> None:
        self.values[stage] = found
        self._file.with_suffix(".part").write_text(json.dumps(self.values, indent=1) + "\n")
        self._file.with_suffix(".part").rename(self._file)
        print(f"{stage}: {found}", flush=True)


def write_rows(train: Path, file: Path, count: int) -> None:
    """Rows for `rl-sft`: the solution without its calculator marks, and the answer in a box as GRPO's prompt asks."""
    rows = []
    for line in train.read_text().splitlines()[:count]:
        row = json.loads(line)
        solution, _, answer = _CALCULATION.sub("", row["answer"]).rpartition("####")
        prompt = [{"role": "user", "content": f"{row['question']}\n{GSM8K_INSTRUCTION}"}]
        rows.append({"prompt": prompt, "completion": f"{solution.strip()}\nThe answer is \\boxed{{{answer.strip()}}}."})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluate(model: str, size: dict[str, Any], settings: list[str]) -> dict[str, float]:
    """Accuracy on the test rows, greedy, and of the majority of eight samples."""
    found = {}
    for num_rows, samples in ((size["test"], 1), (size["majority"], 8)):
        command = ["gsm8k", f"model.path={model}", f"data.eval_size={num_rows}", *settings, "--samples", str(samples)]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            check("rl-eval", main_eval(command))
        for name, value in re.findall(r"^(accuracy|maj@8) +(\d\.\d+) ", printed.getvalue(), re.MULTILINE):
            found["greedy" if samples == 1 else "majority of 8" if name == "maj@8" else "mean of 8"] = float(value)
    return found


def fine_tune(model: str, rows: Path, out: Path, size: dict[str, Any]) -> dict[str, Any]:
    command = ["sft", f"model.path={model}", f"data.path={rows}", f"output_dir={out}", *size["sft"]]
    check("rl-sft", sft_main([*command, "save_every=20", "log_every=1", "resume=true"]))
    lines = [json.loads(line) for line in (out.with_name(f"{out.name}.run") / "metrics.jsonl").read_text().splitlines()]
    return {"steps": len(lines), "first loss": lines[0]["metrics"]["loss"], "last loss": lines[-1]["metrics"]["loss"]}


def learn(model: str, out: Path, size: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    command = ["gsm8k", f"model.path={model}", f"output_dir={out}", *settings, *size["grpo"], "eval_every=0"]
    own = ["data.eval_size=16", "algorithm.kl_coef=0", "engine.optimizer.lr=5e-6", "save_every=20", "--resume"]
    check("rl-train", train_main([*command, *own]))
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][1:]
    walls = [step["wall_s"] for step in steps]
    tokens = sum(step["num_tokens"] for step in steps)
    return {
        "steps": len(steps), "rewards": [round(step["reward"], 3) for step in steps],
        "seconds a step": round(sum(walls) / len(walls), 2), "tokens a second": round(tokens / sum(walls), 1),
        **peak_memory(),
    }  # fmt: skip


def peak_memory() -> dict[str, float]:
    import resource

    import torch

    peak = {"peak memory, GiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)}
    if torch.cuda.is_available():
        peak["peak GPU memory, GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return peak


def newest(out: Path) -> Path:
    return max(out.glob("checkpoint-*"), key=lambda each: int(each.name.rpartition("-")[2])) / "model"


def check(program: str, code: int) -> None:
    if code in (130, 143):
        raise StoppedError
    if code:
        raise SystemExit(f"{program} ended with {code}")


if __name__ == "__main__":
    sys.exit(main())
