"""One of two ranks of the megatron backend with Megatron-Bridge: `bridge_ranks.py FOLDER`, by torchrun.

Writes to FOLDER/seen.pt what Bridge has for the families that the backend maps itself, and the steps of two families
that Bridge maps, next to those of fsdp. Where Transformer Engine is missing, an empty module stands in for it: Bridge
imports it, and none of what is used here calls it.
"""

import importlib.abc
import importlib.machinery
import logging
import sys
import types
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from rl_engine import EngineConfig, Head, ModelFolderError, create_engine
from rl_engine.backends.megatron import bridge
from rl_engine.backends.megatron.architectures import read_architecture
from rl_engine.backends.megatron.weights import Form, grouped, join, plan_weights

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "megatron_on_cpu")]
cuda_stand_in = import_module("megatron_on_cpu").cuda_stand_in
ranks = import_module("megatron_ranks")


LAYOUTS = ("pp2", "ep2", "sp2")
SPARSE = {"num_hidden_layers": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
MORE = {
    "hy_v3": SPARSE | {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_shared_experts": 2,
                       "router_scaling_factor": 1.5},
    "glm4_moe_lite": SPARSE | ranks.LATENT | {"n_routed_experts": 4, "n_shared_experts": 2, "q_lora_rank": 24,
                                              "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5},
}  # fmt: skip
REFUSED = ("gemma", "ernie4_5_moe")


class Empty(type):
    """A class whose attributes are such classes."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty(name, (), {})


class TransformerEngine(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `transformer_engine` and its parts: modules whose attributes are empty classes."""

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "transformer_engine":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = type("Module", (types.ModuleType,), {"__getattr__": lambda self, name: Empty.__getattr__(Empty, name)})
        made = module(spec.name)
        made.__version__ = "2.9.0"
        return made

    def exec_module(self, module):
        module.__path__ = []


def config_of(kind, **changes):
    config = AutoConfig.for_model(kind, **(ranks.SIZES | changes))
    config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    return config


def ours_and_theirs(kind, changes):
    """By parameter that Bridge lays out as we do: names of tensors of both. And parameters that it lacks."""
    config = config_of(kind, **changes)
    _, registry = bridge.read_bridge(config)
    names, other = {}, []
    for entry in plan_weights(read_architecture(config, Head.LM), pp=1, vpp=1, ep=1):
        try:
            names[entry.parameter] = (list(entry.tensors), list(bridge.renamed(registry, entry).tensors))
        except ModelFolderError:
            other.append(entry.parameter)
    return names, other


def joined(folder, kind):
    """By parameter that is made of several tensors: the largest difference between Bridge's layout and ours."""
    engine = ranks.build(folder, kind, "alone", optimizer=None)
    stage, found = engine.parts.built.scorer, {}
    _, registry = bridge.read_bridge(engine.parts.built.scorer.config)
    modules = dict(stage.model.named_modules())
    for entry in stage.weights.entries:
        if entry.form not in (Form.QKV, Form.STACKED):
            continue
        parts = [torch.randn(shape, dtype=torch.float64) for shape in entry.tensors.values()]
        mapping = registry.megatron_to_hf_lookup(grouped(entry.parameter.partition(".")[2]))
        theirs = mapping.hf_to_megatron(
            dict(zip(mapping.hf_param, parts, strict=True)), modules[entry.parameter.rpartition(".")[0]]
        )
        found[entry.parameter] = float((theirs - join(parts, entry.form, stage.arch)).abs().max())
    engine.close()
    return found


def steps(folder, kind, layout, rank, backend="megatron"):
    engine = ranks.build(folder, kind, layout, backend=backend)
    mine = ranks.ranks.batch_of(ranks.ranks.draw_rows(ranks.SEED)[rank::2])
    found = [ranks.one_step(engine, mine) for _ in range(2)], ranks.ranks.weights(engine)
    engine.close()
    return found


def refusal(folder, kind):
    config = config_of(kind)
    config.save_pretrained(folder / kind)
    try:
        create_engine("megatron", EngineConfig(model_path=str(folder / kind), init="random")).check(2)
    except ModelFolderError as error:
        return str(error)
    return None


def main(folder):
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    if find_spec("transformer_engine") is None:
        sys.meta_path.append(TransformerEngine())
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        for kind, changes in MORE.items():
            torch.manual_seed(3)
            model = AutoModelForCausalLM.from_config(config_of(kind, **changes), dtype=torch.float32)
            model.save_pretrained(folder / kind)
        for kind in ("tied", "moe"):
            ranks.write_model(folder, kind)
    dist.barrier()
    write = partial(steps, folder, rank=rank)
    seen = {"names": {kind: ours_and_theirs(*model) for kind, model in ranks.MODELS.items()}}
    seen["names"]["llama"] = ours_and_theirs("llama", {})
    seen["refused"] = {kind: refusal(folder, kind) for kind in REFUSED} if rank == 0 else {}
    with cuda_stand_in():
        for kind in MORE:
            seen[kind] = {"fsdp": write(kind, "dp2", backend="fsdp")}
            seen[kind] |= {layout: write(kind, layout) for layout in LAYOUTS}
        seen["joined"] = joined(folder, "tied") | joined(folder, "moe")
    if rank == 0:
        torch.save(seen, folder / "seen.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
