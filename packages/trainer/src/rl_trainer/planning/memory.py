"""Memory plan: GiB that every role takes of a GPU, by the model's config.json and the run's layout; touches no GPU.

Engine with fsdp: 4 bytes per parameter for the weights, 4 for the gradients and 8 for AdamW's moments (float32; twice
that with float64), cut over the ranks of a copy (`parallel.dp_replicate`), and two gathered blocks in the number format
of the passes, of whose experts a rank gathers its own (`parallel.ep`). With megatron a rank has its part of the model
(`tp`, `pp`, `ep`) in the number format of the passes and its gradients in float32; moments, and the float32 copy of
narrow weights, are cut over data-parallel ranks. With LoRA, gradients and moments are those of the adapter alone. A
frozen engine has its weights in the number format of its passes.

Activations of the longest micro-batch are what torch keeps of a block's norms, heads and MLP, within a fifth; with
`engine.activation_checkpointing` the inputs of all blocks, and the whole of the one that is computed again, and with
`engine.recompute` what the other parts of blocks keep, and those parts of one block. What `cpu_offload`,
`optimizer_offload` and `activation_offload` keep on the host is listed apart. Logits, the allocator's slack and CUDA
itself come on top. Server: its weights, and keys and values of one sequence of the greatest length; it takes more for
keys and values where there is more, and lets requests wait where there is not.

On CPUs the same bytes are memory of the processes. Python, torch and transformers take about 0.45 GiB more of each.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_trainer.config.schema import ENGINE_POOL
from rl_trainer.errors import PlanError
from rl_trainer.pipeline.roles import (
    engine_of,
    has,
    home_of,
    is_offloaded,
    lends_engine,
    longest_sequence,
    model_facts,
    policies_of,
    pool_of,
    pool_size,
    reward_models,
    teacher_folders,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rl_trainer.config import Config
    from rl_trainer.config.schema import EngineSection

_GIB = 2.0**30
_PROBE_BYTES = 16 * 2**20
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_OTHERS = ("reference", "critic", "teacher")
"""Roles with engines, other than the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory plan: GiB of a GPU, by role and purpose."""

    num_parameters: int
    engine: Mapping[str, float]
    """GiB of an engine rank: the policy's `weights`, `gradients`, `optimizer`, `gathered blocks` and `activations`, and
    other roles of its pool."""
    server: Mapping[str, float]
    """GiB of a GPU of a replica: `weights`, `keys and values`."""
    others: Mapping[str, Mapping[str, float]]
    """GiB of a rank by role, for each other pool of `placement`."""
    host: Mapping[str, float]
    """GiB of an engine rank that the policy keeps in the memory of the host."""
    is_colocated: bool = False
    """Whether engine and server have the same GPU."""
    is_offloaded: bool = True
    """Whether they have its memory in turn then."""

    def fullest(self) -> tuple[str, float]:
        """Peak phase of a step, or the name of another pool, and the GiB that a GPU holds in it."""
        phases = {"training": sum(self.engine.values()), "generation": sum(self.server.values())}
        if self.is_colocated and not self.is_offloaded:
            phases = {"training": sum(phases.values())}
        elif self.is_colocated:  # the engine sends from the GPU what the server takes there
            phases["weight sync"] = (
                self.engine.get("weights", 0.0) + self.engine.get("adapter", 0.0) + self.server["weights"]
            )
        phases |= {f"pool {name}": sum(roles.values()) for name, roles in self.others.items()}
        return max(phases.items(), key=lambda phase: phase[1])

    def groups(self) -> Iterator[tuple[str, Mapping[str, float]]]:
        """(whose GPU, GiB by what they are for)."""
        yield "engine rank", self.engine
        yield "server GPU", self.server
        for name, roles in self.others.items():
            yield f"pool {name}", roles

    def lines(self) -> Iterator[tuple[str, str]]:
        """Lines of the plan: (role, GiB)."""
        yield "parameters", f"{self.num_parameters:,}"
        for whose, parts in self.groups():
            of = ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items())
            yield f"memory, {whose}", f"{sum(parts.values()):.1f} GiB: {of}"
        if self.host:
            of = ", ".join(f"{name} {gib:.1f}" for name, gib in self.host.items())
            yield "memory, host of an engine rank", f"{sum(self.host.values()):.1f} GiB: {of}"


def memory_plan(config: Config, model: Mapping[str, Any], *, num_parameters: int | None = None) -> MemoryPlan:
    """Memory plan of a configuration.

    `model` is the policy's `config.json`, by whose shapes parameters are counted unless their number is given.

    Raises:
        KeyError: the model's description lacks a size.
    """
    count = count_parameters(model) if num_parameters is None else num_parameters
    engine, layers = config.engine, model["num_hidden_layers"]
    precision = _BYTES.get(str(engine.precision), 2)
    parts, layout = _learner(engine, model, count), engine.parallel
    tokens = max(engine.max_tokens_per_gpu, longest_sequence(config)[0] / (layout.sp * layout.cp)) / _GIB
    there, away = _activations(engine, model, precision)
    parts["activations"] = tokens * there
    host: dict[str, float] = {"activations": tokens * away} if away else {}
    if engine.cpu_offload:
        host |= {name: parts.pop(name) for name in ("weights", "gradients", "optimizer")}
    elif engine.optimizer_offload:
        host["optimizer"] = parts["optimizer"]  # a step has it on the GPU, where the activations are gone by then
        parts["optimizer"] = max(0.0, parts["optimizer"] - parts["activations"] - parts["gathered blocks"])
    others: dict[str, dict[str, float]] = {}
    for role, gib in _roles(config, model, count):
        pool = home_of(config, role)
        (parts if pool == ENGINE_POOL else others.setdefault(pool, {}))[role] = gib
    replica = config.rollout.parallel
    served, experts = replica.tp * replica.pp, expert_parameters(model)
    each = (count - experts) / served + experts / replica.pp / (replica.ep if replica.ep > 1 else replica.tp)
    per_token = _BYTES.get(config.rollout.dtype, precision) * 2 * layers * _kv_width(model)
    server = {
        "weights": _BYTES.get(config.rollout.dtype, precision) * each / _GIB,
        "keys and values": per_token * longest_sequence(config)[0] / served / _GIB,
    }
    lends = lends_engine(config)
    return MemoryPlan(
        num_parameters=count,
        engine=parts,
        server=server,
        others=others,
        host=host,
        is_colocated=bool(config.rollout.colocated) or lends,
        is_offloaded=is_offloaded(config) or lends,
    )


def _share(engine: EngineSection, model: Mapping[str, Any], count: int) -> tuple[float, float]:
    """Elements of the weights that a rank holds, and of those the part whose optimizer state it has."""
    layout, ranks = engine.parallel, engine.world_size
    if engine.backend != "megatron":
        held = count / (ranks // layout.dp_replicate)
        return held, held
    embeddings, experts = embedding_parameters(model), expert_parameters(model)
    stage = (count - embeddings - experts) / layout.pp + embeddings / min(layout.pp, 2)  # of the first, or the last
    dense = stage / layout.tp
    return dense + experts / (layout.pp * layout.ep), dense * layout.tp * layout.pp / ranks + experts / ranks


def _learner(engine: EngineSection, model: Mapping[str, Any], count: int) -> dict[str, float]:
    """GiB of a rank that learns: weights, gradients, optimizer, gathered blocks, and an adapter."""
    precision = _BYTES.get(str(engine.precision), 2)
    wide, held, stepped = max(precision, 4), *_share(engine, model, count)
    if engine.backend == "megatron":  # its weights are in the number format of the passes, next to a wider copy
        weights, copies, gathered = precision * held, 2 + (precision < wide), 0.0
    else:
        experts = expert_parameters(model)
        block = (count - embedding_parameters(model) - experts + experts / engine.parallel.ep) / model[
            "num_hidden_layers"
        ]
        is_gathered = engine.world_size > 1 or precision < wide or engine.cpu_offload
        weights, copies, gathered = wide * held, 2, 2 * precision * block * is_gathered
    parts = {"weights": weights, "gradients": wide * held, "optimizer": copies * wide * stepped}
    parts["gathered blocks"] = gathered
    if engine.lora is not None:
        learns = adapter_parameters(model, engine.lora.rank, engine.lora.target_modules) / engine.world_size
        parts |= {"gradients": wide * learns, "optimizer": 2 * wide * learns, "adapter": wide * learns}
    return {name: each / _GIB for name, each in parts.items()}


def _roles(config: Config, model: Mapping[str, Any], count: int) -> Iterator[tuple[str, float]]:
    """(role, GiB of one rank) of the engines other than the policy's: the weights, and of a critic its optimizer."""
    for role in (each for each in _OTHERS if has(config, each)):
        own = engine_of(config, role)
        if role == "critic":
            parts = _learner(replace(own, lora=None), model, count)
            yield role, sum(each for name, each in parts.items() if name != "gathered blocks")
        elif role == "reference":
            yield role, _BYTES.get(str(own.precision), 2) * _share(own, model, count)[0] / _GIB
        elif sizes := [stored_parameters(folder) or 0 for folder in teacher_folders(config.teacher).values()]:
            yield role, _BYTES.get(str(own.precision), 2) * sum(sizes) / own.world_size / _GIB


