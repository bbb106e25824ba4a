"""One rank of the tests of many adapters: `adapter_ranks.py FOLDER`, with torchrun's environment."""

import os
import random
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch

from rl_engine import (
    AdamParams,
    BatchError,
    EngineConfig,
    LoraConfig,
    NonFiniteError,
    OptimizerConfig,
    TrainingRow,
    create_engine,
    create_loss,
    create_worker,
)
from rl_engine.losses import sft_loss

_spec = spec_from_file_location("moe_oracle", Path(__file__).with_name("moe_oracle.py"))
moe_oracle = module_from_spec(_spec)
_spec.loader.exec_module(moe_oracle)
LORAS = {
    "ann": LoraConfig(rank=4, alpha=8.0),
    "bob": LoraConfig(rank=2, alpha=8.0, target_modules=("q_proj", "down_proj")),
    "cy": LoraConfig(rank=8, alpha=4.0, target_modules=("gate_proj", "up_proj")),
}
LOSSES = {"ann": create_loss("cross_entropy"), "bob": create_loss("ppo"), "cy": create_loss("dro", {"beta": 0.2})}
ADAM = {
    "ann": AdamParams(lr=1e-2),
    "bob": AdamParams(lr=5e-3, beta2=0.99, weight_decay=0.1),
    "cy": AdamParams(lr=2e-2, grad_clip_norm=0.5),
}


def build(folder, **changes):
    options = {"max_resident": changes.pop("max_resident", 8), "idle_folder": changes.pop("idle_folder", None)}
    config = {"optimizer": None, "precision": "float64", "timeout_s": 120.0, "max_tokens_per_gpu": 64} | changes
    worker = create_worker(EngineConfig(model_path=str(folder / "model"), **config), **options)
    for seed, (name, lora) in enumerate(LORAS.items()):
        worker.add_adapter(name, lora, seed)
    return worker


def draw_rows(seed, name, count):
    """Rows of one adapter, with the columns of its loss."""
    draw = random.Random(f"{seed}{name}")
    rows = []
    for _ in range(count):
        ids = [draw.randrange(78) for _ in range(draw.randint(2, 20))]
        num = len(ids) - 1
        inputs = {"weights": [draw.choice([0.0, 0.5, 1.0]) for _ in range(num)]}
        if name != "ann":
            inputs = {
                "logprobs": [-4.4 + draw.uniform(-0.3, 0.3) for _ in range(num)],
                "advantages": [draw.uniform(-1, 1) for _ in range(num)],
            }
        rows.append(TrainingRow(adapter=name, token_ids=ids[:-1], target_token_ids=ids[1:], inputs=inputs))
    return rows


def mixed_rows(seed, counts=(5, 6, 4)):
    """Rows of all adapters, shuffled."""
    rows = [row for name, count in zip(LORAS, counts, strict=True) for row in draw_rows(seed, name, count)]
    random.Random(seed).shuffle(rows)
    return rows


def gradient(worker, name):
    """This rank's gradient of an adapter."""
    adapter = worker.pool[name]
    return adapter.flat["grad"].clone()


def weights(worker, name):
    return worker.pool[name].flat["weights"].clone()


def state(worker, name):
    return {key: worker.pool[name].flat[key].clone() for key in ("weights", "exp_avg", "exp_avg_sq")}


def steps(worker, mine, seeds=(1, 2)):
    """Metrics and norms of a step for each seed; `mine(rows)` are this rank's."""
    found = []
    for seed in seeds:
        metrics = worker.forward_backward_rows(mine(mixed_rows(seed)), LOSSES).metrics
        norms = {name: worker.optim_step(ADAM[name], name).grad_norm for name in LORAS}
        found.append({name: (metrics[name]["loss"], norms[name]) for name in LORAS})
    return found


def expert_steps(folder, mine):
    """Losses and norms of two steps of an adapter on joined experts, and what is exported then."""
    lora = LoraConfig(rank=2, alpha=4.0, target_modules=("q_proj", "experts"))
    optimizer = OptimizerConfig(lr=1e-2)
    config = EngineConfig(model_path=str(folder / "moe"), precision="float64", lora=lora, optimizer=optimizer)
    engine = create_engine("fsdp", config)
    engine.initialize()
    found, rows = [], mine(moe_oracle.draw_rows())
    for _ in range(2):
        engine.optimizer_zero_grad()
        loss = engine.forward_backward_batch(moe_oracle.batch_of(rows, is_routed=False), sft_loss).metrics["loss"]
        found.append((loss, engine.optimizer_step()))
    weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    engine.close()
    return found, weights


def main(folder):
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    worker = build(folder)
    seen = {"steps": steps(worker, lambda rows: rows[rank::size])}
    seen["states"] = {name: state(worker, name) for name in LORAS}
    # one row in all: the other rank has none, and stands in
    worker.forward_backward_rows(draw_rows(3, "bob", 1) if rank == 0 else [], LOSSES)
    seen["alone"] = worker.optim_step(ADAM["bob"], "bob").grad_norm
    bad = TrainingRow(adapter="dan", token_ids=[1], target_token_ids=[2], inputs={"weights": [1.0]})
    try:
        worker.forward_backward_rows([bad] if rank else draw_rows(4, "ann", 1), LOSSES)
    except BatchError as error:
        seen["refused"] = str(error)
    broken = [TrainingRow(adapter="cy", token_ids=[1, 2], target_token_ids=[2, 3], inputs={
        "logprobs": [float("nan")] * 2, "advantages": [1.0, 1.0]})]  # fmt: skip
    worker.forward_backward_rows(broken if rank else draw_rows(5, "ann", 2), LOSSES)
    try:
        worker.optim_step(ADAM["cy"], "cy")
    except NonFiniteError as error:
        seen["not finite"] = str(error)
    seen["after"] = worker.optim_step(ADAM["ann"], "ann").grad_norm
    worker.save_state(folder / "saved", "ann")
    assert worker.load_state(folder / "saved", "ann") == 3
    worker.close()
    seen["experts"] = expert_steps(folder, lambda rows: rows[rank::size])
    if rank == 0:
        torch.save(seen, folder / "seen.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
