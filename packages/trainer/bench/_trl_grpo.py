"""TRL's GRPOTrainer on a prepared task, run by TRL's own interpreter: `python _trl_grpo.py SETTINGS.json`.

Writes the seconds of every step and the trained model to the folder that the settings name.
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
    return [float(c[0]["content"].strip() == t.strip()) for c, t in zip(completions, truth, strict=True)]


def main():
    given = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(given["threads"])
    out = Path(given["output_dir"])
    config = GRPOConfig(
        output_dir=str(out), max_steps=given["steps"], per_device_train_batch_size=given["completions"],
        num_generations=given["group_size"], max_completion_length=given["max_new_tokens"],
        learning_rate=given["lr"], lr_scheduler_type="cosine", warmup_steps=10, adam_beta1=0.9, adam_beta2=0.99,
        weight_decay=0.0, max_grad_norm=1.0, beta=0.0, epsilon=0.2, epsilon_high=0.28, loss_type="dapo",
        temperature=1.0,
        use_cpu=True, bf16=False, gradient_checkpointing=False, seed=given["seed"],
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    clock = Clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(given["model"]),
        reward_funcs=is_right, args=config, train_dataset=Dataset.from_list(given["rows"]), callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(out / "model"))
    (out / "steps.json").write_text(json.dumps(clock.seconds))


if __name__ == "__main__":
    main()