def _activations(engine: EngineSection, model: Mapping[str, Any], itemsize: int) -> tuple[float, float]:
    """Bytes per token of a rank's activations at most, and of those that are on the host.

    Of a part that is recomputed the input stays, which is the output of a norm and counted there; of a norm both.
    """
    layers, width, block = model["num_hidden_layers"], model["hidden_size"], block_activations(model, itemsize)
    if engine.activation_checkpointing:
        inputs, one = layers * itemsize * width, sum(block.values())
        return (one, inputs) if engine.activation_offload else (inputs + one, 0)
    offload = engine.activation_offload
    away = set(block if offload is True else offload or ())
    again = {*engine.recompute} - ({"attention"} if engine.backend == "megatron" else set())  # of which little goes
    kept = block | {part: 4 * itemsize * width if part == "norm" else 0 for part in again & block.keys()}
    host = layers * sum(kept[part] for part in away & block.keys())
    one = sum(block[part] for part in (again | away) & block.keys())  # of the layer that is differentiated
    return layers * sum(kept.values()) - host + one, host


def block_activations(model: Mapping[str, Any], itemsize: int) -> dict[str, int]:
    """Bytes per token that the backward pass of one block needs; norms compute in float32, products in `itemsize`.

    By the parts of `engine.recompute`.

    Per norm its float32 input, its output before and after the scale; of queries and keys the same and both
    rotations; values, what was attended, and four widths of the MLP.
    """
    width, heads = model["hidden_size"], model["num_attention_heads"]
    query = heads * (model.get("head_dim") or width // heads)
    norms, attention = 2 * (4 + 2 * itemsize) * width, (4 + 5 * itemsize) * (query + _kv_width(model))
    experts = model.get("num_experts_per_tok") or 1
    inner = (
        experts * model["moe_intermediate_size"] if model.get("moe_intermediate_size") else model["intermediate_size"]
    )
    name = "moe" if model.get("moe_intermediate_size") else "mlp"
    return {"norm": norms, "attention": attention, name: 4 * itemsize * inner}


def embedding_parameters(model: Mapping[str, Any]) -> int:
    """Elements of the embedding, and of the head where it is not the same."""
    return model["vocab_size"] * model["hidden_size"] * (1 if model.get("tie_word_embeddings") else 2)


def expert_parameters(model: Mapping[str, Any]) -> int:
    """Elements of all experts of a mixture, without its routers; 0 of other models."""
    experts = next((model[name] for name in _EXPERTS if model.get(name)), 0)
    each = 3 * model["hidden_size"] * model["moe_intermediate_size"] if experts else 0
    return model["num_hidden_layers"] * experts * each


def adapter_parameters(model: Mapping[str, Any], rank: int, targets: Sequence[str]) -> int:
    """Elements of a LoRA adapter on the layers of these names; for none, on every linear layer but the head.

    In a mixture those of attention, and of `experts` A and B of each for what goes into it and comes out.
    """
    width: int = model["hidden_size"]
    heads, key, inner = model["num_attention_heads"], _kv_width(model), model.get("intermediate_size", 0)
    query = heads * (model.get("head_dim") or width // heads)
    sizes: dict[str, int] = {
        **dict(zip(_ATTENTION, (width + query, width + key, width + key, query + width), strict=True)),
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), width + inner),
    }
    if experts := next((model[name] for name in _EXPERTS if model.get(name)), 0):
        sizes = {name: size for name, size in sizes.items() if name in _ATTENTION}
    wanted = sum(size for name, size in sizes.items() if not targets or name in targets)
    if experts and "experts" in targets:
        wanted += experts * (2 * width + 3 * model["moe_intermediate_size"])
    return rank * model["num_hidden_layers"] * wanted


