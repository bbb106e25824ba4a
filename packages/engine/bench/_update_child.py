"""Policy updates of a fixed batch in a process of their own: `_update_child.py SETTINGS.json SYSTEM`.

SYSTEM is `fsdp`, `compiled` (the same under torch.compile), `megatron`, `local` (megatron-core's own layers, also where
Transformer Engine is installed) or `trl` (the loss and backward pass of TRL's GRPOTrainer, with torch's fused AdamW).
Writes the seconds of every update, those of the start by its parts, and the most bytes of torch's allocator to
`SYSTEM.json` beside the settings.

All keep float32 weights and moments and compute in bfloat16.
"""

import json
import sys
import time
from pathlib import Path

STARTED = time.perf_counter()

import torch  # noqa: E402 - a part of the start

MARKS = {}
"""Seconds from the start of this file to the end of each part of the start."""


def mark(part):
    MARKS[part] = time.perf_counter() - STARTED


def timed(update, given):
    mark("engine")
    seconds = []
    for _ in range(given["updates"]):
        start = time.perf_counter()
        update()
        if given["device"] == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    mark("first update")
    MARKS["first update"] -= sum(seconds[1:])
    return seconds


def ours(given, backend, **options):
    from rl_csrc import policy_loss
    from rl_engine import EngineConfig, OptimizerConfig, create_engine
    from rl_engine.losses import token_local
    from rl_engine.testing import ragged_batch

    mark("imports")

    @token_local
    def loss_function(output, rows):
        mask = rows["loss_mask"].values().bool()
        counted = {"num_tokens": output.counts.tokens}
        advantages, found = rows["advantages"].values(), output.logprobs
        return policy_loss(found, found.detach(), advantages, mask, output.cu_seqlens, **counted).loss, {}

    config = EngineConfig(
        model_path=given["model"],
        precision="bfloat16",
        optimizer=OptimizerConfig(lr=given["lr"]),
        max_tokens_per_gpu=given["tokens"],
        **options,
    )
    engine = create_engine(backend, config)
    engine.initialize()
    completions = given["completions"]
    batch = ragged_batch(given["prompts"], completions)
    each = [torch.full((len(row),), one) for row, one in zip(completions, given["advantages"], strict=True)]
    batch["advantages"] = torch.nested.nested_tensor(each, layout=torch.jagged)

    def update():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, loss_function)
        engine.optimizer_step()

    return timed(update, given)


def trl(given):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    mark("imports")
    rows, is_gpu = given["rows"], given["device"] == "cuda"
    config = GRPOConfig(
        output_dir=str(Path(sys.argv[1]).with_name("trl")), per_device_train_batch_size=rows, beta=0.0,
        num_generations=given["group"], loss_type="grpo", use_cpu=not is_gpu, bf16=is_gpu, max_grad_norm=1.0,
        gradient_checkpointing=False, report_to="none",
        generation_batch_size=len(given["prompts"]),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
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

    def update():
        optimizer.zero_grad()
        for start in range(0, len(given["prompts"]), rows):
            part = {name: column[start : start + rows] for name, column in batch.items()}
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(wrapped, part)
            trainer.accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()

    return timed(update, given)


SYSTEMS = {
    "fsdp": lambda given: ours(given, "fsdp"),
    "compiled": lambda given: ours(given, "fsdp", torch_compile=True),
    "megatron": lambda given: ours(given, "megatron"),
    "local": lambda given: ours(given, "megatron", transformer_engine=False),
    "trl": trl,
}


def main():
    settings, system = Path(sys.argv[1]), sys.argv[2]
    given = json.loads(settings.read_text())
    seconds = SYSTEMS[system](given)
    peak = torch.cuda.max_memory_allocated() if given["device"] == "cuda" else 0
    found = {"seconds": seconds, "start": MARKS, "peak_bytes": peak}
    settings.with_name(f"{system}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
