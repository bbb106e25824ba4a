"""One optimizer step: ours against a plain Hugging Face loop, on short rows (padded there, packed here)."""

import tempfile

import torch
from transformers import AutoModelForCausalLM

from rl_bench import Run
from rl_engine import EngineConfig, OptimizerConfig, create_engine
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged_batch, write_tiny_model

SIZES = {"hidden_size": 160, "intermediate_size": 480, "num_hidden_layers": 4, "num_attention_heads": 5, "head_dim": 32}


def draw_rows(num_rows, low, high):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(low, high, (2, num_rows), generator=generator).tolist()
    draw = lambda size: torch.randint(4, 70, (size,), generator=generator).tolist()  # noqa: E731
    return [draw(size) for size in lengths[0]], [draw(size) for size in lengths[1]]


def padded(prompts, completions):
    width = max(len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, stop = len(prompt), len(prompt) + len(completion)
        ids[row, :stop] = torch.tensor(prompt + completion)
        labels[row, start:stop], mask[row, :stop] = ids[row, start:stop], 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def plain_step(folder, prompts, completions, micro_rows):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    tokens = sum(map(len, completions))
    pieces = [
        padded(prompts[start : start + micro_rows], completions[start : start + micro_rows])
        for start in range(0, len(prompts), micro_rows)
    ]

    def step():
        optimizer.zero_grad()
        for piece in pieces:
            model(**piece, num_items_in_batch=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def our_step(folder, batch, **changes):
    engine = create_engine("fsdp", EngineConfig(model_path=str(folder), optimizer=OptimizerConfig(), **changes))
    engine.initialize()

    def step():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, sft_loss)
        engine.optimizer_step()

    return step, lambda: engine.forward_backward_batch(batch, None)


def main(run: Run) -> None:
    num_rows, low, high = (128, 3, 12) if run.quick else (512, 3, 14)
    prompts, completions = draw_rows(num_rows, low, high)
    batch = ragged_batch(prompts, completions)
    tokens = sum(map(len, prompts)) + sum(map(len, completions))
    budget = 8192
    run.parameters(**SIZES, num_rows=num_rows, tokens=tokens, max_tokens_per_gpu=budget)
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(folder, num_key_value_heads=5, **SIZES)
        exact, scores = our_step(folder, batch, max_tokens_per_gpu=budget)
        medium, medium_scores = our_step(folder, batch, max_tokens_per_gpu=budget, matmul_precision="medium")
        plain = plain_step(folder, prompts, completions, micro_rows=budget // (2 * high - 2))
        amount = {"unit": "tokens/s", "amount": tokens}
        run.compare(
            "step", {"rl-engine": exact}, peers={"plain Hugging Face": plain}, goal=">= 1.0 of best peer", **amount
        )
        run.compare(
            "step, bfloat16 products", {"rl-engine": medium}, peers={"plain Hugging Face, float32": plain}, **amount
        )
        run.compare("old log-probs", {"float32": scores, "bfloat16 products": medium_scores}, **amount)
