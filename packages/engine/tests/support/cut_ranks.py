"""One rank of the property that no cut changes a gradient: `cut_ranks.py FOLDER FIRST_SEED NUM_SEEDS`.

A GPT-2 is the model: its norms are computed in float64 where others compute theirs in float32.
"""

import random
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rl_engine import EngineConfig, Head, OptimizerConfig, ParallelConfig, create_engine
from rl_engine.batch import prefix_tree
from rl_engine.batch.row_batch import RowBatch
from rl_engine.losses import row_mean, row_sum, token_mean, token_values
from rl_engine.testing import ragged_batch
from rl_engine.types import BatchCounts, ModelOutput

_spec = spec_from_file_location("test_engine_any_cut", Path(__file__).parents[1] / "batch" / "test_engine_any_cut.py")
cuts = module_from_spec(_spec)
_spec.loader.exec_module(cuts)

VOCAB = 40
SIZES = {
    "vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.3, "num_labels": 1,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
OF_VALUES = ("reward", "process reward")
OF_CANDIDATES = ("distill forward", "distill mixed")
LAYOUTS = {
    2: {"dp2": ParallelConfig(), "sp2": ParallelConfig(sp=2)},
    4: {"dp4": ParallelConfig(dp_replicate=2), "sp2": ParallelConfig(sp=2), "sp4": ParallelConfig(sp=4)},
}


def sequence_mean(output, rows):
    """The mean over rows of each row's mean over tokens."""
    mask = token_values(rows, "loss_mask", output.logprobs)
    return row_mean(row_sum(output.logprobs * mask, output) / row_sum(mask, output), output), {}


def entropy_bonus(output, rows):
    mask = token_values(rows, "loss_mask", output.logprobs)
    return -token_mean(output.entropy, mask, output), {}


class DesirableRows:
    """Likelihood of desirable rows; the others have metrics alone."""

    is_token_local = True

    def has_gradient(self, rows):
        return rows["is_desirable"]

    def __call__(self, output, rows):
        mask = token_values(rows, "loss_mask", output.logprobs)
        weight = rows["is_desirable"].to(mask.dtype).repeat_interleave(output.cu_seqlens.diff())
        shares = {"all": token_mean(output.logprobs.detach(), mask, output)}
        return -token_mean(weight * output.logprobs, mask, output), shares


LOSSES = cuts.LOSSES | {
    "sequence mean": sequence_mean, "entropy bonus": entropy_bonus, "desirable rows": DesirableRows(),
}  # fmt: skip


def write_models(folder):
    torch.manual_seed(1)
    config = AutoConfig.for_model("gpt2", **SIZES)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "policy")
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder / "judge")


def draw_batch(seed):
    """Prompts, completions, and the columns that the losses read, by row; rows 2i and 2i + 1 are a pair."""
    draw = random.Random(seed)

    def tokens(low, high):
        return [draw.randrange(VOCAB) for _ in range(draw.randint(low, high))]

    num_rows = 2 * draw.randint(1, 5)
    pool = [tokens(1, 9) for _ in range(draw.randint(1, 4))]
    pool.append(pool[0][: draw.randint(1, len(pool[0]))])  # one prompt begins as another does, or is the same
    stems = [[], tokens(1, 2)]
    stems.append(stems[1] + tokens(1, 2))  # completions branch behind each of these, once or twice
    prompts = [draw.choice(pool) for _ in range(num_rows)]
    completions = [draw.choice(stems) + tokens(1, 3) for _ in range(num_rows)]
    _, columns = cuts.columns_of([len(row) for row in completions], seed)
    columns["candidate_token_ids"] = [torch.tensor([draw.sample(range(VOCAB), 3) for _ in row]) for row in completions]
    return prompts, completions, columns


def batch_of(drawn, rows, *, has_candidates):
    """The given rows, or none, as an engine takes them."""
    prompts, completions, columns = drawn
    batch = ragged_batch(prompts, completions)
    for name, column in columns.items():
        if name != "candidate_token_ids" or has_candidates:
            batch[name] = cuts.select(column, list(range(len(prompts))))
    return RowBatch(batch, needs_mask=True, device=torch.device("cpu")).select(rows)