def _plan_of(config: Config) -> MemoryPlan:
    """Memory plan of the model in `model.path`, which may have its config.json alone; raises as `memory_plan`."""
    folder = Path(str(config.model.path))
    return memory_plan(config, model_facts(folder).config, num_parameters=stored_parameters(folder))


def _check_memory(plan: MemoryPlan, config: Config, gib: float) -> None:
    """Check that every role has room on a GPU of so many GiB; colocated ones are there in turn."""
    keys = {"engine rank": ("an engine rank", "engine.world_size", config.engine.world_size)}
    keys["server GPU"] = ("a server's GPU", "rollout.parallel.tp", config.rollout.parallel.tp)
    for role in (each for each in _OTHERS if has(config, each)):
        pool = home_of(config, role)
        size = f"a GPU of pool {pool}", f"placement.{role}.num_gpus", pool_size(config, pool)
        keys.setdefault(f"pool {pool}", size)
    for whose, parts in plan.groups():
        what, key, size = keys[whose]
        if (needs := sum(parts.values())) > gib:
            of = ", ".join(f"{name} {each:.1f}" for name, each in parts.items())
            raise PlanError(
                f"{what} takes {needs:.1f} GiB of a GPU that has {gib:g} ({of}); raise {key}={size}"
                + (", or lower engine.max_tokens_per_gpu" if whose == "engine rank" else "")
            )


