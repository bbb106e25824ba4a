"""A few steps of supervised fine-tuning in a process of their own: `_sft_child.py SETTINGS.json SYSTEM`.

SYSTEM is `rl-engine`, `plain` (a Hugging Face model and torch's AdamW) or `trl` (TRL's SFTTrainer, by TRL's own
interpreter). Writes the seconds of every step, and the bytes of resident memory before the model is built and at most,
to `SYSTEM.json` beside the settings.
"""

import json
import sys
import time
from importlib import import_module
from pathlib import Path

import torch


def resident(field):
    """Bytes: `VmRSS` now, `VmHWM` at most."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def padded(rows):
    """(B, L) arguments of a transformers model."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for index, row in enumerate(rows):
        stop, start = len(row["input_ids"]), row["completion_mask"].index(1)
        ids[index, :stop], mask[index, :stop] = torch.tensor(row["input_ids"]), 1
        labels[index, start:stop] = ids[index, start:stop]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def plain(given):
    from transformers import AutoModelForCausalLM

    base = resident("VmRSS")
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given["lr"], fused=True)

    def step(rows):
        optimizer.zero_grad()
        model(**padded(rows), use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return base, timed(step, given)


def ours(given):
    from rl_engine import EngineConfig, OptimizerConfig, create_engine
    from rl_engine.losses import sft_loss
    from rl_engine.testing import ragged_batch

    import_module("rl_engine.backends.fsdp")  # as the others import theirs before memory is looked at
    base = resident("VmRSS")
    config = EngineConfig(
        model_path=given["model"],
        optimizer=OptimizerConfig(lr=given["lr"]),
        max_tokens_per_gpu=given["batch_size"] * given["longest"],
    )
    engine = create_engine("fsdp", config)
    engine.initialize()

    def step(rows):
        starts = [row["completion_mask"].index(1) for row in rows]
        prompts = [row["input_ids"][:start] for row, start in zip(rows, starts, strict=True)]
        completions = [row["input_ids"][start:] for row, start in zip(rows, starts, strict=True)]
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(ragged_batch(prompts, completions), sft_loss)
        engine.optimizer_step()

    return base, timed(step, given)


def timed(step, given):
    seconds = []
    for rows in given["batches"]:
        start = time.perf_counter()
        step(rows)
        seconds.append(time.perf_counter() - start)
    return seconds


def trl(given):
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    seconds = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.start = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            seconds.append(time.perf_counter() - self.start)

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, *args, **kwargs):
            return SequentialSampler(self.train_dataset)

    base = resident("VmRSS")
    config = SFTConfig(
        output_dir=str(Path(sys.argv[1]).with_name("trl")), max_steps=len(given["batches"]),
        per_device_train_batch_size=given["batch_size"], max_length=given["longest"], learning_rate=given["lr"],
        weight_decay=0.01, max_grad_norm=1.0, optim="adamw_torch_fused", use_cpu=True, bf16=False,
        gradient_checkpointing=False, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    InOrder(
        model=AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(given["model"]), args=config, callbacks=[Clock()],
        train_dataset=Dataset.from_list([row for rows in given["batches"] for row in rows]),
    ).train()  # fmt: skip
    return base, seconds


def main():
    settings, system = Path(sys.argv[1]), sys.argv[2]
    given = json.loads(settings.read_text())
    torch.set_num_threads(given["threads"])
    base, seconds = {"rl-engine": ours, "plain": plain, "trl": trl}[system](given)
    found = {"seconds": seconds, "base_bytes": base, "peak_bytes": resident("VmHWM")}
    settings.with_name(f"{system}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
