"""A few steps of supervised fine-tuning in a process of their own: `_sft_child.py SETTINGS.json SYSTEM`.

SYSTEM is `rl-engine`, `separate` (the same, log-probs first and then the loss), `plain` (a Hugging Face model and
torch's AdamW) or `trl` (TRL's SFTTrainer, by TRL's own interpreter). Writes the seconds of every step, and the bytes of
memory before the model is built and at most, to `SYSTEM.json` beside the settings: resident ones, or on a GPU those of
its allocator.

On a GPU all of them keep float32 parameters and optimizer state and compute in bfloat16.
"""

import json
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import torch


def resident(field):
    """Bytes: `VmRSS` now, `VmHWM` at most."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def memory(field, given):
    """Bytes where the model is; see `resident`."""
    if given["device"] == "cpu":
        return resident(field)
    return torch.cuda.memory_allocated() if field == "VmRSS" else torch.cuda.max_memory_allocated()


def load(given):
    from transformers import AutoConfig, AutoModelForCausalLM

    if not given["is_random"]:
        return AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
    torch.manual_seed(0)
    with torch.device(given["device"]):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(given["model"]), dtype=torch.float32)


def padded(rows, device):
    """(B, L) arguments of a transformers model."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for index, row in enumerate(rows):
        stop, start = len(row["input_ids"]), row["completion_mask"].index(1)
        ids[index, :stop], mask[index, :stop] = torch.tensor(row["input_ids"]), 1
        labels[index, start:stop] = ids[index, start:stop]
    return {name: part.to(device) for name, part in (("input_ids", ids), ("attention_mask", mask), ("labels", labels))}


def plain(given):
    import transformers.modeling_utils  # noqa: F401 - before memory is looked at

    base, device = memory("VmRSS", given), given["device"]
    model = load(given)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=given["lr"], fused=True)

    def step(rows):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(**padded(rows, device), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return base, timed(step, given)


def ours(given, *, is_at_once=True):
    from rl_engine import EngineConfig, OptimizerConfig, create_engine
    from rl_engine.losses import sft_loss
    from rl_engine.testing import ragged_batch

    import_module("rl_engine.backends.fsdp")  # as the others import theirs before memory is looked at
    base = memory("VmRSS", given)
    config = EngineConfig(
        model_path=given["model"],
        init="random" if given["is_random"] else "pretrained",
        precision="float32" if given["device"] == "cpu" else "bfloat16",
        optimizer=OptimizerConfig(lr=given["lr"]),
        max_tokens_per_gpu=given["batch_size"] * given["longest"],
        prefix_sharing=given.get("prefix_sharing"),
    )
    engine = create_engine("fsdp", config)
    engine.initialize()
    loss = sft_loss if is_at_once else lambda output, rows: sft_loss(output, rows)

    def step(rows):
        starts = [row["completion_mask"].index(1) for row in rows]
        prompts = [row["input_ids"][:start] for row, start in zip(rows, starts, strict=True)]
        completions = [row["input_ids"][start:] for row, start in zip(rows, starts, strict=True)]
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(ragged_batch(prompts, completions), loss)
        engine.optimizer_step()

    return base, timed(step, given)


def timed(step, given):
    seconds = []
    for rows in given["batches"]:
        start = time.perf_counter()
        step(rows)
        if given["device"] == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def trl(given):
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    seconds = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.start = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            if given["device"] == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.start)

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, *args, **kwargs):
            return SequentialSampler(self.train_dataset)

    base, is_cpu = memory("VmRSS", given), given["device"] == "cpu"
    config = SFTConfig(
        output_dir=str(Path(sys.argv[1]).with_name("trl")), max_steps=len(given["batches"]),
        per_device_train_batch_size=given["batch_size"], max_length=given["longest"], learning_rate=given["lr"],
        weight_decay=0.01, max_grad_norm=1.0, optim="adamw_torch_fused", use_cpu=is_cpu, bf16=not is_cpu,
        gradient_checkpointing=False, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    InOrder(
        model=load(given),
        processing_class=AutoTokenizer.from_pretrained(given["model"]), args=config, callbacks=[Clock()],
        train_dataset=Dataset.from_list([row for rows in given["batches"] for row in rows]),
    ).train()  # fmt: skip
    return base, seconds


def main():
    settings, system = Path(sys.argv[1]), sys.argv[2]
    given = json.loads(settings.read_text())
    torch.set_num_threads(given["threads"])
    base, seconds = {"rl-engine": ours, "separate": partial(ours, is_at_once=False), "plain": plain, "trl": trl}[
        system
    ](given)
    found = {"seconds": seconds, "base_bytes": base, "peak_bytes": memory("VmHWM", given)}
    settings.with_name(f"{system}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