def memory_facts(config: Config, gib: float | None = None, *, there: float | None = None) -> list[tuple[str, str]]:
    """Lines of the plan: memory of the model in `model.path`, which may have its config.json alone.

    `there` is what a GPU of this machine has, GiB; too little is said, and no error: a server makes do with less.

    Raises:
        PlanError: a role has no room on a GPU of `gib`; says what to change.
    """
    if config.model.path is None:
        return [("memory", "a small model, made on the spot")]
    try:
        plan = _plan_of(config)
    except KeyError as missing:
        return [("memory", f"unknown: config.json of {config.model.path} has no {missing}")]
    if gib is not None:
        _check_memory(plan, config, gib)
    phase, most = plan.fullest()
    verdict = "" if there is None else f" of {there:.1f}: it fits" if most <= there else f" of {there:.1f}: too much"
    return [*plan.lines(), ("a GPU at its fullest", f"{most:.1f} GiB ({phase}){verdict}")]


def colocated_cache_bytes(config: Config, gib: float | None) -> int | None:
    """Bytes of keys and values for which a GPU of so many GiB has room next to the engine, with a fifth to spare.

    What `rollout.kv_cache_bytes` says; else what all sequences of a step can need, or a quarter of the GPU. None: there
    is no room for server and engine at once, or that is not known: servers of other libraries take a share of a GPU,
    and what a reward model takes is in no plan.
    """
    if gib is None or config.rollout.backend != "embedded" or config.model.path is None or reward_models(config):
        return None
    try:
        plan = _plan_of(config)
    except (KeyError, OSError):
        return None
    rollout, batch = config.rollout, config.batch
    rows = min(rollout.max_num_seqs, math.ceil(batch.batch_size * batch.group_size / rollout.num_replicas))
    cache = rollout.kv_cache_bytes / _GIB or min(gib / 4, 1.1 * rows * plan.server["keys and values"])
    fits = sum(plan.engine.values()) + plan.server["weights"] + cache <= 0.8 * gib
    return round(cache * _GIB) if fits else None