def reference(folder, seed, name):
    """Loss, metrics and gradients of a plain model that sees one row at a time, the loss taken once over all rows."""
    prompts, completions, columns = draw_batch(seed)
    is_judge = name in OF_VALUES
    factory = AutoModelForSequenceClassification if is_judge else AutoModelForCausalLM
    model = factory.from_pretrained(
        folder / ("judge" if is_judge else "policy"), dtype=torch.float64, attn_implementation="eager"
    )
    scores, candidates, entropies = [], [], []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids = torch.tensor([prompt + completion])
        if is_judge:
            scores.append(model.score(model.transformer(ids).last_hidden_state)[0, len(prompt) :, 0])
            continue
        full = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        scores.append(full.gather(1, torch.tensor(completion)[:, None])[:, 0])
        candidates.append(full.gather(1, columns["candidate_token_ids"][row]))
        entropies.append(-(full.exp() * full).sum(-1))
    lengths = torch.tensor([len(row) for row in completions])
    flat = torch.cat(scores)
    output = ModelOutput(
        token_logprobs=flat,
        token_values=flat,
        token_candidate_logprobs=torch.cat(candidates) if candidates else None,
        entropy=torch.cat(entropies) if entropies else None,
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        counts=BatchCounts(tokens=float(sum(mask.sum() for mask in columns["loss_mask"])), sequences=len(lengths)),
    )
    rows = {column: cuts.select(values, list(range(len(lengths)))) for column, values in columns.items()}
    loss, metrics = LOSSES[name](output, rows)
    loss.backward()
    grads = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    return {key: float(value.detach()) for key, value in {"loss": loss, **metrics}.items()}, grads


def main(folder, first_seed, num_seeds):
    torch.set_num_threads(1)
    prefix_tree.MIN_APART = 1  # rows are short
    frozen = EngineConfig(model_path=str(folder / "policy"), optimizer=None, timeout_s=120.0)
    holder = create_engine("fsdp", frozen)  # makes the process group; the others join it
    holder.initialize()
    world, seen = holder.parts.built.world, {}
    for layout, parallel in LAYOUTS[holder.parts.built.world.size].items():
        for head in (Head.LM, Head.REWARD):
            is_judge = head == Head.REWARD
            config = replace(
                frozen,
                model_path=str(folder / ("judge" if is_judge else "policy")),
                optimizer=OptimizerConfig(),
                precision="float64",
                head=head,
                entropy=not is_judge,
                parallel=parallel,
                recompute=("attention", "mlp", "norm") if is_judge else (),
            )
            engine = create_engine("fsdp", config)
            engine.initialize()
            for seed in range(first_seed, first_seed + num_seeds):
                for name in (name for name in LOSSES if (name in OF_VALUES) == is_judge):
                    seen[f"{layout}:{name}:{seed}"] = one_cut(engine, world, config, name, seed)
            engine.close()
    holder.close()
    if world.rank == 0:
        torch.save(seen, folder / "seen.pt")


def one_cut(engine, world, config, name, seed):
    """Metrics and gradients, pairs dealt to ranks and the budget of a micro-batch drawn at random."""
    drawn = draw_batch(seed)
    draw = random.Random(f"{name} {seed} {config.parallel}")
    engine._config = replace(config, max_tokens_per_gpu=draw.choice([34, 40, 64, 4096]))
    owner = [draw.randrange(world.size) for _ in range(len(drawn[0]) // 2)]
    mine = [row for pair, at in enumerate(owner) if at == world.rank for row in (2 * pair, 2 * pair + 1)]
    engine.optimizer_zero_grad()
    batch = batch_of(drawn, mine, has_candidates=name in OF_CANDIDATES)
    if name == "desirable rows":  # pairs are never cut apart, and so have one backward pass
        batch = batch.exclude("pair_id", "is_chosen")
    metrics = engine.forward_backward_batch(batch, LOSSES[name]).metrics
    named = engine.parts.built.scorer.model.named_parameters()
    grads = {key: value.grad.full_tensor().clone() for key, value in named if value.grad is not None}
    return metrics, grads


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
