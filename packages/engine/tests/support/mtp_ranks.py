"""One rank of the tests of layers for multi-token prediction: `mtp_ranks.py FOLDER CASE...`.

A CASE is `KIND:LAYOUT:BACKEND`; FOLDER has what `write_model` wrote of each kind.
"""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl_engine import EngineConfig, Mtp, OptimizerConfig, create_engine

_spec = spec_from_file_location("megatron_ranks", Path(__file__).with_name("megatron_ranks.py"))
megatron = module_from_spec(_spec)
_spec.loader.exec_module(megatron)

# The norm is far above the clipping. Steps are nearly proportional to gradients, so that equal weights mean equal ones.
OPTIMIZER = OptimizerConfig(lr=1.0, eps=1.0, weight_decay=0.01, max_grad_norm=0.5, total_steps=10)
NEXT = {
    "layer_types": ["full_attention", "full_attention", "linear_attention", "full_attention", "full_attention"],
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1,
}  # fmt: skip
KINDS = {**{kind: megatron.MODELS[kind] for kind in ("v3", "glm")}, "next": ("qwen3_next", NEXT)}
KINDS["3.5"] = "qwen3_5_text", {name: value for name, value in NEXT.items() if "expert" not in name}
COUNT = 4
OWN = {
    "v3": ("eh_proj", "enorm", "hnorm", "shared_head.norm"),
    "next": ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
}
"""What a layer has besides those of a decoder layer."""


def prefix_of(kind):
    return "mtp" if kind in ("next", "3.5") else f"model.layers.{COUNT}"


def in_folder(kind, name):
    """Name in the folder of a tensor of the last layer of the model with one layer more."""
    return name.replace(f"model.layers.{COUNT}.", "mtp.layers.0.") if prefix_of(kind) == "mtp" else name


def write_model(folder, kind):
    """A model and its layer behind the last in `folder / kind`; all of it as a model with one layer more in `big`."""
    torch.manual_seed(7)
    name, changes = KINDS[kind]
    sizes = megatron.SIZES | changes | {"num_hidden_layers": COUNT + 1}
    big = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes), dtype=torch.float32)
    for named, part in [*big.named_parameters(), *big.named_buffers()]:
        if "bias" in named or "norm" in named:
            part.data.add_(torch.randn_like(part), alpha=0.1)
    big.save_pretrained(folder / f"{kind} big")
    big.save_pretrained(folder / kind)
    config = json.loads((folder / kind / "config.json").read_text())
    config |= {"layer_types": config["layer_types"][:COUNT]} if prefix_of(kind) == "mtp" else {}
    (folder / kind / "config.json").write_text(json.dumps(config | {"num_hidden_layers": COUNT}))
    hidden, behind = sizes["hidden_size"], prefix_of(kind)
    wide, *norms = OWN["next" if behind == "mtp" else "v3"]
    extra = {f"{behind}.{wide}.weight": torch.randn(hidden, 2 * hidden) / 8}
    extra |= {f"{behind}.{norm}.weight": torch.rand(hidden) + 0.5 for norm in norms}
    file = folder / kind / "model.safetensors"
    tensors = {in_folder(kind, name): tensor for name, tensor in load_file(file).items()}
    if behind != "mtp":
        copies = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
        extra |= {f"{behind}.{own}.weight": tensors[source].clone() for own, source in copies.items()}
    save_file(tensors | extra, file, metadata={"format": "pt"})


def step(engine, rows):
    """Metrics and norm of one step."""
    engine.optimizer_zero_grad()
    metrics = engine.forward_backward_batch(megatron.ranks.batch_of(rows), megatron.sft_loss).metrics
    norm = engine.optimizer_step()
    engine.lr_scheduler_step()
    return metrics, norm


def layer_of(engine):
    """Weights of the layer, whole, as `save_model` writes them."""
    return {name: tensor.clone() for name, tensor in engine.parts.export.mtp_tensors()}


def run(folder, case, before):
    (kind, layout, backend), seen, name = case.split(":"), {}, case.replace(":", "-")
    for treatment in map(str, (Mtp.FREEZE, Mtp.TRAIN)):
        engine = megatron.build(folder, kind, layout, mtp=treatment, optimizer=OPTIMIZER, backend=backend)
        mine = megatron.ranks.draw_rows(megatron.SEED)[engine.parts.built.world.rank :: engine.parts.built.world.size]
        seen[treatment] = {"steps": [step(engine, mine)], "weights": [megatron.ranks.weights(engine)]}
        if treatment == Mtp.TRAIN:
            seen["layer"] = [layer_of(engine)]
            engine.save_checkpoint(folder / name, 1)
        seen[treatment]["steps"].append(step(engine, mine))
        seen[treatment]["weights"].append(megatron.ranks.weights(engine))
        with engine.eval_mode():
            scored = engine.forward_backward_batch(megatron.ranks.batch_of(mine), megatron.sft_loss, forward_only=True)
        seen[treatment]["scored"] = scored.metrics
        seen[treatment]["shards"] = sorted({spec.name for spec, _ in engine.get_local_shards()})
        if treatment == Mtp.TRAIN:
            seen["layer"].append(layer_of(engine))
            engine.save_model(folder / f"{name}-saved")
            if backend == "megatron":
                engine.save_dist_checkpoint(folder / f"{name}-megatron")
            if before:
                engine.load_checkpoint(folder / before)
                seen["resumed"] = step(engine, mine), megatron.ranks.weights(engine) | layer_of(engine)
        engine.close()
    sources = [("again", f"{name}-saved", {})]
    if backend == "megatron":
        sources.append(("from megatron", kind, {"dist_checkpoint": str(folder / f"{name}-megatron")}))
    for what, source, options in sources:
        options = {"mtp": Mtp.TRAIN, "optimizer": OPTIMIZER, "backend": backend, "exports_mtp": True} | options
        again = megatron.build(folder, source, layout, **options)
        seen[what] = megatron.ranks.weights(again)
        again.close()
    return seen


def main(folder, cases):
    torch.set_num_threads(1)
    holder = create_engine("fsdp", EngineConfig(model_path=str(folder / "v3"), optimizer=None, mtp=Mtp.FREEZE))
    holder.initialize()  # makes the process group; the others join it
    seen, before = {}, {}
    for case in cases:
        kind, _, backend = case.split(":")
        seen[case] = run(folder, case, before.get((kind, backend)))
        before[kind, backend] = case.replace(":", "-")
    rank = holder.parts.built.world.rank
    holder.close()
    if rank == 0:
        torch.save(seen, folder / "seen.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
