"""Refuses settings that no backend can honour, before anything starts."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from rl_engine.errors import ConfigError
from rl_engine.types import Head, LoraExport, MatmulPrecision, ModelInit, Precision

if TYPE_CHECKING:
    from enum import StrEnum

    from rl_engine.types import EngineConfig, OptimizerConfig

_NAMED: dict[str, type[StrEnum]] = {
    "precision": Precision,
    "matmul_precision": MatmulPrecision,
    "head": Head,
    "init": ModelInit,
}


def check_settings(config: EngineConfig) -> None:
    """Refuse names that are not among the allowed ones, and numbers that cannot be meant.

    Raises:
        ConfigError: names the setting, the value and what is allowed.
    """
    for name, allowed in _NAMED.items():
        if getattr(config, name) not in list(allowed):
            raise ConfigError(f"{name} is {str(getattr(config, name))!r}; allowed are {', '.join(allowed)}.")
    if config.lora is not None and config.lora.export not in list(LoraExport):
        raise ConfigError(f"lora.export is {str(config.lora.export)!r}; allowed are {', '.join(LoraExport)}.")
    _need(config.temperature > 0 and isfinite(config.temperature), "temperature", config.temperature, "above 0")
    _need(config.max_tokens_per_gpu >= 1, "max_tokens_per_gpu", config.max_tokens_per_gpu, "1 or more")
    _need(config.timeout_s > 0, "timeout_s", config.timeout_s, "above 0")
    _need(config.num_candidates >= 0, "num_candidates", config.num_candidates, "0 (none) or more")
    for name in ("entropy", "sum_pi_squared", "num_candidates"):
        if getattr(config, name) and config.head != Head.LM:
            raise ConfigError(f"{name} is {getattr(config, name)}; it needs head=lm, and head is {config.head}.")
    if config.optimizer is not None:
        _check_optimizer(config.optimizer)


def refuse_fsdp_only(config: EngineConfig, backend: str) -> None:
    """Refuse what the fsdp backend alone can do.

    Raises:
        ConfigError: names the setting.
    """
    if config.lora is not None:
        raise ConfigError(f"The {backend} backend has no LoRA adapters; leave lora out, or use the fsdp backend.")
    for name in ("torch_compile", "cpu_offload"):
        if getattr(config, name):
            raise ConfigError(f"{name} is true and the {backend} backend has none; set it to false, or use fsdp.")


def shares_prefixes(config: EngineConfig, obstacle: str | None) -> bool:
    """Whether rows are to share prompts, where `obstacle` says what keeps them from it.

    Raises:
        ConfigError: they are told to and cannot.
    """
    if config.prefix_sharing and obstacle is not None:
        raise ConfigError(f"prefix_sharing is true and {obstacle}. Leave it out.")
    return config.prefix_sharing is not False and obstacle is None


def prefix_sharing_status(config: EngineConfig, obstacle: str | None) -> dict[str, str]:
    """What `Engine.check` returns."""
    if shares_prefixes(config, obstacle):
        return {"prefix_sharing": "yes"}
    return {"prefix_sharing": "no" if config.prefix_sharing is False else f"no: {obstacle}"}


def check_candidates(count: int, vocab_size: int) -> None:
    """Refuse more candidates than there are tokens.

    Raises:
        ConfigError: there are not that many.
    """
    if count > vocab_size:
        raise ConfigError(f"num_candidates is {count}; the model's vocabulary has {vocab_size} entries.")


def _check_optimizer(config: OptimizerConfig) -> None:
    _need(config.lr >= 0 and isfinite(config.lr), "optimizer.lr", config.lr, "0 or more")
    _need(all(0 <= beta < 1 for beta in config.betas), "optimizer.betas", config.betas, "from 0 to below 1")
    _need(config.eps > 0, "optimizer.eps", config.eps, "above 0")
    _need(config.weight_decay >= 0, "optimizer.weight_decay", config.weight_decay, "0 or more")
    _need(config.max_grad_norm > 0, "optimizer.max_grad_norm", config.max_grad_norm, "above 0 (inf: no clipping)")
    _need(config.warmup_steps >= 0, "optimizer.warmup_steps", config.warmup_steps, "0 or more")
    _need(0 <= config.min_lr_ratio <= 1, "optimizer.min_lr_ratio", config.min_lr_ratio, "from 0 to 1")
    if config.total_steps is None:
        _need(config.min_lr_ratio == 0, "optimizer.min_lr_ratio", config.min_lr_ratio, "0 without total_steps")
    else:
        _need(config.total_steps >= 1, "optimizer.total_steps", config.total_steps, "1 or more, or None")


def _need(is_met: bool, name: str, value: object, allowed: str) -> None:
    if not is_met:
        raise ConfigError(f"{name} is {value}; it must be {allowed}.")
