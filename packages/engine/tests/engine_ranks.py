"""One rank of the multi-process tests: `engine_ranks.py FOLDER`, with torchrun's environment."""

import random
import sys
from pathlib import Path

import torch
from tensordict import TensorDict
from torch.distributed.tensor import DTensor

from rl_engine import BatchError, EngineConfig, LoraConfig, OptimizerConfig, Precision, create_engine
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged_batch

SEEDS = 3


def draw_rows(seed):
    """Rows of one logical batch: (prompt, completion, mask)."""
    draw = random.Random(seed)

    def tokens(size):
        return [draw.randrange(78) for _ in range(size)]

    rows = []
    for _ in range(draw.randint(2, 9)):
        completion = tokens(draw.randint(1, 15))
        rows.append((tokens(draw.randint(1, 20)), completion, [draw.randint(0, 1) for _ in completion]))
    rows[0][2][0] = 1
    return rows


def batch_of(rows):
    empty = ragged_batch([[1]], [[1]])
    return ragged_batch(*map(list, zip(*rows, strict=True))) if rows else _no_rows(empty)


def _no_rows(like):
    def none():
        return torch.nested.nested_tensor_from_jagged(
            torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        )

    return TensorDict({name: none() for name in list(like.keys())}, batch_size=[0])


def build(folder, **changes):
    options = {"precision": Precision.FLOAT64, "optimizer": OptimizerConfig(lr=1e-2, eps=1e-3, total_steps=10)}
    engine = create_engine("fsdp", EngineConfig(model_path=str(folder), timeout_s=60.0, **(options | changes)))
    engine.initialize()
    return engine


def gradients(engine):
    named = engine._scorer.model.named_parameters()

    def full(grad):
        return grad.full_tensor() if isinstance(grad, DTensor) else grad

    return {name: full(parameter.grad).clone() for name, parameter in named if parameter.grad is not None}


def one_step(engine, data):
    engine.optimizer_zero_grad()
    loss = engine.forward_backward_batch(data, sft_loss).metrics["loss"]
    norm = engine.optimizer_step()
    engine.lr_scheduler_step()
    return loss, norm


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}


def main(folder):
    torch.set_num_threads(1)
    seen = {"gradients": [], "losses": []}
    model = folder / "model"
    first = build(model, max_tokens_per_gpu=4096)  # makes the process group; the others join it
    rank, size = first._world.rank, first._world.size
    for seed in range(SEEDS):
        draw = random.Random(100 + seed)
        engine = build(model, max_tokens_per_gpu=draw.choice([36, 50, 90, 4096]))
        owner = [draw.randrange(size) if seed else 0 for _ in draw_rows(seed)]  # seed 0: rank 0 has every row
        mine = [row for row, at in zip(draw_rows(seed), owner, strict=True) if at == rank]
        output = engine.forward_backward_batch(batch_of(mine), sft_loss)
        assert output.columns.batch_size[0] == len(mine)
        seen["gradients"].append(gradients(engine))
        seen["losses"].append(output.metrics["loss"])
        engine.close()

    rows = draw_rows(7)
    mine = batch_of(rows[rank::size])
    seen["first"] = one_step(first, mine)
    first.save_checkpoint(folder / "written_by_many", 3)
    first.save_model(folder / "model_by_many")
    seen["straight"] = (*one_step(first, mine), weights(first))
    resumed = build(model)
    assert resumed.load_checkpoint(folder / "written_by_one") == 5
    seen["from_one"] = (*one_step(resumed, mine), weights(resumed))
    assert resumed.load_checkpoint(folder / "written_by_many") == 3
    seen["again"] = (*one_step(resumed, mine), weights(resumed))
    resumed.close()

    try:
        first.forward_backward_batch(ragged_batch([[1]], [[999 if rank == 1 else 2]]), sft_loss)
    except BatchError as error:
        seen["refusal"] = str(error)

    narrow = build(model, precision=Precision.BFLOAT16)
    seen["bfloat16"] = one_step(narrow, mine)
    seen["bfloat16_dtypes"] = {str(tensor.dtype) for tensor in weights(narrow).values()}
    narrow.close()
    adapted = build(model, lora=LoraConfig(rank=2))
    with adapted.eval_mode(), adapted.adapter_off():
        seen["without_adapter"] = adapted.forward_backward_batch(mine, sft_loss, forward_only=True).metrics["loss"]
    seen["adapted"] = [one_step(adapted, mine) for _ in range(3)]
    seen["merged"] = weights(adapted)
    adapted.close()
    frozen = build(model, optimizer=None, entropy=True)
    with frozen.eval_mode():
        seen["frozen_keys"] = sorted(frozen.forward_backward_batch(mine, None).columns.keys())
    first.close()
    if rank == 0:
        torch.save(seen, folder / "seen.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
