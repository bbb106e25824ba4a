"""The batch plan: every count of a run, computed from the configuration and checked before anything starts."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from rl_engine.types import EngineConfig, Head, LoraConfig, MatmulPrecision, OptimizerConfig, Precision
from rl_rollout.types import ServerConfig
from rl_trainer.algorithms import estimator_named, loss_named

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console

    from rl_trainer.config import Config
    from rl_trainer.config.schema import CriticSection, TeacherSection


_ONE_GENERATION = ("single_turn", "reasoning_gym")
"""Loops whose completions are one generation, at most `rollout.max_new_tokens` long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """What one training step consists of."""

    prompts: int
    """Prompts per step."""
    completions: int
    """Completions per step."""
    optimizer_steps: int
    """Optimizer steps per step."""
    completions_per_optimizer_step: int
    """Completions that one gradient is made of."""
    completions_per_rank: int
    """Completions of one optimizer step on one engine rank."""
    max_sequence_tokens: int
    """Longest prompt plus completion."""
    total_completions: int
    """Completions of the whole run."""

    def lines(self) -> Iterator[tuple[str, str]]:
        """(what, how many) for the screen."""
        yield "prompts per step", f"{self.prompts}"
        yield "completions per step", f"{self.completions}"
        yield "optimizer steps per step", f"{self.optimizer_steps} of {self.completions_per_optimizer_step} completions"
        yield "completions per engine rank", f"{self.completions_per_rank} per optimizer step"
        yield "longest sequence", f"{self.max_sequence_tokens} tokens"
        yield "completions in all", f"{self.total_completions:,}"


def longest_sequence(config: Config) -> tuple[int, str]:
    """Tokens of the longest sequence that a run may make, and the keys that they come from.

    A loop of several turns is bounded by its own `max_completion_tokens`, or else by what a server takes.
    """
    prompt, agent = config.data.max_prompt_tokens, config.agent
    if agent.loop in _ONE_GENERATION:
        return prompt + config.rollout.max_new_tokens, "data.max_prompt_tokens + rollout.max_new_tokens"
    if (completion := agent.options.get("max_completion_tokens")) is not None:
        return prompt + int(completion), "data.max_prompt_tokens + agent.options.max_completion_tokens"
    return config.rollout.max_model_len, f"(agent.loop={agent.loop} sets no bound) rollout.max_model_len"


def has_reference(config: Config) -> bool:
    """Whether anything is compared with the start policy, or with what it has become."""
    return config.algorithm.kl_coef > 0 or has_process_rewards(config)


def has_old_pass(config: Config) -> bool:
    """Whether the engine scores a batch before it is learned from (`algorithm.old_logprobs=recompute`).

    With one mini-batch the update's own pass tells the same, unless something reads them before.
    """
    algorithm, batch = config.algorithm, config.batch
    needs = estimator_named(algorithm.advantage).needs
    is_read_before = (
        bool({"ratio", "logprobs", "sum_pi_squared"} & {*needs})
        or (algorithm.kl_in_reward and algorithm.kl_coef > 0)
        or loss_named(algorithm.loss).selects_tokens
        or (algorithm.rejection != "none" and algorithm.rejection_counts == "after")
    )
    return algorithm.old_logprobs == "recompute" and (batch.mini_batch_size < batch.batch_size or is_read_before)


def has_process_rewards(config: Config) -> bool:
    """Whether the critic is an implicit process reward model."""
    return "process_rewards" in estimator_named(config.algorithm.advantage).needs


def memory_estimate(config: Config) -> str:
    """What the weights take, and the cache of a server that is full, in words; activations and buffers come on top.

    The engine's copy is float32 (4 bytes per parameter) with gradients (4) and AdamW's moments (8), cut over its ranks.
    The cache is that of `rollout.max_num_seqs` sequences of the greatest length, in bfloat16; a server makes do with
    less, and lets requests wait.
    """
    if config.model.path is None:
        return "a small model, made on the spot"
    count = num_parameters(Path(config.model.path))
    if count is None:
        return "unknown: the model folder has no safetensors files"
    ranks, gb = config.engine.world_size, 1e-9 * count
    per_rank = (16 * gb if config.engine.lora is None else 4 * gb) / ranks
    parts = [f"engine {per_rank:.1f} GB per rank"]
    parts += [f"reference {4 * gb / ranks:.1f} GB"] if has_reference(config) and config.engine.lora is None else []
    if config.teacher is not None and config.teacher.url is None:
        size = num_parameters(Path(config.teacher.path))
        parts += ["teacher unknown" if size is None else f"teacher {4e-9 * size / ranks:.1f} GB"]
    parts += [f"critic {16 * gb / ranks:.1f} GB"] if config.critic is not None else []
    return (
        f"{count / 1e6:,.1f} M parameters: {', '.join(parts)}, weights and optimizer alone; {_cache_estimate(config)}"
    )


