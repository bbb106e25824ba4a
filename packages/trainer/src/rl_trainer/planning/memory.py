"""Memory plan: GiB that every role takes of a GPU, by the model's config.json and the run's layout; touches no GPU.

Engine: 4 bytes per parameter for the weights, 4 for the gradients and 8 for AdamW's moments (float32), cut over the
ranks, and two gathered blocks in the number format of the passes. Activations of the longest micro-batch are those of
arXiv 2205.05198, table 2, with flash attention: 34 bytes per token, layer and unit of width; with
`engine.activation_checkpointing` 2, and 34 for the block that is computed again. Logits, the allocator's slack and
CUDA itself come on top. Server: its weights, and keys and values of one sequence of the greatest length; it takes more
for keys and values where there is more, and lets requests wait where there is not.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_trainer.errors import PlanError
from rl_trainer.planning.plan import has_reference, longest_sequence, model_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rl_trainer.config import Config

_GIB = 2.0**30
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """GiB of a GPU, by role and what it is for."""

    num_parameters: int
    """Of the policy."""
    engine: Mapping[str, float]
    """Of one rank: `weights`, `gradients`, `optimizer`, `gathered blocks`, `activations`, and other models."""
    server: Mapping[str, float]
    """Of one GPU of a replica: `weights`, `keys and values`."""

    def lines(self) -> Iterator[tuple[str, str]]:
        """(what, how much) for the screen."""
        yield "parameters", f"{self.num_parameters:,}"
        for role, parts in (("memory, engine rank", self.engine), ("memory, server GPU", self.server)):
            of = ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items())
            yield role, f"{sum(parts.values()):.1f} GiB: {of}"


def memory_plan(config: Config, model: Mapping[str, Any], *, num_parameters: int | None = None) -> MemoryPlan:
    """What a run of `config` takes of every GPU.

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
    learns = 0 if engine.lora is not None else count / ranks / _GIB
    tokens = engine.max_tokens_per_gpu * width / _GIB
    parts = {
        "weights": 4 * count / ranks / _GIB,
        "gradients": 4 * learns,
        "optimizer": 8 * learns,
        "gathered blocks": 2 * precision * (count - embeddings) / layers / _GIB if ranks > 1 else 0.0,
        "activations": tokens * ((2 * layers + 34) if engine.activation_checkpointing else 34 * layers),
    }
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
    return MemoryPlan(num_parameters=count, engine=parts, server=server)


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


def memory_facts(config: Config, gib: float | None = None) -> list[tuple[str, str]]:
    """(what, how much) for the screen, of the model in `model.path`, which may have its config.json alone.

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
    lines = [*plan.lines()]
    if config.teacher is not None and config.teacher.url is None:
        size = stored_parameters(Path(config.teacher.path))
        each = "unknown" if size is None else f"{4 * size / config.engine.world_size / _GIB:.1f} GiB"
        lines.append(("the teacher's engine rank", each))
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