def checkpoint_facts(config: Config) -> list[tuple[str, str]]:
    """Line of the plan: size of a checkpoint, and the seconds that it takes at the speed measured in `output_dir`.

    Master weights, two moments of AdamW and the model folder; with LoRA those of the adapter, and the folder.
    """
    if config.model.path is None:
        return []
    folder = Path(config.model.path)
    try:
        model = model_facts(folder).config
        count = stored_parameters(folder) or count_parameters(model)
    except KeyError:
        return []
    lora = config.engine.lora
    stepped = count if lora is None else adapter_parameters(model, lora.rank, lora.target_modules)
    gb = (12 * stepped + _BYTES.get(str(config.engine.precision), 2) * count) / 1e9
    speed = _write_gb_s(Path(config.output_dir or "."))
    seconds = "" if speed is None else f", about {max(gb / speed, 1.0):.0f} s at {speed:.1f} GB/s"
    return [("a checkpoint", f"{gb:.2f} GB{seconds}")]


def _write_gb_s(folder: Path) -> float | None:
    """Gigabytes a second that reach the disk of a folder, or of its nearest parent; None if it cannot be written."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    block = os.urandom(_PROBE_BYTES)
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            since = time.perf_counter()
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return len(block) / 1e9 / (time.perf_counter() - since)
    except OSError:
        return None


def memory_of_pools(config: Config) -> dict[str, dict[str, float]]:
    """By pool and role, GiB of a GPU; empty where the model's sizes are not known."""
    policies = policies_of(config).items()
    return {pool_of(policy, pool): roles for policy, own in policies for pool, roles in _memory_of_policy(own).items()}


def _memory_of_policy(config: Config) -> dict[str, dict[str, float]]:
    if config.model.path is None:
        return {}
    try:
        plan = _plan_of(config)
    except KeyError:
        return {}
    roles = {role: plan.engine[role] for role in _OTHERS if role in plan.engine}
    engine = {"policy": sum(plan.engine.values()) - sum(roles.values()), **roles}
    served = {"rollout": sum(plan.server.values())}
    pools: dict[str, dict[str, float]] = {name: dict(each) for name, each in plan.others.items()}
    return pools | ({ENGINE_POOL: engine | served} if plan.is_colocated else {ENGINE_POOL: engine, "rollout": served})


def count_parameters(model: Mapping[str, Any]) -> int:
    """Elements of a decoder by its `config.json`: Llama's shape, Qwen's biases and norms, and mixtures of experts.

    Raises:
        KeyError: a size is missing.
    """
    width, heads = model["hidden_size"], model["num_attention_heads"]
    size = model.get("head_dim") or width // heads
    query, key = heads * size, _kv_width(model)
    attention = width * (query + 2 * key) + query * width
    kind = str(model.get("model_type", ""))
    if model.get("attention_bias") or kind.startswith("qwen2"):
        attention += query + 2 * key
    if kind.startswith("qwen3"):
        attention += 2 * size
    experts = next((model[name] for name in _EXPERTS if model.get(name)), 0)
    feed_forward = width * experts if experts else 3 * width * model["intermediate_size"]  # routers alone
    blocks = model["num_hidden_layers"] * (attention + feed_forward + 2 * width)
    return embedding_parameters(model) + blocks + expert_parameters(model) + width


def learning_flops(config: Config, model: Mapping[str, Any]) -> float | None:
    """Floating-point operations that a rank of the policy's engine spends to learn from a token of its mini-batch.

    6 per parameter that a token meets (4 with a frozen base below an adapter; Kaplan et al., 2001.08361), without those
    of attention scores; shared by the ranks that hold one copy. None where `model` does not give its size.
    """
    key = next((name for name in _EXPERTS if model.get(name)), None)
    try:
        met = model if key is None else {**model, key: model["num_experts_per_tok"]}
        count = count_parameters(met)
    except KeyError:
        return None
    layout = config.engine.parallel
    return (4 if config.engine.lora is not None else 6) * count / (layout.tp * layout.pp * layout.cp * layout.sp)


def stored_parameters(folder: Path) -> int | None:
    """Elements of the folder's safetensors files, by their headers; None without such files."""
    total, files = 0, sorted(folder.glob("*.safetensors"))
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total if files else None


def _kv_width(model: Mapping[str, Any]) -> int:
    heads = model["num_attention_heads"]
    return model.get("num_key_value_heads", heads) * (model.get("head_dim") or model["hidden_size"] // heads)