def _cache_estimate(config: Config) -> str:
    model, longest = model_config(Path(str(config.model.path))), longest_sequence(config)[0]
    try:
        heads = model.get("num_key_value_heads", model["num_attention_heads"])
        width = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
        size = 4 * model["num_hidden_layers"] * heads * width * longest * config.rollout.max_num_seqs
    except KeyError as missing:
        return f"keys and values unknown: config.json has no {missing}"
    return f"keys and values {1e-9 * size:.1f} GB for {config.rollout.max_num_seqs} sequences of {longest} tokens"


def num_parameters(folder: Path) -> int | None:
    """Elements of the folder's safetensors files, by their headers; None without such files."""
    total, files = 0, sorted(folder.glob("*.safetensors"))
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total if files else None


def model_config(folder: Path) -> dict[str, Any]:
    """Of the language model, which a model for more than language keeps in a part of its own."""
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values | values.get("text_config", {})


def actor_config(config: Config, model_path: Path) -> EngineConfig:
    """What the policy's engine is built from."""
    algorithm, lora = config.algorithm, config.engine.lora
    num_idle = config.critic.warmup_steps if config.critic is not None else 0
    return replace(
        _trained_config(config, model_path, config.engine.lr, num_idle=num_idle),
        lora=LoraConfig(**asdict(lora)) if lora is not None else None,
        entropy=algorithm.entropy_coef > 0,
        sum_pi_squared="sum_pi_squared" in estimator_named(algorithm.advantage).needs,
        router_aux_loss_coef=config.engine.router_aux_loss_coef,
    )


def frozen_config(config: Config, model_path: Path, num_candidates: int = 0) -> EngineConfig:
    """What the engine of a reference or a teacher is built from."""
    trained = _trained_config(config, model_path, config.engine.lr)
    return replace(trained, optimizer=None, num_candidates=num_candidates)


def critic_config(config: Config, section: CriticSection, model_path: Path) -> EngineConfig:
    """What the value function's engine, or the process reward model's, is built from."""
    path = Path(section.path) if section.path is not None else model_path
    trained = _trained_config(config, path, section.lr)
    return trained if has_process_rewards(config) else replace(trained, head=Head.VALUE)


def candidates_of(teacher: TeacherSection) -> int:
    """Tokens of each place whose log-probs are asked of the teacher."""
    return 0 if teacher.divergence == "reverse" else teacher.num_candidates


def _trained_config(config: Config, model_path: Path, lr: float, *, num_idle: int = 0) -> EngineConfig:
    """What every trained engine of a job has in common; one that is idle at first learns in fewer steps."""
    section = config.engine
    num_updates = config.batch.batch_size // config.batch.mini_batch_size
    optimizer = OptimizerConfig(
        lr=lr,
        betas=section.betas,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        warmup_steps=section.lr_warmup_steps,
        total_steps=(config.steps - num_idle) * num_updates if section.lr_schedule == "cosine" else None,
    )
    precision, _, matmul = section.precision.partition("_")
    return EngineConfig(
        model_path=str(model_path),
        optimizer=optimizer,
        parallel=section.parallel,
        precision=Precision(precision),
        matmul_precision=MatmulPrecision(matmul or "highest"),
        max_tokens_per_gpu=config.batch.max_tokens_per_gpu,
        temperature=config.rollout.temperature,
        activation_checkpointing=section.activation_checkpointing,
        async_checkpoints=section.async_checkpoints,
        seed=config.seed,
        timeout_s=config.timeout_s,
    )


def server_config(config: Config, model_path: Path) -> ServerConfig:
    """What one rollout server is built from; it computes in the number format that the engine computes and sends in."""
    return ServerConfig(
        model_path=str(model_path),
        max_model_len=config.rollout.max_model_len,
        max_num_seqs=config.rollout.max_num_seqs,
        dtype=config.engine.precision.partition("_")[0],  # how the engine multiplies is its own matter
        parallel=config.rollout.parallel,
        options=config.rollout.options,
        seed=config.seed,
        timeout_s=config.timeout_s,
    )


def show_plan(console: Console, plan: BatchPlan, facts: Iterable[tuple[str, str]]) -> None:
    """Print what will run, before it does."""
    table = Table(title="batch plan", show_header=False)
    for name, value in (*facts, *plan.lines()):
        table.add_row(name, value)
    console.print(table)
