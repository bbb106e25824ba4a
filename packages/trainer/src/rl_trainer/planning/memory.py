"""Memory plan: GiB that every role takes of a GPU, by the model's config.json and the run's layout; touches no GPU.

Engine: 4 bytes per parameter for the weights, 4 for the gradients and 8 for AdamW's moments (float32), cut over the
ranks, and two gathered blocks in the number format of the passes; with LoRA, gradients and moments of the adapter
alone. Activations of the longest micro-batch are what torch keeps of a block's norms, heads and MLP, within a fifth;
with `engine.activation_checkpointing` the inputs of all blocks, and the whole of the one that is computed again.
Logits, the allocator's slack and CUDA itself come on top. Server: its weights, and keys and values of one sequence of
the greatest length; it takes more for keys and values where there is more, and lets requests wait where there is not.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_trainer.errors import PlanError
from rl_trainer.planning.plan import has_reference, longest_sequence, model_config, teacher_folders

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rl_trainer.config import Config

_GIB = 2.0**30
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory plan: GiB of a GPU, by role and purpose."""

    num_parameters: int
    """Parameters of the policy."""
    engine: Mapping[str, float]
    """GiB of an engine rank: `weights`, `gradients`, `optimizer`, `gathered blocks`, `activations`, other models."""
    server: Mapping[str, float]
    """GiB of a GPU of a replica: `weights`, `keys and values`."""
    is_colocated: bool = False
    """Whether both have the same GPU in turn."""

    def fullest(self) -> tuple[str, float]:
        """Peak phase of a step, and the GiB that a GPU holds in it."""
        phases = {"training": sum(self.engine.values()), "generation": sum(self.server.values())}
        if self.is_colocated:  # the engine sends from the GPU what the server takes there
            phases["weight sync"] = self.engine["weights"] + self.engine.get("adapter", 0.0) + self.server["weights"]
        return max(phases.items(), key=lambda phase: phase[1])

    def lines(self) -> Iterator[tuple[str, str]]:
        """Lines of the plan: (role, GiB)."""
        yield "parameters", f"{self.num_parameters:,}"
        for role, parts in (("memory, engine rank", self.engine), ("memory, server GPU", self.server)):
            of = ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items())
            yield role, f"{sum(parts.values()):.1f} GiB: {of}"


def memory_plan(config: Config, model: Mapping[str, Any], *, num_parameters: int | None = None) -> MemoryPlan:
    """Memory plan of a configuration.

    Args:
        config: Of the run.
        model: The `config.json` of the policy.
        num_parameters: Of the policy, if they were counted; None: by its shapes.

    Raises:
        KeyError: the model's description lacks a size.
    """
    count = count_parameters(model) if num_parameters is None else num_parameters
    ranks, engine = config.engine.world_size, config.engine
    width, layers, precision = model["hidden_size"], model["num_hidden_layers"], _BYTES[str(engine.precision)]
    embeddings = model["vocab_size"] * width * (1 if model.get("tie_word_embeddings") else 2)
    adapter = 0 if engine.lora is None else adapter_parameters(model, engine.lora.rank, engine.lora.target_modules)
    learns = (count if engine.lora is None else adapter) / ranks / _GIB
    tokens = max(engine.max_tokens_per_gpu, longest_sequence(config)[0]) / _GIB
    kept, block = precision * width, block_activations(model, precision)
    parts = {
        "weights": 4 * count / ranks / _GIB,
        "gradients": 4 * learns,
        "optimizer": 8 * learns,
        "gathered blocks": 2 * precision * (count - embeddings) / layers / _GIB if ranks > 1 else 0.0,
        "activations": tokens * (layers * kept + block if engine.activation_checkpointing else layers * block),
    }
    if engine.lora is not None:
        parts["adapter"] = 4 * learns
    if has_reference(config) and engine.lora is None:
        parts["reference"] = 4 * count / ranks / _GIB
    if config.critic is not None:
        parts["critic"] = 16 * count / ranks / _GIB
    served = config.rollout.parallel.tp * config.rollout.parallel.pp
    per_token = _BYTES.get(config.rollout.dtype, precision) * 2 * layers * _kv_width(model)
    server = {
        "weights": _BYTES.get(config.rollout.dtype, precision) * count / served / _GIB,
        "keys and values": per_token * longest_sequence(config)[0] / served / _GIB,
    }
    is_colocated = bool(config.rollout.colocated)
    return MemoryPlan(num_parameters=count, engine=parts, server=server, is_colocated=is_colocated)


