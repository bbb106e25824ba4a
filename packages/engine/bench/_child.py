"""Optimizer steps in a process of their own: `_child.py SETTINGS.json SYSTEM`.

Of supervised fine-tuning: `rl-engine`, `separate` (the same, log-probs first and then the loss), `plain` (a Hugging
Face model and torch's AdamW) and `trl-sft` (TRL's SFTTrainer, by TRL's own interpreter). Of a GRPO update: `fsdp`,
`compiled` (the same under torch.compile), `megatron`, `local` (megatron-core's own layers, also where Transformer
Engine is installed) and `trl` (the loss and backward pass of TRL's GRPOTrainer, with torch's fused AdamW).

Writes the seconds of every step, those of the start by its parts, and the bytes of memory before the model is built and
at most, to `SYSTEM.json` beside the settings: resident ones, or on a GPU those of its allocator. On a GPU all of them
keep float32 parameters and optimizer state and compute in bfloat16.
"""

import json
import sys
import time
from importlib import import_module
from pathlib import Path

STARTED = time.perf_counter()

import torch  # noqa: E402 - a part of the start

FOUND = {"start": {}}
"""What is written: `start` has seconds from the start of this file to the end of each part of the start."""


def mark(part):
    FOUND["start"][part] = time.perf_counter() - STARTED


def memory(given, *, at_most):
    """Bytes where the model is."""
    if given["device"] == "cuda":
        return torch.cuda.max_memory_allocated() if at_most else torch.cuda.memory_allocated()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:" if at_most else "VmRSS:")[1].split()[0]) * 1024


def imported(given):
    mark("imports")
    FOUND["base_bytes"] = memory(given, at_most=False)


def timed(step, given, works):
    mark("engine")
    seconds = FOUND["seconds"] = []
    for work in works:
        start = time.perf_counter()
        step(work)
        if given["device"] == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    mark("first update")
    FOUND["start"]["first update"] -= sum(seconds[1:])


def load(given):
    from transformers import AutoConfig, AutoModelForCausalLM

    if not given.get("is_random"):
        return AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
    torch.manual_seed(0)
    with torch.device(given["device"]):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(given["model"]), dtype=torch.float32)


def engine_of(given, backend, **options):
    from rl_engine import EngineConfig, OptimizerConfig, create_engine

    config = EngineConfig(model_path=given["model"], optimizer=OptimizerConfig(lr=given["lr"]), **options)
    engine = create_engine(backend, config)
    engine.initialize()
    return engine


def stepped(engine, batch, loss):
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(batch, loss)
    engine.optimizer_step()


# Supervised fine-tuning


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

    imported(given)
    device, model = given["device"], load(given)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=given["lr"], fused=True)

    def step(rows):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(**padded(rows, device), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    timed(step, given, given["batches"])


def fine_tuned(given, *, is_at_once=True):
    from rl_engine.losses import sft_loss
    from rl_engine.testing import ragged_batch

    import_module("rl_engine.backends.fsdp")  # as the others import theirs before memory is looked at
    imported(given)
    engine = engine_of(
        given,
        "fsdp",
        init="random" if given["is_random"] else "pretrained",
        precision="float32" if given["device"] == "cpu" else "bfloat16",
        max_tokens_per_gpu=given["batch_size"] * given["longest"],
        prefix_sharing=given.get("prefix_sharing"),
    )
    loss = sft_loss if is_at_once else lambda output, rows: sft_loss(output, rows)

    def step(rows):
        cuts = [(row["input_ids"], row["completion_mask"].index(1)) for row in rows]
        batch = ragged_batch([ids[:start] for ids, start in cuts], [ids[start:] for ids, start in cuts])
        stepped(engine, batch, loss)

    timed(step, given, given["batches"])


def trl_sft(given):
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    seconds = FOUND["seconds"] = []

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

    imported(given)
    is_cpu = given["device"] == "cpu"
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


# A GRPO update


def updated(given, backend, **options):
    from rl_csrc import policy_loss
    from rl_engine.losses import token_local
    from rl_engine.testing import ragged_batch

    imported(given)

    @token_local
    def loss(output, rows):
        mask = rows["loss_mask"].values().bool()
        counted = {"num_tokens": output.counts.tokens}
        advantages, found = rows["advantages"].values(), output.logprobs
        return policy_loss(found, found.detach(), advantages, mask, output.cu_seqlens, **counted).loss, {}

    engine = engine_of(given, backend, precision="bfloat16", max_tokens_per_gpu=given["tokens"], **options)
    completions = given["completions"]
    batch = ragged_batch(given["prompts"], completions)
    each = [torch.full((len(row),), one) for row, one in zip(completions, given["advantages"], strict=True)]
    batch["advantages"] = torch.nested.nested_tensor(each, layout=torch.jagged)
    timed(lambda _: stepped(engine, batch, loss), given, range(given["updates"]))


def trl(given):
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    imported(given)
    rows, is_gpu = given["rows"], given["device"] == "cuda"
    config = GRPOConfig(
        output_dir=str(Path(sys.argv[1]).with_name("trl")), per_device_train_batch_size=rows, beta=0.0,
        num_generations=given["group"], loss_type="grpo", use_cpu=not is_gpu, bf16=is_gpu, max_grad_norm=1.0,
        gradient_checkpointing=False, report_to="none",
        generation_batch_size=len(given["prompts"]),
    )  # fmt: skip
    model = load(given)
    trainer = GRPOTrainer(
        model=model, args=config, processing_class=AutoTokenizer.from_pretrained(given["model"]),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * rows),
    )  # fmt: skip
    model.train()
    wrapped = trainer.accelerator.prepare(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=given["lr"], fused=is_gpu)
    trainer.current_gradient_accumulation_steps = len(given["prompts"]) // rows
    device = torch.device(given["device"])
    batch = {}
    for name in ("prompt", "completion"):
        batch[f"{name}_ids"] = torch.tensor(given[f"{name}s"], device=device)
        batch[f"{name}_mask"] = torch.ones_like(batch[f"{name}_ids"])
    batch["advantages"] = torch.tensor(given["advantages"], device=device)

    def update(_):
        optimizer.zero_grad()
        for start in range(0, len(given["prompts"]), rows):
            part = {name: column[start : start + rows] for name, column in batch.items()}
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(wrapped, part)
            trainer.accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()

    timed(update, given, range(given["updates"]))


SYSTEMS = {
    "rl-engine": fine_tuned,
    "separate": lambda given: fine_tuned(given, is_at_once=False),
    "plain": plain,
    "trl-sft": trl_sft,
    "fsdp": lambda given: updated(given, "fsdp"),
    "compiled": lambda given: updated(given, "fsdp", torch_compile=True),
    "megatron": lambda given: updated(given, "megatron"),
    "local": lambda given: updated(given, "megatron", transformer_engine=False),
    "trl": trl,
}


def main():
    settings, system = Path(sys.argv[1]), sys.argv[2]
    given = json.loads(settings.read_text())
    if "threads" in given:
        torch.set_num_threads(given["threads"])
    SYSTEMS[system](given)
    FOUND["peak_bytes"] = memory(given, at_most=True)
    settings.with_name(f"{system}.json").write_text(json.dumps(FOUND))


if __name__ == "__main__":
    main()
