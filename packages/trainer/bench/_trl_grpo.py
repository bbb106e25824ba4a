"""TRL's GRPOTrainer on a prepared task, run by TRL's own interpreter: `python _trl_grpo.py SETTINGS.json`.

Writes the seconds and those of generation of every step to the file that the settings name.
"""

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *args, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        self.seconds.append(time.perf_counter() - self.start)


def is_right(completions, truth, **kwargs):
    """Exact match."""
    return [float(c[0]["content"].strip(" ") == t.strip(" ")) for c, t in zip(completions, truth, strict=True)]


def main():
    given = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(given["threads"])
    Path(given["results"]).write_text(json.dumps(train(given)))


def train(given):
    config = GRPOConfig(
        output_dir=given["output_dir"], max_steps=given["steps"], per_device_train_batch_size=given["completions"],
        num_generations=given["group_size"], max_completion_length=given["max_new_tokens"],
        learning_rate=given["lr"], lr_scheduler_type="cosine",
        adam_beta1=0.9, adam_beta2=0.99,
        weight_decay=0.0, max_grad_norm=1.0, beta=0.0, epsilon=0.2, epsilon_high=0.28, loss_type="dapo",
        temperature=1.0,
        use_cpu=not given.get("is_gpu"), bf16=bool(given.get("is_gpu")), gradient_checkpointing=False, seed=0,
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    clock = Clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(given["model"]),
        reward_funcs=is_right, args=config, train_dataset=Dataset.from_list(given["rows"]), callbacks=[clock],
    )  # fmt: skip
    generated = timed(trainer, "_generate")
    trainer.train()
    return {"seconds": clock.seconds, "generated": generated}


def timed(trainer, name):
    """Seconds of each call of a method from now on."""
    seconds, method = [], getattr(trainer, name)

    def call(*args, **kwargs):
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    setattr(trainer, name, call)
    return seconds


if __name__ == "__main__":
    main()