def block_activations(model: Mapping[str, Any], itemsize: int) -> int:
    """Bytes per token that the backward pass of one block needs; norms compute in float32, products in `itemsize`.

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
    return norms + attention + 4 * itemsize * inner


def adapter_parameters(model: Mapping[str, Any], rank: int, targets: Sequence[str]) -> int:
    """Elements of a LoRA adapter on the layers of these names; on every linear layer but the head for none."""
    width: int = model["hidden_size"]
    heads, key, inner = model["num_attention_heads"], _kv_width(model), model["intermediate_size"]
    query = heads * (model.get("head_dim") or width // heads)
    sizes: dict[str, int] = {
        "q_proj": width + query,
        "k_proj": width + key,
        "v_proj": width + key,
        "o_proj": query + width,
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), width + inner),
    }
    wanted = sum(size for name, size in sizes.items() if not targets or name in targets)
    return rank * model["num_hidden_layers"] * wanted


def check_memory(plan: MemoryPlan, config: Config, gib: float) -> None:
    """Check that every role has room on a GPU of so many GiB; colocated ones are there in turn.

    Raises:
        PlanError: one has not; says what to change.
    """
    for role, parts, key, size in (
        ("an engine rank", plan.engine, "engine.world_size", config.engine.world_size),
        ("a server's GPU", plan.server, "rollout.parallel.tp", config.rollout.parallel.tp),
    ):
        if (needs := sum(parts.values())) > gib:
            of = ", ".join(f"{name} {each:.1f}" for name, each in parts.items())
            raise PlanError(
                f"{role} takes {needs:.1f} GiB of a GPU that has {gib:g} ({of}); raise {key}={size}"
                + (", or lower engine.max_tokens_per_gpu" if key == "engine.world_size" else "")
            )


def memory_facts(config: Config, gib: float | None = None, *, there: float | None = None) -> list[tuple[str, str]]:
    """Lines of the plan: memory of the model in `model.path`, which may have its config.json alone.

    `there` is what a GPU of this machine has, GiB; too little is said, and no error: a server makes do with less.

    Raises:
        PlanError: a role has no room on a GPU of `gib`.
    """
    if config.model.path is None:
        return [("memory", "a small model, made on the spot")]
    folder = Path(config.model.path)
    try:
        plan = memory_plan(config, model_config(folder), num_parameters=stored_parameters(folder))
    except KeyError as missing:
        return [("memory", f"unknown: config.json of {folder} has no {missing}")]
    if gib is not None:
        check_memory(plan, config, gib)
    phase, most = plan.fullest()
    verdict = "" if there is None else f" of {there:.1f}: it fits" if most <= there else f" of {there:.1f}: too much"
    lines = [*plan.lines(), ("a GPU at its fullest", f"{most:.1f} GiB ({phase}){verdict}")]
    for source, path in teacher_folders(config.teacher).items():
        size = stored_parameters(path)
        each = "unknown" if size is None else f"{4 * size / config.engine.world_size / _GIB:.1f} GiB"
        lines.append((f"the teacher's engine rank{source and f' ({source})'}", each))
    return lines


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
    if experts:
        feed_forward = experts * 3 * width * model["moe_intermediate_size"] + width * experts
    else:
        feed_forward = 3 * width * model["intermediate_size"]
    embeddings = model["vocab_size"] * width * (1 if model.get("tie_word_embeddings") else 2)
    return embeddings + model["num_hidden_layers"] * (attention + feed_forward + 2 * width) + width


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
