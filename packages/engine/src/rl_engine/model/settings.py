"""Settings of engines: those that backends cannot honour, and those left to the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_csrc.inference.decoder import longrope_limit
from rl_engine.batch.row_batch import CANDIDATES, RowBatch
from rl_engine.checkpoint import hf_folder
from rl_engine.errors import BatchError, ConfigError
from rl_engine.layers.logprobs import head_loss_obstacle
from rl_engine.types import EngineConfig, Fp8, Head, OptimizerKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_engine.distributed.world import World


def compute_device(config: EngineConfig, world: World) -> torch.device:
    """Device of the parameters between uses."""
    return torch.device("cpu") if config.cpu_offload else world.device


def refuse_fsdp_only(config: EngineConfig, backend: str) -> None:
    """Refuse what the fsdp backend alone can do.

    Raises:
        ConfigError: names the setting.
    """
    for name in ("torch_compile", "cpu_offload", "dropout", "freeze_vision"):
        if getattr(config, name):
            raise ConfigError(f"{name} is true and the {backend} backend has none; set it to false, or use fsdp.")


def refuse_parts(config: EngineConfig, backend: str) -> None:
    """Refuse what fsdp and megatron alone do to parts of layers.

    Raises:
        ConfigError: names the setting.
    """
    if config.treats_parts:
        raise ConfigError(
            f"recompute is {list(config.recompute)} and activation_offload is {config.activation_offload}; the "
            f"{backend} backend treats whole layers alone. Name no parts, or use fsdp or megatron."
        )


def check_float8(config: EngineConfig, backend: str, recipes: Sequence[Fp8]) -> bool:
    """Whether products are to be made in float8; refuses those that the backend has not.

    Raises:
        ConfigError: says which it has.
    """
    if config.fp8 not in (Fp8.OFF, *recipes):
        raise ConfigError(f"fp8 is {config.fp8}; the {backend} backend has {', '.join([Fp8.OFF, *recipes])}.")
    return config.fp8 != Fp8.OFF


def check_adapter(config: EngineConfig) -> None:
    """Refuse an adapter that would not be trained, or has nothing to be added to.

    Raises:
        ConfigError: says why.
    """
    if config.lora is not None and config.optimizer is None:
        raise ConfigError("A frozen engine's adapter would stay as it was made; leave lora out.")
    if config.lora is not None and hf_folder.block_size(config.model_path) is not None:
        raise ConfigError("lora is set and the folder's weights are quantised (fp8). Give the folder in bfloat16.")


def refuse_muon(config: EngineConfig, backend: str) -> None:
    """Refuse Muon if matrices are not separate parameters.

    Raises:
        ConfigError: says so.
    """
    if config.optimizer is not None and config.optimizer.kind != OptimizerKind.ADAMW:
        raise ConfigError(
            f"optimizer.kind is {config.optimizer.kind}; the {backend} backend shards AdamW alone. Use adamw, or fsdp."
        )


def shares_prefixes(config: EngineConfig, obstacle: str | None) -> bool:
    """Whether rows are to share their first tokens, where `obstacle` says what keeps them from it.

    Raises:
        ConfigError: `prefix_sharing` is true and they cannot.
    """
    if config.prefix_sharing and obstacle is not None:
        raise ConfigError(f"prefix_sharing is true and {obstacle}. Leave it out.")
    return config.prefix_sharing is not False and obstacle is None


def settings_status(config: EngineConfig, obstacle: str | None) -> dict[str, str]:
    """Settings that are left to the engine, as `Engine.check` returns them; `obstacle` keeps rows from sharing prompts.

    Raises:
        ConfigError: as `shares_prefixes`.
    """
    shares = "no" if config.prefix_sharing is False else f"no: {obstacle}"
    if shares_prefixes(config, obstacle):
        shares = "yes"
    found = {"prefix_sharing": shares}
    if config.optimizer is not None:
        if not config.dropout and (rates := hf_folder.model_dropout(config.model_path)):
            found["dropout"] = f"off: {rates}"
        separately = head_loss_obstacle(config)
        found["loss_in_head"] = "yes, of token-local losses" if separately is None else f"no: {separately}"
    return found


def check_candidates(count: int, vocab_size: int) -> None:
    """Refuse more candidates than there are tokens.

    Raises:
        ConfigError: there are not that many.
    """
    if count > vocab_size:
        raise ConfigError(f"num_candidates is {count}; the model's vocabulary has {vocab_size} entries.")


def check_columns(batch: RowBatch, vocab_size: int, head: Head) -> None:
    """Refuse token ids outside the vocabulary, and candidates that no head scores.

    Raises:
        BatchError: names the column.
    """
    batch.check_tokens(vocab_size)
    if batch.has(CANDIDATES) and head != Head.LM:
        raise BatchError(f"Column {CANDIDATES} needs a language-model head. Drop it.")


def check_lengths(lengths: Sequence[int], config: Any) -> None:
    """Check that rows fit the model's context, and that no row's positions depend on its neighbours (longrope).

    Args:
        lengths: Tokens of each row.
        config: The model's, of transformers.

    Raises:
        BatchError: a row is too long.
    """
    longest, context = max(lengths, default=0), getattr(config, "max_position_embeddings", None)
    if context is not None and longest > context:
        raise BatchError(f"A row has {longest} tokens; the model's context is {context}. Shorten the row.")
    limit = longrope_limit(getattr(config.get_text_config(), "rope_parameters", None))
    if limit is not None and longest > limit:
        raise BatchError(
            f"A row has {longest} tokens; beyond {limit} this model (longrope) turns all rows of a pass by other "
            "frequencies, so that log-probs and gradients would depend on micro-batches. Shorten the row."
        )
